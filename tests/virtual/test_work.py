"""What kernels an operation is counted as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trimtab.launches import Launch
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.work import Tally


def counted(run: Callable[[], Any]) -> dict[Launch, float]:
    tally = Tally()
    with virtual_gpus(1) as machine:
        tally.listen(machine)
        run()  # what makes the operands is not counted
        tally.on = True
        run()
    return dict(tally.work().get("", {}))


def number(run: Callable[[], Any]) -> float:
    return sum(counted(run).values())


def test_a_sum_is_one_launch_with_the_bytes_that_it_moves() -> None:
    x = torch.ones(8, 16)
    made = counted(lambda: torch.add(x.cuda(), 1.0))
    added = [launch for launch in made if launch.nbytes == 2 * x.numel() * x.element_size()]
    assert [launch.by for launch in added] == ["eager"]
    assert not any(launch.flops for launch in made)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_mask_is_looked_through_before_it_is_an_index(accumulate: bool) -> None:
    """Places are one launch, a mask is counted and written out first; values that may meet are sorted."""
    x, value = torch.zeros(8), torch.ones(())
    mask, places = torch.arange(8) < 3, torch.arange(3)

    def put(index: torch.Tensor) -> Callable[[], Any]:
        return lambda: x.cuda().index_put_((index.cuda(),), value.cuda(), accumulate=accumulate)

    assert number(put(mask)) > number(put(places))
    assert number(lambda: x.cuda()[mask.cuda()]) > number(lambda: x.cuda()[places.cuda()])


def test_values_that_may_meet_are_more_launches_than_values_that_do_not() -> None:
    x, value, places = torch.zeros(8), torch.ones(()), torch.arange(3)

    def put(accumulate: bool) -> Callable[[], Any]:
        return lambda: x.cuda().index_put_((places.cuda(),), value.cuda(), accumulate=accumulate)

    assert number(put(True)) > number(put(False))
