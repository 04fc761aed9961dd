"""What CUDA refuses in 16 bits, though a CPU kernel or a stand-in in 32 bits would do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.virtual import virtual_gpus


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual_gpus(1):
        yield


def half(*size: int) -> Tensor:
    return torch.rand(*size, device="cuda", dtype=torch.float16)


def ctc(scores: Tensor) -> Tensor:
    targets = torch.ones(1, 2, dtype=torch.long, device="cuda")
    lengths = torch.tensor([4]), torch.tensor([2])
    return functional.ctc_loss(scores.log_softmax(-1), targets, *lengths)


REFUSED: dict[str, Callable[[], Any]] = {
    "ctc_loss_cuda": lambda: ctc(half(4, 1, 5)),
    "cdist_cuda": lambda: torch.cdist(half(3, 4), half(2, 4)),
    "pdist_cuda": lambda: functional.pdist(half(3, 4)),
    "igamma_cuda": lambda: torch.special.gammainc(half(2), half(2)),
    "HalfTensor is not supported": lambda: half(4).histc(),
    "powers of two": lambda: torch.fft.rfft2(half(6, 6)),
    "expected scalar type Half but found Float": lambda: nn.LayerNorm(4).cuda()(half(2, 4)),
    "scalar type Half but found Float": lambda: nn.GroupNorm(2, 4).cuda()(half(2, 4, 3)),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_has_no_kernel_in_16_bits_is_refused(says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        REFUSED[says]()


def test_what_has_one_works() -> None:
    assert torch.cdist(half(30, 4), half(2, 4)).dtype is torch.float16
    assert torch.fft.rfft(half(2, 8)).dtype is torch.complex32
    assert torch.fft.irfft(torch.fft.rfft(half(2, 8))).dtype is torch.float16
    assert nn.LayerNorm(4).cuda().half()(half(2, 4)).dtype is torch.float16
    assert nn.BatchNorm1d(4).cuda()(half(2, 4)).dtype is torch.float16


def test_autocast_computes_them_in_32_bits() -> None:
    with torch.autocast("cuda", dtype=torch.float16):
        assert ctc(half(4, 1, 5)).dtype is torch.float32
        assert nn.LayerNorm(4).cuda()(half(2, 4)).dtype is torch.float32
        assert torch.cdist(half(3, 4), half(2, 4)).dtype is torch.float32
