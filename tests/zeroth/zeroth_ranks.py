"""What a rank of the two-rank tests does. Needs torch alone, so that a fresh process starts quickly."""

from __future__ import annotations

import os
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.zeroth import ZerothOrder, ZerothSettings
from trimtab.zeroth.peers import together


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mixed = F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return self.head(x + mixed)[:, -1]  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(0)
    return Attention()


def loss(m: nn.Module, ids: Tensor, lanes: int) -> Tensor:
    logits = m(ids.repeat(lanes, 1))
    return F.cross_entropy(logits, ids[:, 0].repeat(lanes), reduction="none").view(lanes, -1)


def batch(seed: int, rows: int) -> Tensor:
    return torch.randint(0, 20, (rows, 5), generator=torch.Generator().manual_seed(seed))


def go(optimizer: ZerothOrder, parts: int) -> list[Any]:
    """A few steps, each of several micro-batches of different sizes."""
    seen: list[Any] = []
    for step in range(4):
        seen.append(optimizer.step([batch(10 * step + i, 1 + i) for i in range(parts)]).losses)
        made = optimizer.project(lambda: [batch(500 + optimizer.forwards + i, 2) for i in range(parts)])
        seen.append(made and (made.losses, made.ratios))
    return seen


def meet(rank: int, world: int, folder: str) -> None:
    """By a file: a port that was free a moment ago may be somebody else's by now."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=200),
    )


def run(rank: int, world: int, folder: str, settings: ZerothSettings, parts: int) -> None:
    warnings.filterwarnings("error", message=".* took no part ")
    meet(rank, world, folder)
    tuned = model()
    optimizer = ZerothOrder(tuned, settings, loss)
    optimizer.record(f"{folder}/rank{rank}.bin")
    seen = go(optimizer, parts)
    torch.save((seen, tuned.state_dict()), f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


def spoiled(rank: int, how: str) -> Any:
    """The loss, but for the second step on rank 1."""
    calls = 0

    def loss_fn(m: nn.Module, ids: Tensor, lanes: int) -> Tensor:
        nonlocal calls
        calls += 1
        losses = loss(m, ids, lanes)
        if rank == 1 and calls > 2:
            if how == "raises":
                raise IndexError("row 7 has no label")
            if how == "out of memory":
                raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")
            if how == "not finite":
                losses = losses * float("nan")
            if how == "dies":
                os._exit(0)
        return losses

    return loss_fn


def fail(rank: int, world: int, folder: str, settings: ZerothSettings) -> None:
    """Two steps, of which the second goes wrong on rank 1, in every way; what each rank raised is kept in a file.

    The ranks stay for the next way, so that none learns of a failure by a closed connection. The last way is to die.
    """
    meet(rank, world, folder)
    for how in ("raises", "out of memory", "not finite", "alone", "dies"):
        tuned, told = model(), "nothing"
        optimizer = ZerothOrder(tuned, settings, spoiled(rank, how))
        try:
            for step in range(2):
                before = [p.detach().clone() for p in tuned.parameters()]
                optimizer.step([batch(10 * step + i, 2) for i in range(2)])
            with together("writing a file"):
                if rank == 1 and how == "alone":
                    open(f"{folder}/nowhere/file").close()
        except Exception:
            told = traceback.format_exc()
            if how != "alone":
                assert all(map(torch.equal, before, tuned.parameters())), "the step was not made"
        Path(folder, f"{how}, rank {rank}").write_text(told)
    # The group has lost a member: gloo's threads could not be ended in order with the interpreter.
    os._exit(0)
