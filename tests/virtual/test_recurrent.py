"""Recurrent layers on virtual GPUs: cuDNN goes back through them in training mode only."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import trimtab.virtual as virtual


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_backward_in_eval_mode_is_refused_as_by_cudnn(kind: type[nn.RNNBase], packed: bool) -> None:
    with virtual.virtual_gpus(1):
        layer = kind(3, 4).cuda()
        rows = torch.ones(2, 2, 3, device="cuda")
        given = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor([2, 1])) if packed else rows

        def loss() -> torch.Tensor:
            made = layer(given)[0]
            return (made.data if packed else made).sum()

        loss().backward()
        layer.eval()
        with torch.no_grad():
            loss()
        with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
            loss().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_kernels_do_not_mind(device: str) -> None:
    with virtual.virtual_gpus(1):
        layer = nn.LSTM(3, 4).to(device).eval()
        with torch.backends.cudnn.flags(enabled=False) if device == "cuda" else nullcontext():
            layer(torch.ones(2, 2, 3, device=device))[0].sum().backward()
        assert layer.weight_ih_l0.grad is not None
