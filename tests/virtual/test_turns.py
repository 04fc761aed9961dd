"""Loops of which a few turns stand for all by shapes: the memory and the kernels of all of them, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trimtab.models import nf4
from trimtab.virtual import turns, work
from trimtab.virtual.context import virtual_gpus

ROUND = ("allocated_bytes.all", "reserved_bytes.all", "requested_bytes.all", "inactive_split_bytes.all")


def there_and_back(rows: int, tally: work.Tally) -> tuple[Any, ...]:
    tally.sections.clear()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    packed = nf4.pack(torch.nn.Linear(14336, rows, device="cuda", dtype=torch.float16).weight)
    stats = [torch.cuda.memory_stats()]
    torch.cuda.reset_peak_memory_stats()
    made = nf4.unpack(packed, torch.float16)
    stats.append(torch.cuda.memory_stats())
    del made
    kinds = ("current", "peak")
    return [
        {f"{name}.{kind}": one[f"{name}.{kind}"] for name in ROUND for kind in kinds} for one in stats
    ], tally.work()


@pytest.mark.parametrize("rows", [2600, 4001, 4096, 14336])
def test_a_packed_matrix_takes_what_all_turns_take(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def all_of(spans: Sequence[Any], tensor: torch.Tensor) -> Sequence[Any]:
        asked.append(len(spans))
        return spans

    with virtual_gpus(1, shapes=True) as machine:
        tally = work.Tally()
        tally.listen(machine)
        tally.on, tally.section = True, "pass"
        there_and_back(rows, tally)
        few = there_and_back(rows, tally)
        monkeypatch.setattr(turns, "of", all_of)
        every = there_and_back(rows, tally)
    assert few == every
    assert min(asked) > 7


def test_turns_are_left_out_only_where_nothing_has_values() -> None:
    with virtual_gpus(1, shapes=True):
        big, small = torch.randn(512, 512, device="cuda"), torch.ones(8, device="cuda")
        assert list(turns.of(range(19), big)) == [0, 1, 2, 3, 4, 5, 18]
        assert list(turns.of(range(20), big)) == [0, 1, 2, 3, 4, 19]
        assert list(turns.of(range(7), big)) == list(range(7))
        assert list(turns.of(range(9), small)) == list(range(9))
    assert list(turns.of(range(9), torch.zeros(2))) == list(range(9))
