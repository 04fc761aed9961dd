"""Operations of a library that reaches the GPU by ctypes: the memory of one kernel, the values of another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from trimtab.virtual import unknown
from trimtab.virtual.state import NotSimulated

MiB = 1 << 20


class BNBNativeLibrary:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: pytest.fail(f"{name} was really called")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library by the name that is known, and operations of its namespace that call it on CUDA."""
    module: Any = ModuleType("bitsandbytes.cextension")
    module.BNBNativeLibrary, module.lib = BNBNativeLibrary, BNBNativeLibrary()
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", module)
    operations = torch.library.Library("bitsandbytes", "FRAGMENT")
    operations.define("doubled_for_a_test(Tensor x) -> Tensor")
    operations.define("doubled_in_place_for_a_test(Tensor(a!) x) -> ()")
    operations.define("tripled_for_a_test(Tensor x) -> Tensor")
    yield operations, module.lib
    operations._destroy()


def _register(operations: Any, lib: Any) -> None:
    """While virtual GPUs are in force: as when a program imports the library."""

    def on_cpu(x: Tensor) -> Tensor:
        assert not x.is_cuda
        return x * 2

    def on_cuda(x: Tensor) -> Tensor:
        assert x.is_cuda
        scratch = torch.empty(x.numel(), dtype=torch.float64, device=x.device)
        out = torch.empty_like(x)
        assert lib.cdouble(x.data_ptr(), out.data_ptr(), scratch.data_ptr()) == 0
        return out

    def in_place_on_cpu(x: Tensor) -> None:
        x.mul_(2)

    def in_place_on_cuda(x: Tensor) -> None:
        lib.cdouble_in_place(x.data_ptr())

    for name, cpu, cuda in (
        ("doubled_for_a_test", on_cpu, on_cuda),
        ("doubled_in_place_for_a_test", in_place_on_cpu, in_place_on_cuda),
    ):
        torch.library.register_kernel(f"bitsandbytes::{name}", "cpu", cpu, lib=operations)
        torch.library.register_kernel(f"bitsandbytes::{name}", "cuda", cuda, lib=operations)
    operations.impl("tripled_for_a_test", lambda x: x * 3, "CompositeExplicitAutograd")


def test_values_are_the_cpu_kernels_and_memory_is_the_cuda_kernels(library: Any) -> None:
    with trimtab.virtual_gpus(1):
        _register(*library)
        x = torch.ones(MiB // 4, device="cuda")
        before = torch.cuda.memory_allocated()
        out = torch.ops.bitsandbytes.doubled_for_a_test(x)
        assert out.is_cuda
        assert out.tolist() == [2.0] * (MiB // 4)
        assert torch.cuda.memory_allocated() - before == MiB
        assert torch.cuda.max_memory_allocated() - before == 3 * MiB
        torch.ops.bitsandbytes.doubled_in_place_for_a_test(x)
        assert x[:2].tolist() == [2.0, 2.0]
        assert torch.ops.bitsandbytes.tripled_for_a_test(x)[:2].tolist() == [6.0, 6.0]


def test_of_shapes_the_memory_is_the_same_and_the_values_are_unknown(library: Any) -> None:
    with trimtab.virtual_gpus(1, shapes=True):
        _register(*library)
        x = torch.randn(MiB, device="cuda")
        assert unknown.is_unknown(x)
        before = torch.cuda.memory_allocated()
        out = torch.ops.bitsandbytes.doubled_for_a_test(x)
        assert unknown.is_unknown(out)
        assert out.shape == x.shape
        assert torch.cuda.memory_allocated() - before == 4 * MiB
        assert torch.cuda.max_memory_allocated() - before == 12 * MiB
        few = torch.ones(2, device="cuda")
        torch.ops.bitsandbytes.doubled_in_place_for_a_test(few)
        assert not unknown.is_unknown(few)
        assert few.tolist() == [2.0, 2.0]
        part = x[:2]
        torch.ops.bitsandbytes.doubled_in_place_for_a_test(part)
        assert unknown.is_unknown(part)


def test_whoever_else_calls_the_library_is_refused(library: Any) -> None:
    operations, lib = library
    with trimtab.virtual_gpus(1):
        _register(operations, lib)
        torch.ops.bitsandbytes.doubled_for_a_test(torch.ones(2, device="cuda"))
        with pytest.raises(NotSimulated, match=r"function cdouble .* not simulated"):
            lib.cdouble()
