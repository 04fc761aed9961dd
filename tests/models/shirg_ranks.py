"""What a rank of the two-rank SHIRG test does: a few steps, with pictures on one rank and text alone on the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from vision_ranks import meet, optimizer_of, shard, weights

from tiny_processors import tiny_processor
from tiny_shirg import SMALL, batch_of, model_of
from trimtab.config.schema import LoraSettings
from trimtab.models import IMAGE_TEXT
from trimtab.models.adapters import add_lora
from trimtab.models.shirg import shirg_processor
from trimtab.models.take_part import take_part

STEPS = [("pictures", "pictures"), ("pictures", "text"), ("text", "pictures"), ("pictures", "pictures")]


def adapted(*, helped: bool = True) -> Any:
    model = add_lora(
        model_of("llava_onevision"),
        LoraSettings(r=2, targets=["all-linear", "vision", "connector"]),
        IMAGE_TEXT,
    )
    model.config.use_cache = model.config.get_text_config().use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if helped:
        plain = tiny_processor("llava_onevision")
        bare = model.get_base_model().config
        plain.image_token = plain.tokenizer.convert_ids_to_tokens(bare.image_token_id)
        take_part(model, shirg_processor(plain, SMALL, bare))
    return model.train()


def batch(kind: str, seed: int) -> dict[str, Any]:
    made = batch_of(rows=2, seed=seed)
    if kind == "text":
        del made["pixel_values"]
        made["input_ids"] = torch.where(made["input_ids"] == 100, 7, made["input_ids"])
    return made


def train(rank: int, folder: str, wrapper: str) -> None:
    meet(rank, Path(folder), 60)
    model = adapted()
    wrapped = shard(model) if wrapper == "fsdp2" else DistributedDataParallel(model)
    optimizer = optimizer_of(wrapped)
    losses = []
    for step, kinds in enumerate(STEPS):
        loss = wrapped(**batch(kinds[rank], 10 * step + rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save((losses, weights(wrapped)), Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()
