"""A zeroth-order run again, from its base model and its file of losses: the same weights, and not one forward pass.

Works on the CPU. It never changes the run; what it rebuilds goes into a folder of its own.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from trimtab.config import Config
from trimtab.config.schema import LoraSettings, ModelSettings
from trimtab.errors import RequestError
from trimtab.manifest import Damaged, part_of, read_manifest
from trimtab.models import load_tokenizer
from trimtab.models.tuned import load_tuned
from trimtab.placement import PlacementPlan
from trimtab.recipes.checkpoints import by_step
from trimtab.recipes.run_folder import SUMMARY, RunFolder
from trimtab.recipes.zeroth_order import TRAJECTORY
from trimtab.zeroth.trajectory import Trajectory, read_trajectory, replay


@dataclass(frozen=True)
class Replayed:
    """What was rebuilt, and how it compares with what the run kept."""

    steps: int
    folder: Path | None
    """None where it was only checked."""
    tensors: int = 0
    """How many were compared; 0 without a check."""
    differing: tuple[str, ...] = ()


def replay_run(
    source: Path,
    *,
    model: str | None = None,
    out: Path | None = None,
    steps: int | None = None,
    check: bool = False,
    trusted: Sequence[str] = (),
) -> Replayed:
    """Rebuild the weights of a run folder or of a trajectory file, and compare them with the kept ones on request."""
    file = source / TRAJECTORY if source.is_dir() else source
    trajectory = read_trajectory(file)
    _check_unchanged(file)
    base = _base(trajectory, file, trusted)
    run = RunFolder(file.parent)
    kept = run.kept_folder(base)
    if check and not any(kept.glob("*.safetensors")):
        raise RequestError.of(
            f"{kept}: no weights to compare with",
            "a run keeps them there when it has finished",
            "leave out --check, or give the folder of a finished run",
        )
    if out is not None:
        _make_folder(out)
    if model is not None:
        base.model.name = model
    trajectory = _cut(trajectory, steps if steps is not None else _kept_step(run), file)

    precision = trajectory.header["about"]["base"]["weight_precision"]
    plan = PlacementPlan(
        device="cpu", precision=precision, scaler=False, weight_precision=precision, strategy="single"
    )
    tuned = load_tuned(base, plan)
    made = replay(tuned, trajectory)
    with tempfile.TemporaryDirectory() as scratch:
        folder = out if out is not None else Path(scratch)
        tuned.config.use_cache = True
        tuned.save_pretrained(folder)
        if out is not None:
            tokenizer: Any = load_tokenizer(base.model)
            tokenizer.save_pretrained(folder)
        if not check:
            return Replayed(made, out)
        ours, theirs = dict(_tensors(folder)), dict(_tensors(kept))
        names = sorted(ours.keys() | theirs.keys())
        differing = tuple(
            n for n in names if n not in ours or n not in theirs or not _same(ours[n], theirs[n])
        )
        return Replayed(made, out, len(names), differing)


def _check_unchanged(file: Path) -> None:
    """Refuse a trajectory that is not what the run's checkpoints were made with, where there are any."""
    for checkpoint in reversed(by_step(RunFolder(file.parent).checkpoints).values()):
        try:
            written = read_manifest(checkpoint).beside.get(file.name)
        except Damaged:
            continue
        # One that was cut short still rebuilds the steps that it holds.
        if written is not None and file.stat().st_size >= written.size:
            if part_of(file, written.size) == written:
                return
            raise RequestError.of(
                f"{file}: its content has changed since {checkpoint.name} was written",
                "other losses than the run's own would rebuild other weights",
                "put the file back from a copy",
            )


def _make_folder(out: Path) -> None:
    """An empty folder to write to, before the work that it is for."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError.of(
            f"--out {out}: {error.strerror}", "the weights are written into a folder", "name another folder"
        ) from error
    if any(out.iterdir()):
        raise RequestError.of(
            f"--out {out}: the folder is not empty", "its files would mix with others", "name a new folder"
        )


def _base(trajectory: Trajectory, file: Path, trusted: Sequence[str]) -> Config:
    """The settings that make the model before the first step, as the file tells them."""
    made = trajectory.header["about"].get("base")
    if made is None:
        raise RequestError.of(
            f"{file}: does not say which model the run began with",
            "it was written by a program of your own, not by `trimtab train`",
            "load that model yourself and call trimtab.zeroth.trajectory.replay",
        )
    return Config(
        recipe="zeroth_order",
        # Of earlier versions' files: that code may run is not for a file to say.
        model=ModelSettings(**{**made["model"], "trust_remote_code": list(trusted)}),
        method=made["method"],
        lora=LoraSettings(**made.get("lora", {})),
        seed=made["seed"],
    )


def _kept_step(run: RunFolder) -> int | None:
    """The step whose weights the run kept: its best one, where it did not keep its last."""
    return run.read_json(SUMMARY).get("kept_step") if (run.path / SUMMARY).is_file() else None


def _cut(trajectory: Trajectory, steps: int | None, file: Path) -> Trajectory:
    there = len(trajectory.records)
    if steps is not None and steps > there:
        raise RequestError.of(
            f"{file}: holds {there} steps, {steps} are wanted",
            "the file was cut short, or the run was stopped earlier",
            f"ask for at most --steps {there}",
        )
    return dataclasses.replace(trajectory, records=trajectory.records[:steps])


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, so that a NaN equals itself and 0 is not -0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
