"""What a rank of the two-rank test does. Needs torch alone, so that a fresh process starts quickly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.zeroth import ZerothOrder, ZerothSettings


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


def run(rank: int, world: int, port: int, folder: str, settings: ZerothSettings, parts: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    tuned = model()
    optimizer = ZerothOrder(tuned, settings, loss)
    optimizer.record(f"{folder}/rank{rank}.bin")
    seen = go(optimizer, parts)
    torch.save((seen, tuned.state_dict()), f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()
