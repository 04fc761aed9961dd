"""Parameters of a class that a program has of its own, on virtual GPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab.virtual.state import NotSimulated


class Named(nn.Parameter):
    """Made by torch's constructor."""

    said: str

    def __new__(cls, data: Any = None, requires_grad: bool = True, said: str = "") -> Any:
        made: Any = super().__new__(cls, data, requires_grad)
        made.said = said
        return made


class Packed(nn.Parameter):
    """Made past it, with a way of its own to a device, as quantized weights are."""

    moves: int

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Any:
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.moves = 0
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        made = Packed(super().to(device), self.requires_grad)
        made.moves = self.moves + 1
        return made


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Named(torch.arange(6.0).view(2, 3), said="hello")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("shapes", [False, True])
def test_it_keeps_its_class_and_what_it_carries_on_the_way_to_a_gpu_and_back(shapes: bool) -> None:
    with trimtab.virtual_gpus(2, shapes=shapes):
        layer = Layer()
        weight = layer.weight
        layer.cuda(1)
        assert layer.weight is weight
        assert isinstance(weight, Named)
        assert weight.said == "hello"
        assert weight.is_cuda
        assert weight.device.index == 1
        assert weight.requires_grad
        layer.cpu()
        assert layer.weight is weight
        assert type(weight) is Named
        assert not weight.is_cuda
        assert weight.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_it_is_made_of_data_on_a_gpu_trained_and_copied_there() -> None:
    with trimtab.virtual_gpus(1):
        made = Named(torch.ones(2, 3, device="cuda"), said="hello")
        assert type(made).__name__ == "Named"
        assert isinstance(made, nn.Parameter)
        assert made.is_cuda
        again = type(made)(made.data, requires_grad=False)
        assert isinstance(again, Named)
        assert again.is_cuda
        assert not again.requires_grad
        layer = Layer()
        layer.weight = made
        twin = copy.deepcopy(layer)
        assert isinstance(twin.weight, Named)
        assert twin.weight is not made
        assert twin.weight.said == "hello"
        step = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer(torch.ones(1, 3, device="cuda")).sum().backward()
        step.step()
        assert made.tolist() == [[0.0] * 3] * 2
        assert twin.weight.tolist() == [[1.0] * 3] * 2
        assert type(made.detach()).__name__ == "VirtualTensor"
        assert type(nn.Parameter(made)).__name__ == "VirtualParameter"


def test_one_with_a_way_of_its_own_to_a_device_takes_it_also_by_a_number() -> None:
    with trimtab.virtual_gpus(2):
        packed = Packed(torch.ones(4))
        assert type(packed) is Packed
        for device in (1, "cuda:1", torch.device("cuda", 1)):
            moved = packed.to(device)
            assert isinstance(moved, Packed)
            assert moved.device.index == 1
            assert moved.moves == 1
        assert isinstance(moved.to("cpu"), Packed)
        assert moved.to("cpu").moves == 2
        assert nn.Linear(2, 2).to(1).weight.device.index == 1
    assert type(Packed(torch.ones(4))) is Packed


def test_a_class_that_is_no_parameter_is_still_refused() -> None:
    class Own(torch.Tensor):
        pass

    with trimtab.virtual_gpus(1), pytest.raises(NotSimulated, match="own class Own"):
        torch.Tensor._make_subclass(Own, torch.ones(2, device="cuda"))
