"""Every way to say where a new tensor goes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.tensor import VirtualTensor


@pytest.fixture(autouse=True)
def _machine():
    with virtual_gpus(2) as machine:
        yield machine


def there() -> torch.Tensor:
    return torch.ones(2, 2, device="cuda:1")


MADE: dict[str, Callable[[], torch.Tensor]] = {
    "int": lambda: torch.zeros(2, device=1),
    "string": lambda: torch.randn(2, device="cuda:1"),
    "device": lambda: torch.arange(3, device=torch.device("cuda", 1)),
    "full": lambda: torch.full((2,), 1.0, device="cuda:1"),
    "eye": lambda: torch.eye(2, device="cuda:1"),
    "linspace": lambda: torch.linspace(0, 1, 3, device="cuda:1"),
    "randint": lambda: torch.randint(0, 3, (2,), device="cuda:1"),
    "randperm": lambda: torch.randperm(4, device="cuda:1"),
    "normal": lambda: torch.normal(0.0, 1.0, (2,), device="cuda:1"),
    "empty_strided": lambda: torch.empty_strided((2,), (1,), device="cuda:1"),
    "tril_indices": lambda: torch.tril_indices(2, 2, device="cuda:1"),
    "hann_window": lambda: torch.hann_window(4, device="cuda:1"),
    "zeros_like": lambda: torch.zeros_like(torch.ones(2), device="cuda:1"),
    "ones_like": lambda: torch.ones_like(there()),
    "rand_like": lambda: torch.rand_like(there()),
    "new_zeros": lambda: there().new_zeros(2),
    "new_tensor": lambda: there().new_tensor([1]),
    "new_full": lambda: torch.ones(2).new_full((1,), 2.0, device="cuda:1"),
    "tensor": lambda: torch.tensor([1, 2], device="cuda:1"),
    "tensor of tensors": lambda: torch.tensor([torch.tensor(1, device="cuda:1"), 2], device="cuda:1"),
    "as_tensor": lambda: torch.as_tensor([1], device="cuda:1"),
    "as_tensor of numpy": lambda: torch.as_tensor(np.ones(2), device="cuda:1"),
    "as_tensor of itself": lambda: torch.as_tensor(there()),
    "asarray": lambda: torch.asarray([1.0], device="cuda:1"),
    "from_numpy and to": lambda: torch.from_numpy(np.ones(2)).to("cuda:1", torch.float16, non_blocking=True),
    "cuda": lambda: torch.ones(2).cuda(1),
    "to int": lambda: torch.ones(2).to(1),
    "to like": lambda: torch.ones(2).to(there()),
}


@pytest.mark.parametrize("name", MADE)
def test_made_on_the_device(name: str) -> None:
    made = MADE[name]()
    assert type(made) is VirtualTensor
    assert made.device == torch.device("cuda", 1)


def test_made_on_the_cpu() -> None:
    assert torch.tensor(there().tolist()).device.type == "cpu"
    assert torch.ones(2).new_tensor([1.0]).device.type == "cpu"
    assert there().new_tensor([1.0], device="cpu").device.type == "cpu"
    assert torch.zeros_like(there(), device="cpu").device.type == "cpu"
    assert there().cpu().device.type == "cpu"
    assert type(there().cpu()) is torch.Tensor


def test_cuda_without_an_index_is_the_current_device() -> None:
    assert torch.zeros(1, device="cuda").device.index == 0
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device.index == 1
        assert torch.ones(1).cuda().device.index == 1
    assert torch.device(1) == torch.device("cuda:1")


def test_default_device_context() -> None:
    with torch.device("cuda:1"):
        assert torch.tensor([1.0]).device.index == 1
        assert torch.ones(2).device.index == 1
        assert nn.Linear(2, 2).weight.device.index == 1
        assert torch.tensor([1.0], device="cpu").device.type == "cpu"
        assert torch.get_default_device() == torch.device("cuda:1")
    assert torch.ones(2).device.type == "cpu"


def test_set_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.tensor([1.0]).device == torch.device("cuda:0")
        assert torch.zeros(2).device == torch.device("cuda:0")
        assert torch.get_default_device() == torch.device("cuda:0")
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.zeros(2, device="cuda:5"),
        lambda: torch.ones(2).to("cuda:2"),
        lambda: torch.ones(2).cuda(7),
        lambda: torch.tensor([1], device=3),
        lambda: nn.Linear(2, 2).to("cuda:2"),
    ],
)
def test_a_device_that_is_not_there(work: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
        work()


def test_requires_grad_makes_a_leaf() -> None:
    for made in (
        torch.zeros(2, device="cuda", requires_grad=True),
        torch.tensor([1.0], device=0, requires_grad=True),
    ):
        assert made.requires_grad
        assert made.is_leaf


def test_tensor_copies_and_as_tensor_does_not() -> None:
    source = there()
    assert torch.as_tensor(source) is source
    copied = torch.tensor(source)
    copied.zero_()
    assert source.sum() == 4
