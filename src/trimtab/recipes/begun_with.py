"""Whether a resumed request goes on soundly with what its run began with: said, or refused with all differences.

Writes nothing. Which change means what is config/going_on.py; what is not in the settings is told by fingerprint.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.config.facts import keeps_best, value_of_setting
from trimtab.config.going_on import change_of
from trimtab.config.keys import settings
from trimtab.config.load import load_config
from trimtab.config.problems import ConfigError, without_secrets
from trimtab.config.schema import Config
from trimtab.errors import RequestError, some_of
from trimtab.files import plain_value
from trimtab.recipes.resumed_length import length_change
from trimtab.recipes.starts import Start, kept_start, read_starts
from trimtab.redaction import hiding

if TYPE_CHECKING:
    pass

_LONGEST = 60


@dataclass
class Differences:
    """What is not as it was, sorted by what it means."""

    refused: list[tuple[str, str, str]] = field(default_factory=list)
    """Setting or thing, what it was, what it is now."""
    open: list[tuple[str, str, str]] = field(default_factory=list)
    """Names of what is read, which do not matter where the content turns out to be the same."""
    said: list[str] = field(default_factory=list)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Every setting that is another, as the run's record keeps it."""


class GoingOn:
    """A request that goes on from a checkpoint, beside what its run began with."""

    def __init__(
        self, checkpoint: Path, home: Path, earlier: Start, record: Mapping[str, Any] | None
    ) -> None:
        self.checkpoint, self.home, self.earlier, self.record = checkpoint, home, earlier, record
        self.found = Differences()

    @classmethod
    def of(cls, checkpoint: Path) -> GoingOn | None:
        """The start before this one of the run that the checkpoint belongs to; None where nothing tells of it."""
        home = checkpoint.absolute().parent.parent
        record = read_starts(home)
        earlier = kept_start(home, record)
        return cls(checkpoint, home, earlier, record) if earlier is not None else None

    def check_request(self, now: Start) -> None:
        """Compare what can be told before the data is read; everything that is not sound is refused at once."""
        was, found, hide = self.earlier, self.found, hiding()
        for key in settings():
            old, new = value_of_setting(was.config, key), value_of_setting(now.config, key)
            # The record holds no secret, nor what looks like one: a prompt that has an address with a login in it.
            if old == new or old == plain_value(new, of_text=hide):
                continue
            if key not in ("training.resume", "overwrite"):
                found.changed[key] = {"was": old, "now": new}
            self._judge(key, old, new, now)
        self._compare_steps(now)
        self._compare_facts(now)
        if found.refused:
            self._refuse(now, [*found.refused, *found.open, *self._changed_files(now)])

    def _judge(self, key: str, old: Any, new: Any, now: Start) -> None:
        found, was = self.found, self.earlier
        kind = change_of(key, was.config, now.config)
        told = (key, _shown(old), _shown(new))
        if (key == "grpo.reward" or (key.startswith("data.") and kind == "content")) and self._accepts(
            key, now
        ):
            found.said.append(f"! {key} was {told[1]}, is now {told[2]}, and is taken from here on")
        elif kind == "kept" or (kind in ("content", "placed") and not was.known):
            found.refused.append(told)
        elif kind == "held_out" and keeps_best(was.config) and keeps_best(now.config):
            why = (
                "(the best checkpoint is chosen by the loss on it; training.keep_best=false lets go of that)"
            )
            found.refused.append((key, _shown(old), f"{_shown(new)} {why}"))
        elif kind == "length":
            if key == "training.max_steps" or now.config.training.max_steps is None:
                refusal, say = length_change(self.checkpoint, was.config, now.config)
                found.refused += [(key, _shown(old), f"{_shown(new)} {refusal}")] if refusal else []
                found.said += [line for line in say if line not in found.said]
        elif kind == "content":
            found.open.append(told)
        elif kind in ("free", "computed", "held_out") and key not in (
            "training.resume",
            "overwrite",
            "output_dir",
        ):
            how = "; computed in another way, equal up to rounding" if kind == "computed" else ""
            found.said.append(f"{key} was {told[1]}, is now {told[2]}{how}")

    def _accepts(self, key: str, now: Start) -> bool:
        return now.config.training.resume_changed in ("both", "reward" if key.startswith("grpo.") else "data")

    def _refuse_unless(self, kind: Literal["data", "reward"], told: tuple[str, str, str], now: Start) -> None:
        """Refused, unless the request names it as changed: then it is said, and taken."""
        if now.config.training.resume_changed in ("both", kind):
            self.found.said.append(f"! {told[0]}: {told[1]} before, {told[2]} now, taken from here on")
        else:
            self.found.refused.append(told)

    def _compare_steps(self, now: Start) -> None:
        """Rows of a step: the place in the data is counted in steps, so their product has to stay."""
        found, was = self.found, self.earlier.facts.get("plan", {})
        is_now = now.facts["plan"]
        before, after = _factors(self.earlier, was), _factors(now, is_now)
        if before == after or not was:
            return
        if was["step_rows"] != is_now["step_rows"]:
            fits = was["step_rows"] / (now.config.training.batch_size * is_now["processes"])
            way = (
                f"; training.gradient_accumulation_steps={fits:.0f} makes it so"
                if fits % 1 == 0 and fits
                else ""
            )
            found.refused.append(("rows of a step", before, f"{after}{way}"))
        elif now.config.training.group_by_length and was["processes"] != is_now["processes"]:
            why = "(training.group_by_length puts rows together by it)"
            found.refused.append(("rows of a step", before, f"{after} {why}"))
        else:
            found.said.append(
                f"a step's rows were {before}, are now {after}: the same rows, equal up to rounding"
            )

    def _compare_facts(self, now: Start) -> None:
        found, was, facts = self.found, self.earlier.facts, now.facts
        plan = was.get("plan", {})
        for name, shown in (
            ("precision", "precision of the computation"),
            ("weight_precision", "weights' precision"),
        ):
            if plan and plan[name] != facts["plan"][name]:
                found.refused.append((shown, plan[name], facts["plan"][name]))
        if plan and plan["sharded"] != facts["plan"]["sharded"]:
            kinds = {True: "sharded over processes", False: "whole in each process"}
            found.refused.append(
                ("weights in a checkpoint", kinds[plan["sharded"]], kinds[facts["plan"]["sharded"]])
            )
        self._compare_speed(plan.get("speed"), facts["plan"].get("speed", {}))
        model, is_now = was.get("model"), facts["model"]
        if model and is_now and model["read"] == is_now["read"] and model["files"] != is_now["files"]:
            names = _differing(model["files"], is_now["files"])
            found.refused.append(
                ("the base model's files", "as the run began", f"another {some_of(names, 4)}")
            )
        elif (model is None) != (is_now is None) and self.earlier.known:
            found.refused += [told for told in found.open if told[0] in ("model.name", "model.revision")]
        rewards = was.get("rewards", {})
        for name in sorted(rewards.keys() & facts["rewards"].keys()):
            if rewards[name] != facts["rewards"][name]:
                self._refuse_unless(
                    "reward", (f"the source of reward {name}", "as the run began", "another"), now
                )
        before = was.get("versions", {})
        newer = [f"{n} {before[n]} → {v}" for n, v in facts["versions"].items() if before.get(n, v) != v]
        if newer:
            found.said.append(f"note: other versions than before: {', '.join(newer)}")
        if not self.earlier.known:
            found.said.append(
                f"{self.home} was begun by an earlier version: compared with what its config.yaml, plan.json and "
                "data.json tell; whether rows, model files and rewards have the same content is not known"
            )

    def _compare_speed(self, was: Any, is_now: Mapping[str, Any]) -> None:
        """Another machine may compute a step in another way, with no setting changed."""
        if not isinstance(was, Mapping) or any(key.startswith("speed.") for key in self.found.changed):
            return
        others = [
            f"{part} {_shown(was.get(part))} → {_shown(way)}"
            for part, way in is_now.items()
            if was.get(part) != way
        ]
        if others:
            told = ", ".join(others)
            self.found.said.append(f"a step is computed otherwise than before, equal up to rounding: {told}")

    def check_data(self, now: Start) -> None:
        """Compare the rows; names of sources that have changed do not matter where the content is the same."""
        found, was, facts = self.found, self.earlier.facts, now.facts
        if (old := was.get("train")) and not _same_rows(old, facts["train"]):
            self._refuse_unless("data", ("rows to train on", _rows(old), _rows(facts["train"], old)), now)
        if (old := was.get("eval")) and not _same_rows(old, facts["eval"]):
            told = ("held-out rows", _rows(old), _rows(facts["eval"], old))
            if keeps_best(self.earlier.config) and keeps_best(now.config):
                self._refuse_unless("data", told, now)
            else:
                found.said.append(f"{told[0]} were {told[1]}, are now {told[2]}")
        if was.get("template") and was["template"] != facts["template"]:
            found.refused.append(("the chat template", "as the run began", "another"))
        if found.refused:
            self._refuse(now, [*found.refused, *found.open, *self._changed_files(now)])
        found.said += [
            f"{key} was {old}, is now {new}: the content is the same" for key, old, new in found.open
        ]

    def _changed_files(self, now: Start) -> list[tuple[str, str, str]]:
        found = []
        for setting, before in self.earlier.facts.get("files", {}).items():
            after = now.facts["files"].get(setting, {})
            for name in _differing(before, after)[:8]:
                told = [
                    f"{kept[name]['bytes']:,} bytes" if name in kept else "not there"
                    for kept in (before, after)
                ]
                more = " of other content" if told[0] == told[1] else ""
                found.append((f"{setting}: {name}", told[0], told[1] + more))
        return found

    def _refuse(self, now: Start, wrong: list[tuple[str, str, str]]) -> None:
        width = min(44, max(len(what) for what, _, _ in wrong))
        lines = "".join(f"\n    {what:<{width}}  was {old}, is now {new}" for what, old, new in wrong)
        config = self.home / "config.yaml"
        elsewhere = (
            "" if is_folder(now.config.output_dir, self.home) else f" output_dir={now.config.output_dir}"
        )
        resume = "true" if not elsewhere else str(self.checkpoint)
        back = f"go on as the run began: trimtab train {shlex.quote(str(config))} training.resume={resume}{elsewhere}"
        if _edited(config, self.earlier.config):
            back = f"go on as the run began: put back what was changed in {config}, and resume with it"
        names = [what for what, _, _ in wrong]
        for kind, start in (
            ("data", ("rows to", "held-out", "data.")),
            ("reward", ("the source of", "grpo.reward")),
        ):
            if all(name.startswith(start) for name in names):
                back += f"; or training.resume_changed={kind} takes the new one from here on"
        raise RequestError.of(
            f"training.resume: the run in {self.home} began otherwise than it is asked to go on{lines}",
            f"{self.checkpoint.name} holds weights, optimizer, schedule and place in the data of that run: another "
            "request does not fit them, and would be half taken",
            f"{back}; or start a new run in another output_dir (docs/resume.md: from what this one has learned)",
        )

    def lines(self) -> list[str]:
        """What is to be said of a request that goes on."""
        return [f"going on from {self.checkpoint}", *(f"  {line}" for line in self.found.said)]


def _edited(config: Path, was: Config) -> bool:
    """Whether the kept config.yaml says something else than the run that it is kept for."""
    try:
        kept = load_config(config, [])
    except (ConfigError, RequestError, OSError):
        return True
    free = ("training.resume", "overwrite")
    return any(value_of_setting(kept, k) != value_of_setting(was, k) for k in settings() if k not in free)


def _factors(start: Start, plan: Mapping[str, Any]) -> str:
    training = start.config.training
    factors = (training.batch_size, plan.get("processes"), training.gradient_accumulation_steps)
    return f"{' × '.join(map(str, factors))} = {plan.get('step_rows')}"


def _same_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return bool(old["rows"] == new["rows"] and (old["digest"] is None or old["digest"] == new["digest"]))


def _rows(told: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> str:
    return f"{told['rows']:,}" + (
        " of other content" if old is not None and old["rows"] == told["rows"] else ""
    )


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def is_folder(one: str | None, other: Path) -> bool:
    return one is not None and Path(one).expanduser().resolve() == other.resolve()


def _shown(value: Any) -> str:
    text = without_secrets(json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
