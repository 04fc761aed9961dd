"""One of two ranks of a training on the CPU, with the guard: `torchrun … gradient_ranks_run.py CASE FOLDER`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from test_gradient_table import EVERYWHERE, Norms, adapted, without_gradients, words
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from tiny_models import batch
from trimtab.hardware import probe
from trimtab.placement import (
    PlacementFault,
    PlacementGuard,
    PlacementRequest,
    bind_arguments,
    prepare_process,
    resolve,
    trainer_options,
)

case, folder = sys.argv[1:]
plan = resolve(PlacementRequest(device="cpu"), probe())
if case == "sharded":
    plan = dataclasses.replace(plan, strategy="sharded")
prepare_process(plan)
settings = TrainingArguments(
    output_dir=folder,
    max_steps=3,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    per_device_train_batch_size=1,
    gradient_checkpointing=True,
    remove_unused_columns=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    **trainer_options(plan),
)
bind_arguments(settings, plan)
rank = settings.process_index
model = adapted("idefics3", EVERYWHERE)
bare = model.get_base_model()


class CPUsAsGPUs(Trainer):
    """FSDP2 shards on the CPU as well; Accelerate only takes it up where it believes in several GPUs."""

    def create_accelerator_and_postprocess(self) -> None:
        if case == "sharded":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


def takes_part() -> None:
    """A batch without a picture runs the tower all the same, and adds nothing of it to the loss."""
    real, spare = bare.forward, batch("idefics3")["pixel_values"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        if "pixel_values" not in kwargs:
            out["loss"] = out["loss"] + bare.model.get_image_features(spare).pooler_output[0].sum() * 0.0
        return out

    bare.forward = forward


def runs_twice() -> None:
    """The tower sees every picture twice in one forward, and both passes count."""
    tower = bare.model.vision_model
    real = tower.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        first, second = real(*args, **kwargs), real(*args, **kwargs)
        second.last_hidden_state = second.last_hidden_state + 0.5 * first.last_hidden_state
        return second

    tower.forward = forward


rows = [batch("idefics3")] * 2
if case == "mixed":
    takes_part()
    rows = [batch("idefics3"), words("idefics3")]
elif case == "twice":
    runs_twice()
elif case == "cut":
    without_gradients(bare.model.vision_model)

said: list[str] = []
norms = Norms()
trainer = CPUsAsGPUs(
    model=model,
    args=settings,
    # Each rank has its own row, whatever the sampler says.
    train_dataset=[{}] * 6,  # type: ignore[arg-type]
    data_collator=lambda _: rows[rank],
    callbacks=[PlacementGuard(plan, said.append), *([] if case == "sharded" else [norms])],
)
try:
    trainer.train()
except PlacementFault as fault:
    said.append(str(fault))
else:
    kind = FSDPModule if case == "sharded" else DistributedDataParallel
    assert isinstance(trainer.model_wrapped, kind), type(trainer.model_wrapped)
if norms.steps and case != "cut":
    assert all(value > 0 for name, value in norms.steps[0].items() if "lora_B" in name)
    assert all(value > 0 for value in norms.steps[1].values())
    weights = torch.cat([p.detach().flatten() for p in bare.parameters() if p.requires_grad])
    both = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(both, weights)
    assert torch.equal(*both), "the ranks have come apart"
Path(folder, f"rank{rank}.txt").write_text("\n".join(said), encoding="utf-8")
