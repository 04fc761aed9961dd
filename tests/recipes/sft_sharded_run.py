"""A process of an SFT run on the CPU, sharded by FSDP2 or not: `torchrun … sft_sharded_run.py STRATEGY SETTING …`."""

from __future__ import annotations

import dataclasses
import sys

from many_processes import CPUsAsGPUs

from trimtab.config import load_config
from trimtab.recipes import sft_trainer
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder


class Sharded(CPUsAsGPUs, sft_trainer.SftTrainer):
    pass


strategy, *settings = sys.argv[1:]
config = load_config(None, settings)
plan = dataclasses.replace(plan_run(config).plan, strategy=strategy)
if strategy == "sharded":
    sft_trainer.SftTrainer = Sharded  # type: ignore[misc]
run_recipe(config, plan, open_run_folder(config))
