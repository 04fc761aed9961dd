"""Loops of which a few turns stand for all by shapes: the memory and the kernels of all of them, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trimtab.models import nf4
from trimtab.virtual import turns, work
from trimtab.virtual.context import virtual_gpus


def unpacked(packed: nf4.Packed, tally: work.Tally) -> tuple[Any, ...]:
    tally.sections.clear()
    torch.cuda.reset_peak_memory_stats()
    made = nf4.unpack(packed, torch.float16)
    stats = torch.cuda.memory_stats()
    del made
    keys = ("allocated_bytes.all", "reserved_bytes.all", "requested_bytes.all", "inactive_split_bytes.all")
    return {name: stats[f"{name}.{kind}"] for name in keys for kind in ("current", "peak")}, tally.work()


@pytest.mark.parametrize("rows", [4096, 4001, 14336])
def test_an_unpacked_matrix_takes_what_all_turns_take(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def all_of(spans: Sequence[Any], tensor: torch.Tensor) -> Sequence[Any]:
        asked.append(len(spans))
        return spans

    with virtual_gpus(1, shapes=True) as machine:
        tally = work.Tally()
        tally.listen(machine)
        tally.on, tally.section = True, "pass"
        packed = nf4.pack(torch.nn.Linear(14336, rows, device="cuda", dtype=torch.float16).weight)
        unpacked(packed, tally)
        few = unpacked(packed, tally)
        monkeypatch.setattr(turns, "of", all_of)
        every = unpacked(packed, tally)
    assert few == every
    assert asked[0] > 10


def test_turns_are_left_out_only_where_nothing_has_values() -> None:
    with virtual_gpus(1, shapes=True):
        big, small = torch.randn(512, 512, device="cuda"), torch.ones(8, device="cuda")
        assert list(turns.of(range(9), big)) == [0, 1, 2, 8]
        assert list(turns.of(range(4), big)) == [0, 1, 2, 3]
        assert list(turns.of(range(9), small)) == list(range(9))
    assert list(turns.of(range(9), torch.zeros(2))) == list(range(9))
