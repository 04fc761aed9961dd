"""What takes all dispatch modes away leaves the GPUs where they are, as it does on hardware."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _pop_mode_temporarily

import trimtab


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def no_dispatch() -> AbstractContextManager[Any]:
    from torch.utils._mode_utils import no_dispatch

    return no_dispatch()


AWAY = [
    _disable_current_modes,
    no_dispatch,
    lambda: torch._C._DisableTorchDispatch(),
    lambda: torch._C.DisableTorchFunctionSubclass(),
]


@pytest.mark.parametrize("away", AWAY)
def test_values_and_places_are_as_outside(away: Callable[[], AbstractContextManager[Any]]) -> None:
    with trimtab.virtual_gpus(2), away():
        made = [
            torch.ones(3, device="cuda:1"),
            torch.ones(3).to("cuda:1"),
            torch.tensor([1.0, 1.0, 1.0], device="cuda:1"),
            torch.arange(1, 2, device="cuda:1").expand(3).float(),
        ]
        assert [t.device for t in made] == [torch.device("cuda:1")] * 4
        assert sum(made).tolist() == [4.0] * 3  # type: ignore[union-attr]
        layer = nn.Linear(3, 2).to("cuda:1")
        layer(made[0]).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.0] * 3] * 2
        with pytest.raises(RuntimeError, match="found at least two devices, cuda:1 and cpu"):
            made[0] + torch.ones(3)


@pytest.mark.parametrize("away", AWAY[:3])
def test_the_programs_own_mode_is_away(away: Callable[[], AbstractContextManager[Any]]) -> None:
    with trimtab.virtual_gpus(1):
        with Counting() as counting:
            with away():
                torch.ones(3, device="cuda").sum()
            assert counting.seen == 0
            with _pop_mode_temporarily():
                assert torch.ones(3, device="cuda").sum().item() == 3
            assert counting.seen == 0
            torch.ones(3, device="cuda").sum()
        assert counting.seen == 2


def test_a_class_of_the_programs_own_is_not_asked() -> None:
    """As `torch.sparse` does it: the guard is in force from when it is made until it is deleted."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            guard = torch._C._DisableTorchDispatch()
            made = func(*args, **(kwargs or {}))
            del guard
            seen.append(func)
            return made

    seen: list[Any] = []
    with trimtab.virtual_gpus(1):
        loud = torch.Tensor._make_subclass(Loud, torch.ones(3))
        assert (loud + 1).sum().item() == 6
        assert torch.ops.aten.add.Tensor in seen
        assert torch.ones(2, device="cuda").sum().item() == 2


def test_nothing_is_left_behind() -> None:
    before = torch._C._DisableTorchDispatch
    with trimtab.virtual_gpus(1):
        assert torch._C._DisableTorchDispatch is not before
    assert torch._C._DisableTorchDispatch is before
    with Counting() as counting, _disable_current_modes() as taken:
        torch.ones(3).sum()
    assert taken == [counting]
    assert counting.seen == 0
