"""What a run's folder tells: its files read as they are, and what follows from them. Never guesses what is not there.

Secrets that a file may hold (a login in an address, a key) are taken out on the way in, so no page can show one.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.config.problems import is_secret, without_secrets
from trimtab.config.yaml_text import plain_tree
from trimtab.errors import RequestError
from trimtab.monitor.metrics import read_metrics
from trimtab.monitor.wording import count_of
from trimtab.reading import parse_json, read_bytes, read_text
from trimtab.recipes.table import RECIPES

Status = Literal["finished", "interrupted", "failed", "unfinished"]
Row = dict[str, Any]

RUN_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "summary.json")
"""A folder with any of these is a run's."""
_STACKS_SHOWN = 20_000
_AS_TEXT = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
"""What JSON has no number for, as metrics.jsonl writes it."""
_SETTING = re.compile(r"^(\s*(?:- )?([\w.-]+)\s*:\s+)(?=[^\s#])(.*)$")


@dataclass(frozen=True)
class Event:
    """Something about a run's health that a person should know."""

    kind: Literal["fault", "warning", "note"]
    said: str
    step: int | None = None
    more: str = ""
    """A long text that belongs to it."""


@dataclass
class RunFacts:
    """A run's files; what is not there is empty, and named in `missing`."""

    path: Path
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    cut_short: bool = False
    """Whether the last line of metrics.jsonl is half-written."""
    stacks: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> str:
        return str(self.summary.get("recipe") or self.config.get("recipe") or "unknown recipe")

    @property
    def rewarded(self) -> bool:
        """Whether its recipe learns from rewards of what it generates."""
        recipe = RECIPES.get(self.recipe)
        return recipe is not None and recipe.rewarded

    @property
    def model(self) -> str:
        return str(self.setting("model", "name") or self.setting("model") or "an unknown model")

    @property
    def title(self) -> str:
        """What was done to what, in short; a model's folder by its name alone."""
        return f"{self.recipe} of {self.model.rstrip('/').rpartition('/')[2]}"

    def setting(self, *keys: str) -> Any:
        """A setting of the config, or None where it is not known."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def last_step(self) -> int | None:
        """The last step of which anything was written."""
        return max((int(row["step"]) for row in self.rows), default=None)

    @property
    def resumed_since(self) -> bool:
        """Whether the run went on after it wrote its summary, and has written none since."""
        resumed = self.of_phase("resume")
        ended = number(self.summary.get("ended"))
        if ended is not None:
            return any(row["time"] > ended for row in resumed)
        latest = max((int(row["step"]) for row in resumed), default=-1)
        return self.summary.get("status") == "interrupted" and latest >= self.summary.get("steps", math.inf)

    @property
    def status(self) -> Status:
        """As the run itself has written it; without a summary only a failure is certain."""
        said: Status | None = self.summary.get("status")
        if said in ("finished", "interrupted", "failed") and not self.resumed_since:
            return said
        return "failed" if self.of_phase("nonfinite") else "unfinished"

    @property
    def status_line(self) -> str:
        """The status and what it rests on, in one sentence."""
        steps = self.summary.get("steps", self.last_step) if "error" not in self.summary else self._reached
        planned = self.summary.get("planned_steps") or self.setting("training", "max_steps")
        done = "no step was written" if steps is None else count_of(int(steps), "step")
        if steps is not None and planned:
            done = f"{int(steps):,} of {count_of(int(planned), 'step')}"
        match self.status:
            case "finished":
                return f"finished: {done}"
            case "interrupted":
                return f"interrupted: {done}; {self._way_on}"
            case "failed" if self.summary.get("status") == "failed":
                where = "before its first step" if not steps else f"after {done}"
                return f"failed {where}: {self._error_line}; {self._way_on}"
            case "failed":
                return f"failed at step {self.of_phase('nonfinite')[-1]['step']}: a number was not finite"
        since = "since it was resumed the run has written no summary" if self.resumed_since else "no summary"
        last = self.last_step
        reached = "" if last is None else f"; last written: step {last:,}, {moment(self.rows[-1]['time'])}"
        return f"unfinished: {since}. It is still going, or it was killed or failed{reached}"

    @property
    def _reached(self) -> int | None:
        """Whole steps of a run that ended by an error; None where none was begun."""
        steps = self.summary.get("steps")
        return int(steps) if isinstance(steps, int) else None

    @property
    def _way_on(self) -> str:
        """How to go on. An error's summary names the last checkpoint; a run that was stopped in time has saved one."""
        if "error" not in self.summary:
            return "training.resume=true goes on from the last checkpoint"
        checkpoint = self.summary.get("checkpoint")
        return f"training.resume=true goes on from {checkpoint}" if checkpoint else "no checkpoint was saved"

    @property
    def _error_line(self) -> str:
        """The error that ended the run, in one line."""
        error = self.summary.get("error")
        told = error if isinstance(error, Mapping) else {}
        first = next(iter(str(told.get("message") or "").strip().splitlines()), "")
        return ": ".join(part for part in (str(told.get("kind") or "an error"), first) if part)

    def of_phase(self, *phases: str) -> list[Row]:
        return [row for row in self.rows if row["phase"] in phases]

    def events(self) -> list[Event]:
        """What befell the run, the worst first."""
        return list(self._events())

    def _events(self) -> Iterator[Event]:
        stopped = self.of_phase("nonfinite")
        for row in stopped:
            yield Event("fault", "not finite: the run was stopped", row["step"], str(row.get("message", "")))
        error = self.summary.get("error")
        if isinstance(error, Mapping) and not stopped and not self.resumed_since:
            rank = f"rank {self.summary['rank']}: " if "rank" in self.summary else ""
            kind: Literal["fault", "warning"] = "fault" if self.status == "failed" else "warning"
            message = str(error.get("message") or "")
            yield Event(kind, f"{rank}{self._error_line}", self._reached or 0, message)
        for name, stacks in self.stacks.items():
            told = f"{name}: nothing finished for so long that every stack was kept"
            yield Event("fault", told, None, stacks)
        for name, steps in self._not_finite().items():
            told = f"{name} was not finite in {count_of(len(steps), 'row')}, first here"
            yield Event("warning", told, steps[0])
        if self.summary.get("skipped_steps"):
            skipped = count_of(self.summary["skipped_steps"], "step")
            why = "a gradient overflowed in fp16" if self.of_phase("skip") else "no finite loss"
            yield Event("warning", f"{skipped} skipped: {why}")
        if self.cut_short:
            yield Event(
                "warning", "the last line of metrics.jsonl is cut short, as by a kill; it is left out"
            )
        for row in self.of_phase("resume"):
            cut = row.get("cut_lines") or 0
            gone = f"; {count_of(cut, 'line')} of abandoned steps cut from metrics.jsonl" if cut else ""
            yield Event("note", f"resumed after step {row['step']}{gone}", row["step"])
        if saved := self.of_phase("save"):
            told = f"{count_of(len(saved), 'checkpoint')} saved; the last one here"
            yield Event("note", told, saved[-1]["step"])

    def _not_finite(self) -> dict[str, list[int]]:
        """Each figure that was not finite, with the steps."""
        seen: dict[str, list[int]] = {}
        for row in self.of_phase("train", "eval"):
            for name, value in row.items():
                if not math.isfinite(number(value) or 0):
                    seen.setdefault(name, []).append(row["step"])
        return seen


def read_run(path: Path) -> RunFacts:
    """Everything in the folder that a page tells of."""
    run = RunFacts(path)
    miss = run.missing.append
    config = path / "config.yaml"
    if config.is_file():
        raw = read_bytes(config).decode("utf-8", errors="replace")
        if "\N{REPLACEMENT CHARACTER}" in raw:
            miss("config.yaml is not all UTF-8; what cannot be read shows as \N{REPLACEMENT CHARACTER}")
        run.config_text = _without_named_secrets(without_secrets(raw))
        try:
            tree = plain_tree(run.config_text)
        except ValueError:
            miss("config.yaml is not valid YAML; it is shown as it is")
        else:
            run.config = tree if isinstance(tree, dict) else {}
    else:
        miss("config.yaml is missing: the settings are not known")
    run.plan = _read(path / "plan.json", miss, "where things were placed, and why, is not known")
    run.data = _read(path / "data.json", miss, "what was read and dropped is not known")
    run.summary = _read(path / "summary.json", miss, "the run has not written its outcome")
    if (path / "baseline.json").is_file():
        run.baseline = _read(path / "baseline.json", miss, "")
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        run.rows = [r if r["phase"] in ("train", "eval") else hidden(r) for r in read_metrics(metrics)]
        lines = metrics.read_bytes().splitlines(keepends=True)
        run.cut_short = bool(lines) and not lines[-1].endswith(b"\n")
        gone = len(lines) - run.cut_short - len(run.rows)
        if gone:
            miss(
                f"{count_of(gone, 'line')} of metrics.jsonl cannot be read: what was logged there is left out"
            )
    else:
        miss("metrics.jsonl is missing: there are no curves")
    for file in sorted(path.glob("stacks*.txt")):
        run.stacks[file.name] = file.read_text(encoding="utf-8", errors="replace")[-_STACKS_SHOWN:]
    return run


def number(value: Any) -> float | None:
    """A measured value; what is not finite stands in the file as text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def moment(seconds: float) -> str:
    """Unix seconds as a date."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def hidden(value: Any) -> Any:
    """The same without secrets in any of its texts."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: hidden(entry) for key, entry in value.items()}
    return [hidden(entry) for entry in value] if isinstance(value, list) else value


def _without_named_secrets(text: str) -> str:
    """Settings that are secrets by their name, in a config that was changed by hand."""

    def shown(setting: re.Match[str]) -> str:
        secret = is_secret(setting[2]) and setting[3] not in ("null", "{}", "[]")
        return f"{setting[1]}(not shown)" if secret else setting[0]

    return "\n".join(_SETTING.sub(shown, line) for line in text.splitlines()) + "\n"


def _read(file: Path, miss: Callable[[str], None], without: str) -> dict[str, Any]:
    if not file.is_file():
        miss(f"{file.name} is missing: {without}")
        return {}
    try:
        content = parse_json(read_text(file), _AS_TEXT)
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
    except (ValueError, OSError, RequestError) as error:
        miss(f"{file.name} cannot be read ({error})")
        return {}
    return dict(hidden(content))
