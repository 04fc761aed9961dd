"""The history that `torch.cuda.memory._record_memory_history` keeps of a virtual GPU."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.virtual import virtual_gpus

MIB = 1 << 20


def _history() -> list[dict[str, Any]]:
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[0]


def test_each_deed_of_the_allocator_is_told_in_its_order() -> None:
    with virtual_gpus(2):
        before = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._record_memory_history()
        big = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        del big
        torch.cuda.empty_cache()
        told = _history()
        assert [(entry["action"], entry["size"] // MIB) for entry in told] == [
            *(("segment_alloc", 32), ("alloc", 32)),
            *(("free_requested", 32), ("free_completed", 32), ("segment_free", 32)),
        ]
        assert len({entry["addr"] for entry in told}) == 1
        assert all(told[n]["time_us"] <= told[n + 1]["time_us"] for n in range(len(told) - 1))
        torch.cuda.memory._record_memory_history(enabled=None)
        del before
        assert len(_history()) == len(told)  # what was recorded stays, and nothing more comes
        assert torch.cuda.memory._snapshot()["device_traces"][1] == []


def test_only_the_last_deeds_and_only_those_that_are_wanted() -> None:
    with virtual_gpus(1):
        torch.cuda.memory._record_memory_history(max_entries=3)
        kept = [torch.empty(512 * n, dtype=torch.uint8, device="cuda") for n in range(1, 6)]
        assert [entry["size"] for entry in _history()] == [1536, 2048, 2560]
        torch.cuda.memory._record_memory_history(clear_history=True, skip_actions=["alloc"])
        kept.clear()
        kept.append(torch.empty(512, dtype=torch.uint8, device="cuda"))
        assert {entry["action"] for entry in _history()} == {"free_requested", "free_completed"}
        torch.cuda.memory._record_memory_history("state")
        kept.clear()
        assert len(_history()) == 10


def test_counting_is_the_same_with_and_without_a_history() -> None:
    def figures(record: bool) -> dict[str, Any]:
        with virtual_gpus(1):
            if record:
                torch.cuda.memory._record_memory_history()
            kept = [torch.empty(n * 300_000, device="cuda") for n in range(1, 9)]
            del kept[::2]
            kept.append(torch.empty(5 * MIB, device="cuda"))
            return dict(torch.cuda.memory_stats())

    assert figures(True) == figures(False)
