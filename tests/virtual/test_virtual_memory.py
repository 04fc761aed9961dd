"""Bytes per device: counted by storage, freed with the last tensor, bounded by the capacity."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.memory import human, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("1.5MiB", 3 << 19), (512, 512), ("7", 7)],
)
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "3 parsecs", 0])
def test_parse_bytes_refuses(text: str | int) -> None:
    with pytest.raises(ValueError, match="memory"):
        parse_bytes(text)


def test_counts_by_storage() -> None:
    with virtual_gpus(2) as machine:
        first, second = machine.devices
        block = torch.zeros(1 << 20, device="cuda:1")
        assert (first.allocated, second.allocated) == (0, 4 << 20)
        part = block[5:].view(-1)
        del block
        assert second.allocated == 4 << 20
        other = part.to("cuda:0")
        assert first.allocated == (4 << 20)
        del part, other
        assert (first.allocated, second.allocated) == (0, 0)
        assert second.peak == 4 << 20


def test_a_training_step_frees_what_it_took() -> None:
    with virtual_gpus(1) as machine:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
        weights = machine.devices[0].allocated
        assert weights == 2 * (64 * 64 * 4 + 512)
        for _ in range(3):
            model(torch.randn(32, 64, device="cuda")).sum().backward()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        assert machine.devices[0].allocated == 2 * weights
        model.zero_grad()
        assert machine.devices[0].allocated == weights
        assert machine.devices[0].peak > 2 * weights


def test_out_of_memory_in_cudas_words() -> None:
    with virtual_gpus(1, memory="1MiB") as machine:
        kept = torch.zeros(100_000, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(200_000, device="cuda")
        assert str(caught.value).startswith(
            "CUDA out of memory. Tried to allocate 781.50 KiB. GPU 0 has a total capacity of 1024.00 KiB of which "
        )
        assert caught.value.fault.kind == "out-of-memory"  # type: ignore[attr-defined]
        assert machine.devices[0].allocated == 400_384
        del kept
        torch.zeros(200_000, device="cuda")


def test_an_impossible_request_fails_before_the_host_pays_for_it() -> None:
    with virtual_gpus(1), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4000.00 GiB"):
        torch.zeros(1000 << 30, device="cuda")


def test_resizing_is_counted() -> None:
    with virtual_gpus(1) as machine:
        tensor = torch.empty(0, device="cuda")
        tensor.resize_(1024)
        assert machine.devices[0].allocated == 4096


def test_human() -> None:
    assert [human(n) for n in (512, 2048, 3 << 20, 5 << 30)] == [
        "512 bytes",
        "2.00 KiB",
        "3.00 MiB",
        "5.00 GiB",
    ]


@pytest.mark.virtual_gpus(2)
def test_memory_of_a_pool_counts_as_any_other() -> None:
    pool, other = torch.cuda.MemPool(), torch.cuda.MemPool()
    assert pool.id != other.id
    with torch.cuda.use_mem_pool(pool, device="cuda:1"):
        kept = torch.ones(1024, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == kept.numel() * 4
    assert torch.cuda.graph_pool_handle() != torch.cuda.graph_pool_handle()
