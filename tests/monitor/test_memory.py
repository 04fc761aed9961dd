"""Memory of the device that is named."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from trimtab.monitor.memory import MemoryMeter, gpu_busy_share


def test_cpu_memory_grows_with_what_is_allocated_and_the_peak_stays() -> None:
    meter = MemoryMeter("cpu")
    before = meter.read()
    # Pages of its own: what the allocator kept of earlier tests would be used again, and nothing would grow.
    block = np.frombuffer(mmap.mmap(-1, 100 * 2**20), dtype=np.uint8)
    block[:] = 1
    during = meter.read()
    assert during.now - before.now > 80 * 2**20
    assert during.peak >= during.now
    del block
    assert meter.read().peak >= during.peak


def test_gpu_use_of_a_cpu_is_not_known() -> None:
    assert gpu_busy_share("cpu") is None


def test_a_gpu_that_does_not_tell_its_use_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError_NotSupported(Exception):  # as the driver's library names what it says of a slice (MIG)
        pass

    def fails(error: Exception) -> None:
        raise error

    for error in (
        NVMLError_NotSupported(),
        RuntimeError("cuda driver can't be loaded"),
        ModuleNotFoundError(),
    ):
        monkeypatch.setattr(torch.cuda, "utilization", lambda _, error=error: fails(error))
        assert gpu_busy_share("cuda:0") is None
    monkeypatch.setattr(torch.cuda, "utilization", lambda _: fails(KeyError("ours")))
    with pytest.raises(KeyError):
        gpu_busy_share("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_cuda_memory_is_the_allocators() -> None:
    meter = MemoryMeter("cuda:0")
    before = meter.read()
    block = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda:0")
    during = meter.read()
    assert during.now - before.now >= 64 * 2**20
    assert during.peak >= during.now
    del block
    after = meter.read()
    assert (after.now, after.peak) == (before.now, during.peak)
    assert after.reserved == torch.cuda.max_memory_reserved("cuda:0")
