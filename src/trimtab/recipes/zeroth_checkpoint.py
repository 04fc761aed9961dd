"""Checkpoints of a zeroth-order run: the tuned weights, the optimizer's few numbers and anchors, the place in the data.

Weights and anchors are safetensors. How a checkpoint is written whole, found again and removed: checkpoints.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trimtab.errors import RequestError
from trimtab.files import write_whole
from trimtab.manifest import Part
from trimtab.reading import read_json_object
from trimtab.recipes.checkpoints import name_of, new_checkpoint
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.unsealed import OWN_STATE, TRAINER_STATE

WEIGHTS, ANCHORS = "weights.safetensors", "anchors.safetensors"


@dataclass
class Progress:
    """Where a run stands, beside its weights."""

    step: int = 0
    taken: int = 0
    """Steps drawn from the data, those of projections included."""
    best_step: int | None = None
    best_loss: float | None = None
    evaluations: list[dict[str, float]] = field(default_factory=list)
    """Each with its step; the first is that of the untouched model."""

    def add(self, figures: Mapping[str, float]) -> None:
        """Take in an evaluation of the weights as they are."""
        self.evaluations.append({"step": self.step, **figures})

    def saved(self) -> None:
        """The weights as they are have a checkpoint: the best, if none before had a lower loss."""
        loss = self.evaluation_at(self.step).get("loss")
        if not self.step or loss is None or not math.isfinite(loss):
            return
        if self.best_loss is None or loss < self.best_loss:
            self.best_step, self.best_loss = self.step, loss

    def evaluation_at(self, step: int) -> dict[str, float]:
        return next((e for e in self.evaluations if e["step"] == step), {})


def save_checkpoint(
    run: RunFolder,
    model: nn.Module,
    optimizer: dict[str, Any],
    progress: Progress,
    beside: Mapping[str, Part] | None = None,
) -> Path:
    """Write checkpoint-N. `optimizer` is the engine's state: numbers, and tensors by name in its mappings.

    `beside`: files of the run's folder that a resume needs as they are by now.
    """
    with new_checkpoint(run.checkpoints, progress.step, beside) as folder:
        save_file(tuned(model), folder / WEIGHTS)
        if optimizer.get("anchors"):
            save_file(optimizer["anchors"], folder / ANCHORS)
        numbers = {key: value for key, value in optimizer.items() if key != "anchors"}
        state = json.dumps({"optimizer": numbers, "progress": asdict(progress)}, indent=2)
        write_whole(folder / OWN_STATE, state + "\n")
    return run.checkpoints / name_of(progress.step)


def load_checkpoint(folder: Path, model: nn.Module) -> tuple[dict[str, Any], Progress]:
    """Put the checkpoint's weights into the model; gives the engine's state and the run's progress."""
    if not (folder / WEIGHTS).is_file():
        raise RequestError.of(
            f"{folder}: no {WEIGHTS}",
            "this is a checkpoint of another recipe",
            "resume it with the config.yaml of its own run",
        )
    load_weights(folder, model)
    # Earlier versions named the state as transformers does.
    name = OWN_STATE if (folder / OWN_STATE).is_file() else TRAINER_STATE
    change = "resume from another checkpoint, or put back the file that the run wrote"
    state = read_json_object(folder / name, "the state of a checkpoint", change)
    optimizer, progress = state.get("optimizer"), state.get("progress")
    known = {one.name for one in fields(Progress)}
    if not isinstance(optimizer, dict) or not isinstance(progress, dict) or not progress.keys() <= known:
        raise RequestError.of(
            f"{folder / name}: not the state of a checkpoint",
            "it tells of `optimizer` and of `progress`, as the run that saved it did",
            change,
        )
    optimizer["anchors"] = load_file(folder / ANCHORS) if (folder / ANCHORS).is_file() else {}
    return optimizer, Progress(**progress)


def load_weights(folder: Path, model: nn.Module) -> None:
    """The tuned weights of a checkpoint, into a model of the same shape."""
    saved = load_file(folder / WEIGHTS)
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if saved.keys() != own.keys() or any(saved[name].shape != p.shape for name, p in own.items()):
        raise RequestError.of(
            f"{folder}: its tuned weights are not those of this model",
            "the model, the method or the LoRA settings have changed since it was saved",
            "resume with the config.yaml that the run keeps",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def tuned(model: nn.Module) -> dict[str, Tensor]:
    """The tuned weights by name, on the CPU."""
    return {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if p.requires_grad}
