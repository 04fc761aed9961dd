"""A process of an SFT run on the CPU, sharded by FSDP2 or not: `torchrun … sft_sharded_run.py STRATEGY SETTING …`."""

from __future__ import annotations

import dataclasses
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from trimtab.config import load_config
from trimtab.recipes import sft_trainer
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder


class CPUsAsGPUs(sft_trainer.SftTrainer):
    """FSDP2 shards on the CPU as well; Accelerate only takes it up where it believes in several GPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        assert self.accelerator.distributed_type == DistributedType.FSDP


strategy, *settings = sys.argv[1:]
config = load_config(None, settings)
plan = dataclasses.replace(plan_run(config).plan, strategy=strategy)
if strategy == "sharded":
    sft_trainer.SftTrainer = CPUsAsGPUs  # type: ignore[misc]
run_recipe(config, plan, open_run_folder(config))
