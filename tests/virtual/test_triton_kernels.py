"""Triton kernels on virtual GPUs: values by Triton's interpreter, CUDA's refusals, what cannot be run is told."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

import trimtab
from trimtab.virtual import triton_writes
from trimtab.virtual.observer import Fault, Observer
from trimtab.virtual.state import NotSimulated
from trimtab.virtual.unknown import is_unknown

triton = pytest.importorskip("triton")
programs = pytest.importorskip("triton_programs")


class Listener(Observer):
    def __init__(self) -> None:
        self.told: list[str] = []
        self.faults: list[Fault] = []

    def unproven(self, text: str) -> None:
        self.told.append(text)

    def fault(self, fault: Fault) -> None:
        self.faults.append(fault)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_gives_the_values_of_torch(dtype: torch.dtype) -> None:
    with trimtab.virtual_gpus(1):
        x, y = (torch.randn(1000, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(x)
        programs.add[lambda given: (triton.cdiv(1000, given["BLOCK"]),)](
            x, y, out, 1000, BLOCK=64, num_warps=2
        )
        assert torch.equal(out, x + y)


def test_helpers_libraries_reductions_and_scans() -> None:
    with trimtab.virtual_gpus(1):
        x = torch.randn(70, 50, device="cuda")
        out = torch.empty_like(x)
        programs.rows[(70,)](x, out, 50, 0.5, BLOCK=64)
        wanted = x * 3 + 0.5 + x.tanh() + x.cumsum(1) + x.sum(1, keepdim=True) + x.argmax(1, keepdim=True)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_programs_that_go_different_ways_write_once() -> None:
    with trimtab.virtual_gpus(1):
        x = torch.randn(40, 16, device="cuda")
        before, lengths = x.clone(), torch.arange(40, device="cuda") % 4
        out = torch.zeros(41 * 16, device="cuda")
        programs.apart[(40,)](x, out, lengths, BLOCK=16)
        assert torch.equal(x, before + 1)
        torch.testing.assert_close(out[: 40 * 16].view(40, 16), before * lengths[:, None])
        assert out[40 * 16] == 30


def test_tuned_kernels_run_once_and_measure_nothing() -> None:
    with trimtab.virtual_gpus(1):
        x = torch.randn(50, device="cuda")
        out = torch.zeros_like(x)
        programs.tuned[lambda given: (triton.cdiv(50, given["BLOCK"]),)](x, out, 50)
        assert torch.equal(out, x)
        programs.tuned[lambda given: (triton.cdiv(50, given["BLOCK"]),)](x, out, 50)
        assert torch.equal(out, 2 * x)
        assert programs.tuned.best_config.kwargs == {"BLOCK": 32}
    assert not programs.tuned.cache


def test_blocks_and_descriptors() -> None:
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    with trimtab.virtual_gpus(1):
        a, b = torch.randn(40, 50, device="cuda"), torch.randn(50, 30, device="cuda")
        # Newer versions of Triton have no pointers to blocks.
        pairs = ((a, b), (a.bfloat16(), b.bfloat16())) if hasattr(interpreter, "BlockPointerHandle") else ()
        for one, two in pairs:
            out = torch.empty(40, 30, device="cuda", dtype=one.dtype)
            programs.product[(3, 2)](one, two, out, 40, 30, 50, SIZE=16)
            torch.testing.assert_close(out, (one.float() @ two.float()).to(one.dtype), rtol=1e-2, atol=1e-2)
        x = torch.randn(64, 32, device="cuda")
        out = torch.zeros_like(x)
        source, target = (TensorDescriptor.from_tensor(tensor, [16, 32]) for tensor in (x, out))
        programs.described[(4,)](source, target, SIZE=16)
        assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("elsewhere", ["cpu", "cuda:1"])
def test_memory_that_the_current_device_cannot_reach(elsewhere: str) -> None:
    """What Triton says on hardware, also where all tensors are together, on a device that is not the current one."""
    with trimtab.virtual_gpus(2):
        x = torch.ones(8, device=elsewhere)
        with pytest.raises(ValueError, match=r"Pointer argument \(at 0\) cannot be accessed from Triton"):
            programs.add[(1,)](x, x, torch.empty_like(x), 8, BLOCK=8)
        with torch.cuda.device(1):
            x = torch.ones(8, device="cuda:1")
            out = torch.empty_like(x)
            programs.add[(1,)](x, x, out, 8, BLOCK=8)
            assert out.tolist() == [2.0] * 8


def test_what_cannot_be_run_is_refused_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.virtual import triton_kernels

    monkeypatch.setattr(triton_kernels, "ONE_LAUNCH", 10**8)
    with trimtab.virtual_gpus(1):
        x, out = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
        with pytest.raises(NotSimulated, match=r"in_assembly .*inline_asm"):
            programs.in_assembly[(1,)](x, out, 8, BLOCK=8)
        with pytest.raises(NotSimulated, match="none is compiled"):
            programs.add.warmup(x, x, out, 8, BLOCK=8, grid=(1,))
        # Some launch by themselves what has the parts for it, and ask first.
        launched = programs.add[(1,)](x, x, out, 8, BLOCK=8)
        assert not hasattr(launched, "packed_metadata")
        with pytest.raises(NotSimulated, match=r"n_regs.* none is compiled"):
            launched.n_regs  # noqa: B018
    listener = Listener()
    with trimtab.virtual_gpus(1, observer=listener):
        x, out = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
        programs.in_assembly[(1,)](x, out, 8, BLOCK=8)
        assert x.tolist() == out.tolist() == [1.0] * 8
        programs.beyond[(1,)](x, out, BLOCK=1024)
        programs.for_ever[(1,)](x, out, BLOCK=8)
    assembly, beyond, long = listener.told
    assert all(part in assembly for part in ("inline_asm", "triton_programs.py", "test_triton_kernels.py"))
    assert "reads outside the tensors that it was given" in beyond
    assert "takes too long" in long


def test_shapes_only_leaves_the_results_unknown() -> None:
    with trimtab.virtual_gpus(1, shapes=True):
        x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
        out = torch.zeros(8, device="cuda")
        programs.add[(1,)](x, y, out, 8, BLOCK=8)
        assert is_unknown(out)
        assert not is_unknown(x)


def test_the_source_of_a_kernel_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = triton_writes._written

    def reads(function: Any, above: frozenset[str]) -> set[str]:
        read.append(function.src)
        return real(function, above)

    monkeypatch.setattr(triton_writes, "_written", reads)
    monkeypatch.setattr(triton_writes, "_known", WeakKeyDictionary())
    kernel, source = programs.add, programs.add.src
    assert triton_writes.written(kernel) == triton_writes.written(kernel) == {"out", "BLOCK"}
    assert read == [source]
    try:
        # As Triton lets it be exchanged: it is another kernel then.
        kernel._unsafe_update_src(source.replace("tl.store(out + at", "tl.store(y + at"))
        assert triton_writes.written(kernel) == {"y", "BLOCK"}
    finally:
        kernel._unsafe_update_src(source)
    assert triton_writes.written(kernel) == {"out", "BLOCK"}


def test_operations_of_torch_library() -> None:
    """torch.library.triton_op and wrap_triton."""

    @torch.library.triton_op("trimtab_test::added", mutates_args={})
    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(programs.add)[(1,)](x, y, out, x.numel(), BLOCK=16)
        return out

    with trimtab.virtual_gpus(1):
        x = torch.ones(9, device="cuda")
        assert added(x, x).tolist() == [2.0] * 9
        out = torch.empty_like(x)
        torch.library.wrap_triton(programs.add)[(1,)](x, x, out, 9, BLOCK=16)
        assert out.tolist() == [2.0] * 9


def test_the_driver_is_the_virtual_one_and_all_is_put_back() -> None:
    run, bench = triton.runtime.jit.JITFunction.run, triton.runtime.autotuner.Autotuner._bench
    with trimtab.virtual_gpus(1, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)), trimtab.virtual_gpus(2):
        x = torch.ones(8, device="cuda")
        programs.add[(1,)](x, x, x, 8, BLOCK=8)
    with trimtab.virtual_gpus(1, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)):
        active = triton.runtime.driver.active
        assert active.get_current_target().arch == 80
        assert active.utils.get_device_properties(0)["multiprocessor_count"] == 108
    assert triton.runtime.jit.JITFunction.run is run
    assert triton.runtime.autotuner.Autotuner._bench is bench
    assert triton.runtime.driver._active is None
    assert not hasattr(programs, "interpreter_semantic")
