"""Bytes per device: counted by storage, freed with the last tensor, bounded by the capacity."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading

import pytest
import torch
from torch import nn

from trimtab.virtual import virtual_gpus
from trimtab.virtual.memory import human, parse_bytes

MIB = 1 << 20


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
    with virtual_gpus(1, memory="64MiB") as machine:
        kept = torch.zeros(3 << 20, device="cuda")
        part = torch.zeros(1 << 19, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(10 << 20, device="cuda")
        # Of 64 MiB an eighth is CUDA's; 12 are taken for the first tensor, 20 for the second, of which it has 2.
        assert str(caught.value).startswith(
            "CUDA out of memory. Tried to allocate 40.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 24.00 "
            "MiB is free. Including non-PyTorch memory, this process has 40.00 MiB memory in use. Of the allocated "
            "memory 14.00 MiB is allocated by PyTorch, and 18.00 MiB is reserved by PyTorch but unallocated. If"
        )
        assert caught.value.fault.kind == "out-of-memory"  # type: ignore[attr-defined]
        assert machine.devices[0].allocated == (12 << 20) + (2 << 20)
        del kept, part
        torch.zeros(10 << 20, device="cuda")
        assert (
            torch.cuda.memory_stats()["num_alloc_retries"] == 2
        )  # one that failed, one that gave the cache back


def test_what_a_caught_error_held_is_free_without_a_collection() -> None:
    """As on hardware: the error must not hold itself, and with it the tensors of the frames that it came through."""

    def fill() -> None:
        kept = torch.zeros(4 << 20, device="cuda")
        torch.zeros(100 << 20, device="cuda")
        del kept

    gc.disable()
    try:
        with virtual_gpus(1, memory="64MiB"):
            with contextlib.suppress(torch.OutOfMemoryError):
                fill()
            assert torch.cuda.memory_allocated() == 0
    finally:
        gc.enable()


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


def documented_keys() -> set[str]:
    """The keys that torch's documentation of memory_stats names, written out."""
    found = set()
    for key in re.findall(r'``"([a-z_.{},]+)"``', torch.cuda.memory_stats.__doc__ or ""):
        parts = [[""]]
        for piece in re.split(r"(\{[^}]*\})", key):
            parts.append(piece[1:-1].split(",") if piece.startswith("{") else [piece])
        found |= {"".join(choice) for choice in itertools.product(*parts)}
    # Torch says "allocated" there for what it calls "allocation"; and private pools are in it where there are some.
    named = {
        key.replace("allocated.", "allocation.", 1) if key.startswith("allocated.") else key for key in found
    }
    return named - {"reserved_bytes_by_private_pools", "_"}


def test_the_statistics_have_the_keys_of_torchs_documentation() -> None:
    with virtual_gpus(1):
        torch.ones(8, device="cuda")
        keys = documented_keys()
        assert len(keys) > 100
        assert keys - set(torch.cuda.memory_stats()) == set()


@pytest.mark.virtual_gpus(1)
def test_statistics_snapshot_and_summary() -> None:
    kept, gone = torch.ones(1000, device="cuda"), torch.ones(2000, device="cuda")
    large = torch.ones(1 << 20, device="cuda")
    del gone
    stats = torch.cuda.memory_stats()
    small = {"current": 4096, "peak": 4096 + 8192, "allocated": 4096 + 8192, "freed": 8192}
    assert {name: stats[f"allocated_bytes.small_pool.{name}"] for name in small} == small
    assert stats["requested_bytes.small_pool.peak"] == 12_000
    assert stats["allocation.all.current"] == stats["active.all.current"] == 2
    assert (stats["segment.all.current"], stats["reserved_bytes.all.current"]) == (2, 22 * MIB)
    assert stats["inactive_split.all.current"] == 2
    assert stats["inactive_split_bytes.all.current"] == 22 * MIB - 4 * MIB - 4096
    assert (stats["num_ooms"], stats["num_device_alloc"], stats["max_split_size"]) == (0, 2, -1)

    segments = torch.cuda.memory_snapshot()
    assert [segment["segment_type"] for segment in segments] == ["small", "large"]
    assert [segment["total_size"] for segment in segments] == [2 * MIB, 20 * MIB]
    for segment in segments:
        end = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == end
            end += block["size"]
        assert end == segment["address"] + segment["total_size"]
    assert [block["state"] for block in segments[0]["blocks"]] == ["active_allocated", "inactive"]
    assert segments[1]["blocks"][0]["requested_size"] == large.numel() * 4

    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    now = {"current": 4096, "peak": 4096, "allocated": 0, "freed": 0}
    assert {name: stats[f"allocated_bytes.small_pool.{name}"] for name in now} == now
    del kept
    assert torch.cuda.memory_stats()["allocated_bytes.small_pool.freed"] == 4096
    assert "22528 KiB" in torch.cuda.memory_summary()


@pytest.mark.virtual_gpus(1)
def test_settings_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    first = torch.ones(30 << 18, device="cuda")  # the first use of the GPU reads the variable
    assert torch.cuda.memory_reserved() == 40 * MIB
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    second = torch.ones(30 << 18, device="cuda")
    assert torch.cuda.memory_reserved() == 70 * MIB
    kinds = {segment["is_expandable"]: segment["total_size"] for segment in torch.cuda.memory_snapshot()}
    assert kinds == {True: 40 * MIB, False: 30 * MIB}
    assert first.numel() == second.numel()


@pytest.mark.virtual_gpus(1)
def test_a_stream_has_its_own_memory_and_a_recorded_one_waits() -> None:
    del_me = torch.ones(1 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_reserved() == 40 * MIB
    del_me.record_stream(stream)
    del del_me
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == other.numel() * 4
    assert stats["active_bytes.all.current"] == 2 * other.numel() * 4
    torch.ones(1, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == other.numel() * 4


@pytest.mark.virtual_gpus(1)
def test_a_thread_is_on_the_default_stream_whatever_others_selected() -> None:
    numbers, kept = [], []

    def work() -> None:
        numbers.append(torch.cuda.current_stream().stream_id)
        kept.append(torch.ones(1 << 20, device="cuda"))

    with torch.cuda.stream(torch.cuda.Stream()):
        own = torch.cuda.current_stream().stream_id
        del_me = torch.ones(1 << 20, device="cuda")
        del del_me
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert numbers == [0]
        assert torch.cuda.memory_reserved() == 40 * MIB  # what the first stream freed is not the other's
        kept.append(torch.ones(1 << 20, device="cuda"))
        assert torch.cuda.memory_reserved() == 40 * MIB
    streams = {segment["stream"] for segment in torch.cuda.memory_snapshot()}
    assert streams == {0, own}


@pytest.mark.virtual_gpus(1)
def test_a_stream_that_a_thread_selects_is_its_own() -> None:
    selected, done = threading.Event(), threading.Event()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            selected.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    selected.wait()
    here = torch.ones(1 << 20, device="cuda")
    done.set()
    thread.join()
    assert [segment["stream"] for segment in torch.cuda.memory_snapshot()] == [0]
    assert here.is_cuda


@pytest.mark.virtual_gpus(1)
def test_a_fraction_of_the_memory() -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError, match=r"40.00 GiB allowed; Of the allocated memory 0 bytes"):
        torch.empty(total // 2 + 1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory.get_per_process_memory_fraction() == 0.5


def test_the_capture_of_a_cuda_graph_has_a_pool_of_its_own_where_shapes_are_rehearsed() -> None:
    with virtual_gpus(1, shapes=True):
        layer, x = torch.nn.Linear(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x).relu()
        inside = torch.cuda.memory_reserved()
        again = torch.empty(4096, 4096, device="cuda")
        assert torch.cuda.memory_reserved() > inside  # what the capture has freed is the graph's own
        graph.replay()
        assert out.shape == again.shape
        assert torch.cuda.memory_snapshot(graph.pool())
