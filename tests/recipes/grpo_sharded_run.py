"""A process of a GRPO run on the CPU, sharded by FSDP2 or not: `torchrun … grpo_sharded_run.py STRATEGY SETTING …`."""

from __future__ import annotations

import dataclasses
import sys

import transformers
from accelerate.state import PartialState
from many_processes import CPUsAsGPUs
from torch.distributed.fsdp import FSDPModule

from trimtab.config import load_config
from trimtab.recipes import grpo_trainer
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder


class Sharded(CPUsAsGPUs, grpo_trainer.PlacedGRPOTrainer):
    pass


def count_forwards(model: transformers.GenerationMixin, *args: object, **kwargs: object) -> object:
    """The model's own generation, telling whether it is sharded, its forward passes, and what it made."""
    passes = 0

    def add(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = model.get_input_embeddings().register_forward_hook(add)
    out = generate(model, *args, **kwargs)
    hook.remove()
    sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
    new = out.shape[1] - kwargs["input_ids"].shape[1]  # type: ignore[attr-defined]
    with open(f"{config.output_dir}-rank{PartialState().process_index}.txt", "a") as file:
        file.write(f"{sharded} {passes} {new}\n")
    return out


strategy, *settings = sys.argv[1:]
config = load_config(None, settings)
plan = dataclasses.replace(plan_run(config).plan, strategy=strategy)
generate = transformers.GenerationMixin.generate
if strategy == "sharded":
    grpo_trainer.PlacedGRPOTrainer = Sharded  # type: ignore[misc]
    transformers.GenerationMixin.generate = count_forwards
run_recipe(config, plan, open_run_folder(config))
