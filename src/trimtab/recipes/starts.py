"""The record of a run's starts, `starts.json`: what the run began with, and what each later start found and changed.

The first start's entry is never rewritten. What is no record of ours is refused, and not written over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trimtab.config.keys import settings
from trimtab.config.load import load_config
from trimtab.config.problems import without_secrets
from trimtab.config.schema import Config
from trimtab.config.secrets import refuse_secrets
from trimtab.errors import RequestError
from trimtab.recipes.fingerprint import before_data, of_data
from trimtab.recipes.run_folder import STARTS

if TYPE_CHECKING:
    from trimtab.placement import PlacementPlan
    from trimtab.recipes.recipe import Prepared

FORMAT = 1


@dataclass
class Start:
    """One start of a run: what it was asked, and what shapes it besides."""

    config: Config
    facts: dict[str, Any]
    known: bool = True
    """False for a run of an earlier version: there is only what its config.yaml, plan.json and data.json tell."""

    @classmethod
    def now(cls, config: Config, plan: PlacementPlan) -> Start:
        return cls(config, before_data(config, plan))

    def read(self, prepared: Prepared) -> None:
        """The rows are there: note what they are."""
        self.facts |= of_data(prepared)

    def as_dict(self) -> dict[str, Any]:
        refuse_secrets(self.config)
        return {"config": self.config.model_dump(), "facts": self.facts}


def read_starts(folder: Path) -> dict[str, Any] | None:
    """The record of a run's starts; None where there is none. What is no record is not ours to write over."""
    file = folder / STARTS
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] == FORMAT:
            return _checked(found)
        why = f"its format is {found['format']!r}, and this version knows {FORMAT}"
    except FileNotFoundError:
        return None
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        why = f"it cannot be read ({type(error).__name__}: {without_secrets(str(error))[:100]})"
    raise RequestError.of(
        f"{file}: not a record of a run's starts",
        f"{why}; a run that goes on is compared with what it began with",
        "put the file back as it was; or move it away: then config.yaml, plan.json and data.json are compared alone",
    )


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """The record as it is, after a look at all that is read of it; what is missing raises."""
    for start in (found["began"], found["now"]):
        config, facts = start["config"], start["facts"]
        sections = [config[key.rpartition(".")[0]] for key in settings() if key.rpartition(".")[0] in config]
        _all_of(dict, config, facts, *sections)
        if "plan" in facts:
            plan = facts["plan"]
            plan["precision"], plan["weight_precision"]
            _all_of(int, plan["processes"], plan["step_rows"])
            _all_of(bool, plan["sharded"])
        for part in ("train", "eval"):
            if part in facts:
                _all_of(int, facts[part]["rows"])
                facts[part]["digest"]
        if facts.get("model") is not None:
            facts["model"]["read"]
            _all_of(dict, facts["model"]["files"])
        for files in facts.get("files", {}).values():
            _all_of(dict, files)
            _all_of(int, *(entry["bytes"] for entry in files.values()))
        _all_of(dict, *(facts.get(name, {}) for name in ("rewards", "versions")))
    _all_of(list, found["went_on"])
    return found


def _all_of(kind: type, *values: Any) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"a {type(value).__name__} where a {kind.__name__} belongs")


def kept_start(home: Path, record: Mapping[str, Any] | None) -> Start | None:
    if record is not None:
        return Start(_lenient(record["now"]["config"], home), dict(record["now"]["facts"]))
    if not (home / "config.yaml").is_file():
        return None
    config = load_config(home / "config.yaml", [])
    facts: dict[str, Any] = {}
    plan, data = _json(home / "plan.json"), _json(home / "data.json")
    processes = None if plan is None else plan.get("processes")
    if plan is not None and type(processes) is int:
        training = config.training
        facts["plan"] = {
            "processes": processes,
            "step_rows": training.batch_size * training.gradient_accumulation_steps * processes,
            "precision": plan.get("precision"),
            "weight_precision": plan.get("weight_precision"),
            "sharded": plan.get("strategy") == "sharded",
        }
    for part, name in (("train", "rows_train"), ("eval", "rows_eval")):
        if data is not None and isinstance(data.get(name), int):
            facts[part] = {"rows": data[name], "digest": None}
    return Start(config, facts, known=False)


def _lenient(kept: Mapping[str, Any], home: Path) -> Config:
    """A record's settings, without those that this version no longer has."""
    known: dict[str, Any] = {}
    for key in settings():
        section, _, leaf = key.rpartition(".")
        source = kept.get(section, {}) if section else kept
        if leaf in source:
            (known.setdefault(section, {}) if section else known)[leaf] = source[leaf]
    try:
        return Config.model_validate(known)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError.of(
            f"{home / STARTS}: {'.'.join(map(str, first['loc']))} is not what this version takes ({first['msg']})",
            "a run that goes on is compared with what it began with",
            "resume it with the version that it was begun with",
        ) from None


def _json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
