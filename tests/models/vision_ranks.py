"""What a rank of the two-rank vision tests does: a few steps on batches with and without pictures, by DDP or FSDP2."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from picture_rows import drawn, question
from tiny_processors import tiny_pair, tiny_processor
from trimtab.config.schema import LoraSettings
from trimtab.data.picture_collate import PictureCollator
from trimtab.models import IMAGE_TEXT
from trimtab.models.adapters import add_lora
from trimtab.models.take_part import take_part

# What the two ranks have at each step.
STEPS = [("pictures", "text"), ("text", "pictures"), ("text", "text"), ("pictures", "pictures")]
TARGETS = ["all-linear", "vision", "connector"]


def adapted(model_type: str, *, helped: bool) -> Any:
    made, processor = tiny_pair(model_type)
    torch.manual_seed(0)
    made.config.use_cache = made.config.get_text_config().use_cache = False
    model = add_lora(made, LoraSettings(r=2, targets=TARGETS), IMAGE_TEXT)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if helped:
        take_part(model, processor)
    return model.train()


def batch_of(model_type: str, kind: str, seed: int) -> dict[str, Any]:
    pictures = [drawn(20 + seed, 30)] if kind == "pictures" else []
    rows = [question(f"How many bars, {seed}?", f"{seed} of them", *pictures)]
    return PictureCollator(tiny_processor(model_type))(rows)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def shard(model: Any) -> Any:
    """As Accelerate does it: a group for each layer that the model wants whole, the embeddings, and the rest."""
    layers = set(model.get_base_model()._no_split_modules)
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module)
    fully_shard(model.get_input_embeddings())
    return fully_shard(model)


def meet(rank: int, folder: Path, seconds: float) -> None:
    """By a file: a port that was free a moment ago may be somebody else's by now."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds),
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    found = {
        name.removeprefix("module."): p.detach() for name, p in model.named_parameters() if p.requires_grad
    }
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in found.items()}


def train(rank: int, folder: str, model_types: list[str], wrapper: str) -> None:
    """Each model in turn: mixed steps, and an evaluation of a mixed batch; the losses and weights are kept."""
    meet(rank, Path(folder), 60)
    for model_type in model_types:
        model = adapted(model_type, helped=True)
        wrapped = shard(model) if wrapper == "fsdp2" else DistributedDataParallel(model)
        optimizer = optimizer_of(wrapped)
        losses = []
        for step, kinds in enumerate(STEPS):
            loss = wrapped(**batch_of(model_type, kinds[rank], 10 * step + rank)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(wrapped(**batch_of(model_type, STEPS[0][rank], rank)).loss.item())
        torch.save((losses, weights(wrapped)), Path(folder) / f"{model_type}-{rank}.pt")
    torch.distributed.destroy_process_group()


def left_alone(rank: int, folder: str, model_type: str, wrapper: str) -> None:
    """Rank 0 has a picture, rank 1 text alone, and nothing takes part for it. Each writes how its step ended."""
    meet(rank, Path(folder), 4)
    model = adapted(model_type, helped=False)
    wrapped = shard(model) if wrapper == "fsdp2" else DistributedDataParallel(model)
    told = "finished"
    try:
        wrapped(**batch_of(model_type, STEPS[0][rank], rank)).loss.backward()
    except RuntimeError as error:
        told = str(error)
    (Path(folder) / f"ended-{rank}").write_text(told)
    # A process that ended would break the connection, and the other would not wait any longer.
    for _ in range(600):
        if (Path(folder) / f"ended-{1 - rank}").is_file():
            break
        time.sleep(0.1)
