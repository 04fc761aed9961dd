"""`metrics.jsonl`: what a run measured, one JSON object a line, flushed line by line.

Every line has `step`, `time` (Unix seconds) and `phase`; the measured values stand beside them:

    {"step": 12, "time": 1767225600.25, "phase": "train", "loss": 1.31, "learning_rate": 0.0002, ...}

Phases: `train` and `eval` (what the trainer logged), `completions` (a few, with their rewards), `save`, `resume`,
`skip` (a step that the fp16 gradient scaler skipped), `warning` (its `kind` and `message`), `nonfinite`, `summary`.
NaN and infinities have no JSON number, so they are the strings "nan", "inf" and "-inf".

The file only grows, with one exception. A run that goes on from the checkpoint of step N makes the steps after N
again, so the lines of the abandoned ones are cut, as is a line that a kill left half-written; a `resume` line says
how many. A run that starts at step 0 starts a new file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from trimtab.files import plain_value, write_whole
from trimtab.reading import parse_json
from trimtab.redaction import hiding

_OWN_KEYS = ("step", "time", "phase")


def phase_of(values: Mapping[str, Any]) -> str:
    """Which phase a dictionary logged by a Hugging Face trainer belongs to."""
    if "train_loss" in values:
        return "summary"
    return "eval" if any(key.startswith("eval_") for key in values) else "train"


class MetricsFile:
    """One run's metrics. The file is opened at the first write, so that looking on leaves no trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._inherited: int | None = None
        """How much of the file was there before this object wrote to it; known from the first use on."""

    def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Append one line and flush it."""
        taken = [key for key in values if key in _OWN_KEYS]
        if taken:
            raise ValueError(f"a metric cannot be named {taken[0]!r}: every line already has {_OWN_KEYS}")
        line = {"step": step, "time": round(time.time(), 3), "phase": phase}
        hide = hiding()
        line.update((hide(key), plain_value(value, of_text=hide)) for key, value in values.items())
        file = self._opened()
        file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()

    def begin(self, step: int) -> int:
        """Make the file fit a training that begins after `step` (0: afresh); say how many lines were cut."""
        self.close()
        raw = self.path.read_bytes() if self.path.exists() else b""
        known = len(raw) if self._inherited is None else self._inherited
        kept: list[bytes] = []
        seen: set[tuple[Any, ...]] = set()
        cut = position = 0
        for line in raw.splitlines(keepends=True):
            position += len(line)
            entry = _parse(line)
            # What this process measured before training (the held-out loss of the untouched model) belongs to it.
            inherited = position <= known
            key = () if entry is None else (entry["step"], entry["phase"], *sorted(entry))
            if entry is None or entry["step"] > step or (step == 0 and inherited) or key in seen:
                cut += 1
                continue
            if entry["phase"] != "resume":
                seen.add(key)
            kept.append(line)
        if cut:
            write_whole(self.path, b"".join(kept))
        self._inherited = 0 if step == 0 else len(b"".join(kept))
        if raw and step:
            self.write(step, "resume", {"cut_lines": cut})
        return cut

    def count(self, phase: str) -> int:
        """How many lines of a phase there are."""
        return sum(entry["phase"] == phase for entry in read_metrics(self.path)) if self.path.exists() else 0

    def of_phase(self, phase: str) -> list[dict[str, Any]]:
        """The lines of a phase, without their times."""
        lines = read_metrics(self.path) if self.path.exists() else []
        return [
            {key: value for key, value in line.items() if key not in ("time", "phase")}
            for line in lines
            if line["phase"] == phase
        ]

    def close(self) -> None:
        # First forgotten: on a full disk closing fails, and the next call would fail once more.
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> TextIO:
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            self.close()  # somebody deleted it: what comes from now on is kept in a new one
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            before = self.path.read_bytes() if self.path.exists() else b""
            self._inherited = len(before) if self._inherited is None else self._inherited
            self._file = self.path.open("a", encoding="utf-8")
            if before and not before.endswith(b"\n"):
                self._file.write("\n")
        return self._file


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a half-written last line is left out."""
    entries = (_parse(line) for line in path.read_bytes().splitlines(keepends=True))
    return [entry for entry in entries if entry is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """The line's object, or None for one that a kill cut short, or that no run wrote."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not all(key in entry for key in _OWN_KEYS):
        return None
    step, written, phase = (entry[key] for key in _OWN_KEYS)
    fits = isinstance(step, int) and isinstance(written, int | float) and isinstance(phase, str)
    return entry if fits and 0 <= step < 2**63 and 0 <= written < 2**40 else None
