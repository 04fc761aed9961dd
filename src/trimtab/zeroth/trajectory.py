"""A run's losses in a file of a few bytes a step, from which its weights are rebuilt without a forward pass.

One line of JSON (settings, a hash of the tuned tensors, what the run was about), then little-endian fp32 numbers:
the lane losses of each step, and after each step that a projection round followed, the round's pairs of losses. With
`schedule: given` a step's learning rate stands before its losses. The file only ever grows; cut off at any byte, it
still holds every complete record before the cut.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trimtab.errors import RequestError
from trimtab.zeroth.dizo import Round
from trimtab.zeroth.parameters import Tuned, fingerprint, tuned_parameters, weights_mark
from trimtab.zeroth.settings import ZerothSettings, scheduled_rate
from trimtab.zeroth.steps import apply_round, step_shrink, step_update
from trimtab.zeroth.sweep import Sweep, fp32

FORMAT = "trimtab-trajectory"
VERSION = 1
_LONGEST_HEADER = 1 << 24
# What a resumed run must share with its file, beside the settings. Its weights have moved on since.
_IDENTITY = ("tensors", "fingerprint", "projected")


@dataclass(frozen=True)
class Record:
    """One step, and the projection round that followed it, if any."""

    step: int
    learning_rate: float
    losses: tuple[float, ...]
    round: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """A trajectory as read: its header and its complete records."""

    header: dict[str, Any]
    settings: ZerothSettings
    records: tuple[Record, ...]


def make_header(
    settings: ZerothSettings, tuned: Sequence[Tuned], projected: Sequence[Tuned], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What identifies a run; `about` is free for its user."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": dataclasses.asdict(settings),
        "tensors": len(tuned),
        "fingerprint": fingerprint(tuned),
        "start": weights_mark(tuned),
        "projected": [t.name for t in projected],
        "about": dict(about),
    }


class TrajectoryWriter:
    """Appends records. A file that is already there belongs to the same run, and is cut back to where that stands."""

    def __init__(self, path: Path, header: Mapping[str, Any], steps: int = 0, rounds: int = 0) -> None:
        settings = _settings(header)
        self._with_rate = settings.schedule == "given"
        if steps:
            self._file = self._go_on(path, header, settings, steps, rounds)
            self._digest = hashlib.sha256(path.read_bytes())
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
            self._digest = hashlib.sha256()
            self._write((json.dumps(header) + "\n").encode())

    def step(self, losses: Sequence[float], learning_rate: float) -> None:
        self._write(_pack([learning_rate, *losses] if self._with_rate else losses))

    def round(self, pairs: Sequence[tuple[float, float]]) -> None:
        self._write(_pack([loss for pair in pairs for loss in pair]))

    def written(self) -> tuple[int, str]:
        """How many bytes the file has, and their SHA-256; they are on the disk when this returns."""
        os.fsync(self._file.fileno())
        return self._file.tell(), self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self._digest.update(data)

    @staticmethod
    def _go_on(
        path: Path, header: Mapping[str, Any], settings: ZerothSettings, steps: int, rounds: int
    ) -> io.BufferedWriter:
        if not path.is_file():
            raise RequestError.of(
                f"{path} is not there, and the run stands at step {steps}",
                "a trajectory without its first steps rebuilds nothing",
                "resume with the run's own folder, or start again",
            )
        old, offset = _read_header(path)
        different = [key for key in _IDENTITY if old.get(key) != json.loads(json.dumps(header[key]))]
        before, now = _deciding(_settings(old)), _deciding(settings)
        different += [name for name in now if before[name] != now[name]]
        if different:
            raise RequestError.of(
                f"{path} was written by another run ({', '.join(different)} differ)",
                "its first steps are not those of this run",
                "resume with the settings and model of that run, or write to another folder",
            )
        size = offset + 4 * (steps * _step_size(settings) + rounds * 2 * settings.projection_iterations)
        if path.stat().st_size < size:
            raise RequestError.of(
                f"{path} ends before step {steps}",
                "steps between its end and the checkpoint are lost",
                "resume from an earlier checkpoint",
            )
        os.truncate(path, size)
        return path.open("ab")


def read_trajectory(path: str | Path) -> Trajectory:
    """All complete records of a file. What is cut off at the end is left out."""
    path = Path(path)
    header, offset = _read_header(path)
    settings = _settings(header)
    data = path.read_bytes()[offset:]
    numbers = struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4])
    width, with_rate = _step_size(settings), settings.schedule == "given"
    round_width = 2 * settings.projection_iterations
    records: list[Record] = []
    at = 0
    while at + width <= len(numbers):
        step, part = len(records), numbers[at : at + width]
        at += width
        rate = part[0] if with_rate else fp32(scheduled_rate(settings, step))
        pairs: tuple[tuple[float, float], ...] = ()
        due = settings.method == "dizo" and (step + 1) % settings.interval == 0
        if due and at + round_width <= len(numbers):
            flat = numbers[at : at + round_width]
            pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
        records.append(Record(step, rate, part[1:] if with_rate else part, pairs))
        if due:
            at += round_width
    return Trajectory(header, settings, tuple(records))


def replay(
    model: nn.Module, trajectory: Trajectory, progress: Callable[[int, int], None] | None = None
) -> int:
    """Apply every record to a model that stands where the run began. Returns the number of steps.

    On the CPU, and wherever fp32 arithmetic is that of IEEE 754, the weights become those of the run, bit for bit.
    """
    settings = trajectory.settings
    tuned = tuned_parameters(model)
    _check(trajectory.header, tuned)
    sweep = Sweep(tuned, settings.rounding == "stochastic")
    # By the run's own list: another version may know other names for a role.
    names = set(trajectory.header["projected"])
    projected = [t for t in tuned if t.name in names]
    anchors = {t.index: t.parameter.detach().clone() for t in projected}
    for record in trajectory.records:
        directions = step_update(settings, record.step, record.losses, record.learning_rate)
        if directions is not None:
            sweep.update_(tuned, directions, step_shrink(settings, record.learning_rate))
        if record.round:
            search = Round(settings, record.step, [t.index for t in projected])
            for pair in record.round:
                search.observe(pair)
            apply_round(sweep, projected, anchors, search)
        if progress is not None:
            progress(record.step + 1, len(trajectory.records))
    return len(trajectory.records)


def _check(header: Mapping[str, Any], tuned: Sequence[Tuned]) -> None:
    if header["fingerprint"] != fingerprint(tuned):
        raise RequestError.of(
            f"the trajectory tunes {header['tensors']} tensors, this model {len(tuned)}, and their names, shapes or "
            "types differ",
            "a replay moves exactly the tensors that the run moved",
            "load the base model in the run's precision, with the same parameters frozen and the same adapter",
        )
    if header["start"] != weights_mark(tuned):
        raise RequestError.of(
            "the model's weights are not those that the run began with",
            "a replay adds up the run's steps from its beginning",
            "load the base model (and the untrained adapter) that the run started from",
        )


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    if not path.is_file():
        raise RequestError.of(
            f"{path} is not there", "it should hold a trajectory", "give the run's trajectory.bin"
        )
    with path.open("rb") as file:
        line = file.readline(_LONGEST_HEADER)
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not line.endswith(b"\n") or not isinstance(header, dict) or header.get("format") != FORMAT:
        raise RequestError.of(
            f"{path} is no trajectory", "its first line does not say so", "give the run's trajectory.bin"
        )
    if header["version"] != VERSION:
        raise RequestError.of(
            f"{path} has version {header['version']} of the format",
            f"this program reads version {VERSION}",
            "use the program that wrote it",
        )
    return header, len(line)


def _settings(header: Mapping[str, Any]) -> ZerothSettings:
    # A file from before there was a choice was rounded to the nearest.
    values: dict[str, Any] = {"rounding": "nearest"} | dict(header["settings"])
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(ZerothSettings)}):
        raise RequestError.of(
            f"the trajectory has a setting that is not known here: {', '.join(unknown)}",
            "a newer program wrote it, whose steps this one cannot make",
            "use that program",
        )
    values["projection_roles"] = tuple(values["projection_roles"])
    return ZerothSettings(**values)


def _deciding(settings: ZerothSettings) -> dict[str, Any]:
    """The settings that decide the weights: not how passes run, nor where a schedule ends that has no end."""
    free = {"lanes", "compile"}
    if settings.schedule not in ("linear", "cosine"):
        free.add("total_steps")
    return {name: value for name, value in dataclasses.asdict(settings).items() if name not in free}


def _step_size(settings: ZerothSettings) -> int:
    return settings.passes + (settings.schedule == "given")


def _pack(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)
