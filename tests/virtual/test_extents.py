"""Where the size of each dimension was decided: followed through operations, moves, loaders and processes."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trimtab.virtual import extents, origin
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.observer import Observer


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with virtual_gpus(1, observer=Observer()):
        yield


def line() -> int:
    """The caller's line."""
    return sys._getframe(1).f_lineno


def lines(tensor: Tensor) -> list[int | None]:
    found = [extents.decided_at(tensor, dimension) for dimension in range(tensor.dim())]
    return [at.line if at is not None else None for at in found]


def test_a_stack_decides_one_dimension_and_keeps_the_others() -> None:
    rows = [torch.ones(2, 7) for _ in range(3)]
    made = line() - 1
    stacked, here = torch.stack(rows, dim=1), line()
    assert lines(stacked) == [made, here, made]


def test_arithmetic_moves_and_views_of_other_dimensions_decide_nothing() -> None:
    x, made = torch.ones(2, 3, 4), line()
    y, here = torch.cat([x, x], dim=2), line()
    z = (y.cuda().half() * 2 + 1).detach().float()
    z = torch.softmax(z, -1).clone().contiguous()
    assert lines(z) == [made, made, here]
    assert lines(z[None].squeeze(0)) == [made, made, here]
    assert lines(z.mean(1)) == [made, here]
    assert lines(z[:, 0]) == [made, here]


def test_a_transposition_takes_the_lines_along() -> None:
    x, made = torch.ones(4, 4), line()
    y, here = torch.stack([x, x, x, x]), line()
    assert lines(y) == [here, made, made]
    assert lines(y.transpose(0, 2)) == [made, made, here]
    assert lines(y.permute(1, 0, 2)) == [made, here, made]
    assert lines(y[:, 0].T) == [made, here]


def test_a_reshape_decides_what_it_joins_or_parts() -> None:
    x, made = torch.ones(2, 3, 4), line()
    joined, here = x.reshape(2, 12), line()
    assert lines(joined) == [made, here]
    parted, there = joined.view(2, 1, 6, 2), line()
    assert lines(parted)[0] == made
    assert lines(parted)[2:] == [there, there]


def test_a_slice_decides_its_own_dimension() -> None:
    x, made = torch.ones(6, 5), line()
    y, here = x[:, 1:3], line()
    assert lines(y) == [made, here]
    (part, *_), there = x.split(2), line()
    assert lines(part) == [there, made]


def test_a_layer_gives_the_width_that_it_was_made_with() -> None:
    layer, built = nn.Linear(3, 7).cuda(), line()
    x, made = torch.ones(2, 3).cuda(), line()
    assert lines(layer(x)) == [made, built]
    table, held = nn.Embedding(9, 5).cuda(), line()
    ids, given = torch.zeros(2, 4, dtype=torch.long).cuda(), line()
    assert lines(table(ids)) == [given, given, held]
    picture, seen = torch.ones(2, 3, 8, 8).cuda(), line()
    conv, built = nn.Conv2d(3, 4, 5).cuda(), line()
    found, here = conv(picture), line()
    assert lines(found) == [seen, built, here, here]


def _pair(one: Tensor) -> Tensor:
    return torch.stack([one, one])


def _pairs() -> list[Tensor]:
    one = torch.ones(3)
    return list(map(_pair, [one] * 4))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_loader_decides_the_batch_alone(workers: int, pinned: bool) -> None:
    rows = _pairs()
    for batch in DataLoader(rows, batch_size=2, num_workers=workers, pin_memory=pinned):
        moved = batch.cuda()
        found = [extents.decided_at(moved, dimension) for dimension in (1, 2)]
        assert [at.function for at in found if at is not None] == ["_pair", "_pairs"]


def test_copies_keep_it_and_files_do_not() -> None:
    x = torch.stack([torch.ones(2), torch.ones(2)]).cuda()
    assert lines(copy.deepcopy(x)) == lines(x)
    file = io.BytesIO()
    torch.save(x, file)
    assert origin.EXTENTS.encode() not in file.getvalue()


def test_nothing_is_kept_without_an_observer() -> None:
    with virtual_gpus(1):
        assert origin.EXTENTS not in torch.stack([torch.ones(2), torch.ones(2)]).__dict__
