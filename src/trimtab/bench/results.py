"""Keeps what a benchmark measured: one JSON file a cell as it comes, and from these the tables, and what a page draws.

A cell is one task, one method, one seed. Nothing is written that was not measured: a cell that failed keeps its
reason, and a figure that is not defined is null.
"""

from __future__ import annotations

import errno
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.bench.plots import Bars, Lines, Plot, Point
from trimtab.errors import RequestError, TrimtabError
from trimtab.files import plain_value, write_json_whole, write_whole
from trimtab.monitor.wording import size
from trimtab.reading import parse_json, read_text

_defined = partial(plain_value, of_nonfinite=lambda value: None)
"""A figure that is not defined is null."""

NOT_WHOLE = "not whole: the benchmark was interrupted, or is still going"

METRIC_TITLES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "f1_macro": "macro F1",
    "f1a": "F1a",
    "em": "exact match",
    "matthews": "Matthews",
    "pearson": "Pearson",
    "spearman": "Spearman",
}


@dataclass
class Results:
    """The folder of one benchmark: its header, its cells, and what is made of them."""

    path: Path
    header: dict[str, Any]
    cells: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, header: dict[str, Any]) -> Results:
        """Start in a folder, or go on in it. What another model made there is never mixed with this one's."""
        kept = path / "run.json"
        if not kept.is_file():
            own = (
                "results go into a folder of their own (or one that holds earlier results of the same model)"
            )
            check_folder(path, "other things in it", own)
        results = cls(path, header)
        make_folder(path / "cells")
        if kept.is_file():
            before = _read(kept)
            differing = [k for k in ("benchmark", "model") if before.get(k) != header.get(k)]
            if differing:
                raise RequestError.of(
                    f"--out {path}: holds results with "
                    + ", ".join(f"{k} {before.get(k)}" for k in differing),
                    f"this run has {', '.join(f'{k} {header.get(k)}' for k in differing)}, and one table has one model",
                    "name another folder",
                )
            notes = list(dict.fromkeys([*before.get("notes", []), *header["notes"]]))
            results.header = {**before, **header, "notes": notes, "data": before.get("data", {})}
            for file in sorted((path / "cells").glob("*.json")):
                cell = _read(file, "task", "method", "seed", "status", "settings")
                results.cells[_key(cell)] = cell
        results.save()
        return results

    def has(self, task: str, method: str, seed: int) -> bool:
        """Whether the cell was measured, with whatever settings."""
        cell = self.cells.get((task, method, seed))
        return cell is not None and cell["status"] == "finished"

    def finished(self, task: str, method: str, seed: int, settings: Mapping[str, Any]) -> bool:
        """Whether the cell is there already. Made with other settings, it is an error rather than a mixture."""
        if not self.has(task, method, seed):
            return False
        cell = self.cells[task, method, seed]
        now = json.loads(json.dumps(settings))
        differing = [k for k in {**cell["settings"], **now} if cell["settings"].get(k) != now.get(k)]
        if differing:
            changes = ", ".join(
                f"{k} {cell['settings'].get(k)} (now {now.get(k)})" for k in sorted(differing)
            )
            raise RequestError.of(
                f"--out {self.path}: {task}, {method}, seed {seed} is there with {changes}",
                "a finished cell is kept, and one table cannot mix settings",
                "name another folder, or remove cells/" + _file_name(task, method, seed),
            )
        return True

    def add(self, cell: dict[str, Any]) -> None:
        """Keep a cell at once, so that an interruption loses nothing that is done."""
        cell = _defined(cell)
        self.cells[_key(cell)] = cell
        write_json_whole(self.path / "cells" / _file_name(*_key(cell)), cell)

    def save(self) -> None:
        """Write the header, the JSON and the tables anew."""
        write_json_whole(self.path / "run.json", _defined(self.header))
        write_results(self.path, self.as_dict(), self.markdown())

    def as_dict(self) -> dict[str, Any]:
        whole = {
            "run": self.header,
            "summary": [self.summary(t, m) for t, m in self.pairs()],
            "cells": [self.cells[key] for key in sorted(self.cells)],
        }
        return dict(_defined(whole))

    def pairs(self) -> list[tuple[str, str]]:
        """Tasks and methods in the order in which they came."""
        return list(dict.fromkeys((task, method) for task, method, _ in self.cells))

    def failures(self) -> list[dict[str, Any]]:
        return [cell for cell in self.cells.values() if cell["status"] != "finished"]

    def _of(self, task: str, method: str, *, finished: bool = False) -> list[dict[str, Any]]:
        """The cells of all seeds, or those that finished."""
        found = [c for (t, m, _), c in self.cells.items() if (t, m) == (task, method)]
        return [c for c in found if c["status"] == "finished"] if finished else found

    def summary(self, task: str, method: str) -> dict[str, Any]:
        """Mean and spread over the seeds that finished; how many failed stands beside them."""
        all_cells, done = self._of(task, method), self._of(task, method, finished=True)
        names = list(dict.fromkeys(name for c in done for name in c["metrics"]))
        peaks = [c["peak_memory_bytes"] for c in done if c.get("peak_memory_bytes") is not None]
        return {
            "task": task,
            "method": method,
            "seeds": [c["seed"] for c in done],
            "failed_seeds": [c["seed"] for c in all_cells if c["status"] != "finished"],
            "score": spread(c["score"] for c in done),
            "metrics": {name: spread(c["metrics"].get(name) for c in done) for name in names},
            "forwards": spread(c["forwards"] for c in done),
            "backwards": spread(c["backwards"] for c in done),
            "train_seconds": spread(c["train_seconds"] for c in done),
            "peak_memory_bytes": max(peaks) if peaks else None,
        }

    def caption(self) -> str:
        """What every table says of itself."""
        data = self.header.get("data", {})
        origins = {
            "sample": "the shipped sample (a smoke test, not a benchmark)",
            "hub": "the hub",
            "folder": "a local folder",
        }
        parts = []
        for origin, words in origins.items():
            tasks = [t for t, d in data.items() if d["origin"] == origin]
            if tasks:
                parts.append(f"{', '.join(tasks)} from {words}")
        return f"Model: {self.header['model_shown']}. Data: {'; '.join(parts) or 'none'}."

    def markdown(self) -> str:
        """The tables, readable as text too."""
        pairs = self.pairs()
        tasks, methods = list(dict.fromkeys(t for t, _ in pairs)), list(dict.fromkeys(m for _, m in pairs))
        titles = self.header.get("titles", {})
        lines = ["# GLUE+ results", ""]
        lines += [f"> {note}" for note in notes(self.header)]
        h = self.header
        machine = f"Trimtab {h['trimtab']}, torch {h['torch']}, device {h['device']} ({h['device_reason']})."
        lines += ["", machine, "", "## Score", "", self.caption(), ""]
        lines += table(
            ["method", *(titles.get(t, t) for t in tasks)],
            [[m, *(self._score(t, m) if (t, m) in pairs else "not run" for t in tasks)] for m in methods],
        )
        lines += [
            "",
            "The mean of the task's metrics, times 100; ± is the sample standard deviation (n - 1) over seeds.",
            "",
            "## Metrics",
            "",
            self.caption(),
            "",
        ]
        lines += table(
            ["task", "method", "metrics", "rows", "seeds", "forwards", "backwards", "seconds", "peak memory"],
            [self._details(t, m) for t, m in pairs],
        )
        lines += [
            "",
            "Peak memory is the device allocator's while tuning, less what was there before the model; on the CPU see "
            "`trimtab bench memory`.",
            "",
        ]
        failures = self.failures()
        if failures:
            lines += ["## Failed", ""]
            lines += [f"- {c['task']}, {c['method']}, seed {c['seed']}: {c['reason']}" for c in failures]
            lines.append("")
        lines += ["## Settings", "", *self._settings(methods), ""]
        return "\n".join(lines)

    def plots(self) -> list[Plot]:
        """Score over passes for each task, and memory by method where it was measured."""
        plots: list[Plot] = []
        pairs = self.pairs()
        methods = list(dict.fromkeys(m for _, m in pairs))
        for task in dict.fromkeys(t for t, _ in pairs):
            series = {m: self._curve(task, m) for t, m in pairs if t == task}
            levels = {m: self.summary(task, m)["score"]["mean"] for m in series if not series[m]}
            sample = self.header["data"].get(task, {}).get("origin") == "sample"
            mark = " — shipped sample" if sample else ""
            plots.append(
                Lines(
                    f"{task} — {self.header['model_shown'].split(' (')[0]}{mark}",
                    "forward passes of a batch (a backward pass counts as two)",
                    "score",
                    {m: points for m, points in series.items() if points},
                    {m: 100 * value for m, value in levels.items() if value is not None},
                )
            )
        peaks = {
            m: max(
                (p for t, n in pairs if n == m and (p := self.summary(t, n)["peak_memory_bytes"])), default=0
            )
            for m in methods
        }
        if any(peaks.values()):
            bars = {m: p / 2**30 if p else math.nan for m, p in peaks.items()}
            plots.append(Bars("Peak memory while tuning", "GiB", bars, self.header["model_shown"]))
        return plots

    def _curve(self, task: str, method: str) -> list[Point]:
        """Mean over seeds at each step that all finished seeds have."""
        curves = [c["curve"] for c in self._of(task, method, finished=True) if c["curve"]]
        points = []
        by_step = [{p["step"]: p for p in curve} for curve in curves]
        for step in by_step[0] if by_step else ():
            same = [curve[step] for curve in by_step if step in curve]
            scores = [p["score"] for p in same if p["score"] is not None]
            if len(scores) == len(curves):
                passes = statistics.fmean(p["forwards"] + 2 * p["backwards"] for p in same)
                points.append((passes, 100 * statistics.fmean(scores)))
        return points

    def _score(self, task: str, method: str) -> str:
        summary = self.summary(task, method)
        if not summary["seeds"]:
            return "failed"
        failed = f" ({len(summary['failed_seeds'])} failed)" if summary["failed_seeds"] else ""
        return shown(summary["score"]) + failed

    def _details(self, task: str, method: str) -> list[str]:
        summary = self.summary(task, method)
        if not summary["seeds"]:
            return [task, method, "failed", *["–"] * 6]
        metrics = ", ".join(f"{_title(name)} {shown(value)}" for name, value in summary["metrics"].items())
        peak = summary["peak_memory_bytes"]
        return [
            task,
            method,
            metrics,
            str(self._of(task, method, finished=True)[0]["eval_rows"]),
            ", ".join(map(str, summary["seeds"])),
            f"{summary['forwards']['mean']:,.0f}",
            f"{summary['backwards']['mean']:,.0f}",
            f"{summary['train_seconds']['mean']:,.1f}",
            size(peak) if peak else "–",
        ]

    def _settings(self, methods: Sequence[str]) -> list[str]:
        lines = []
        for method in methods:
            used = [c["settings"] for (_, m, _), c in self.cells.items() if m == method and c.get("settings")]
            names = [n for n in (used[0] if used else {}) if n not in ("task", "method", "seed", "data")]
            values = {n: list(dict.fromkeys(_words(s.get(n)) for s in used)) for n in names}
            said = ", ".join(f"{n} {' / '.join(v)}" for n, v in values.items() if v != ["None"])
            lines.append(f"- {method}: {said or 'nothing to set'}")
        return lines


def spread(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean and sample standard deviation; None where a value is not defined, or one value cannot spread."""
    numbers = list(values)
    defined = [v for v in numbers if v is not None and math.isfinite(v)]
    whole = bool(numbers) and len(defined) == len(numbers)
    return {
        "mean": statistics.fmean(defined) if whole else None,
        "std": statistics.stdev(defined) if whole and len(defined) > 1 else None,
        "n": len(numbers),
    }


def reason_of(error: BaseException) -> str:
    """Why a cell failed, in one line; what was not foreseen with the name of its kind."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, TrimtabError) else f"{type(error).__name__}: {text}"


def notes(header: Mapping[str, Any]) -> list[str]:
    """What stands above the tables of a benchmark."""
    return [*header.get("notes", []), *([NOT_WHOLE] if header.get("whole") is False else [])]


def shown(value: Mapping[str, Any]) -> str:
    """A figure of `spread`, times 100."""
    if value["mean"] is None:
        return "undefined"
    around = f" ± {100 * value['std']:.1f}" if value["std"] is not None else ""
    return f"{100 * value['mean']:.1f}{around}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns line up as text too."""
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def _words(value: Any) -> str:
    return (
        ", ".join(f"{name} {part}" for name, part in value.items())
        if isinstance(value, Mapping)
        else str(value)
    )


def _title(metric: str) -> str:
    name, _, ending = metric.partition("_mismatched")
    return METRIC_TITLES.get(name, name) + (" (mismatched)" if ending or metric != name else "")


def _key(cell: Mapping[str, Any]) -> tuple[str, str, int]:
    return cell["task"], cell["method"], cell["seed"]


def _file_name(task: str, method: str, seed: int) -> str:
    return f"{task}--{method}--{seed}.json"


def write_results(path: Path, content: Any, text: str) -> list[str]:
    """JSON and Markdown of a benchmark, each whole or not at all; their names."""
    write_json_whole(path / "results.json", content)
    write_whole(path / "results.md", text)
    return ["results.json", "results.md"]


def show(content: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print the results: as JSON, or as their tables."""
    if as_json:
        json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
    else:
        print("\n" + text)


def check_folder(path: Path, found: str, why: str) -> None:
    """A place for results is new, or an empty folder."""
    if path.exists() and not path.is_dir():
        raise RequestError.of(f"--out {path}: a file", "results are a folder", "name another folder")
    if path.is_dir() and any(path.iterdir()):
        raise RequestError.of(f"--out {path}: a folder with {found}", why, "name another folder")


def make_folder(path: Path) -> None:
    """A place that cannot be written to is told before anything is measured."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise RequestError.of(
            f"--out: {path} cannot be written to ({error.strerror})",
            "results are kept there as they come",
            "name another folder",
        ) from None


def _read(path: Path, *needed: str) -> dict[str, Any]:
    try:
        content = parse_json(read_text(path))
    except (ValueError, RequestError):
        content = None
    if not isinstance(content, dict) or not content.keys() >= set(needed):
        raise RequestError.of(
            f"{path}: not what a benchmark writes there", "it was changed or cut short", "remove the file"
        )
    return content
