"""torch.export beside virtual GPUs: a model on the host is exported as ever, one on a GPU says that it cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.state import NotSimulated


class Lookup(nn.Module):
    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.register_buffer("positions", torch.arange(8)[None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(ids) + self.table(self.positions[:, : ids.shape[1]])
        return found


def test_a_model_on_the_host_is_exported_and_one_on_a_gpu_is_not_simulated() -> None:
    with virtual_gpus(1):
        model, ids = Lookup(), torch.tensor([[1, 2, 3]])
        assert torch.equal(torch.export.export(model, (ids,)).module()(ids), model(ids))
        with pytest.raises(NotSimulated, match=r"torch\.export"):
            torch.export.export(model.cuda(), (ids.cuda(),))
