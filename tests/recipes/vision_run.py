"""A process of a vision run on the CPU that tells what its adapters got: `python vision_run.py STRATEGY SETTING …`.

Under torchrun each process writes OUTPUT_DIR-rankN.pt: the norm of every adapter's gradient at each step, and its
weights at the end. STRATEGY: the plan's, or `sharded` (FSDP2).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
from many_processes import CPUsAsGPUs
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trimtab.config import load_config
from trimtab.recipes import picture_trainer
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import RunFolder, open_run_folder

RANK = int(os.environ.get("RANK", "0"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Witness(TrainerCallback):
    """Sees every step's gradients, and what is there in the end."""

    def __init__(self, file: str) -> None:
        self.file, self.steps = file, []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(
            {
                name: None if p.grad is None else float(whole(p.grad).norm())
                for name, p in trained(kwargs["model"])
            }
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = {name: whole(p.detach()).clone() for name, p in trained(kwargs["model"])}
        torch.save((self.steps, weights), self.file)


def trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters() if p.requires_grad]


class Watched(picture_trainer.PictureTrainer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.add_callback(Witness(f"{config.output_dir}-rank{RANK}.pt"))


class Sharded(CPUsAsGPUs, Watched):
    pass


strategy, *settings = sys.argv[1:]
config = load_config(None, settings)
plan = plan_run(config).plan
picture_trainer.PictureTrainer = Sharded if strategy == "sharded" else Watched  # type: ignore[misc]
if strategy == "sharded":
    plan = dataclasses.replace(plan, strategy="sharded")
assert config.output_dir is not None
run = open_run_folder(config) if RANK == 0 else RunFolder(Path(config.output_dir))
run_recipe(config, plan, run, print if RANK == 0 else lambda text: None)
