"""Deterministic algorithms, the names of a CUDA build that torch's own Python takes, and a host that is too small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import comm

from trimtab.virtual import virtual_gpus
from trimtab.virtual.state import NotSimulated


@pytest.fixture
def _deterministic() -> Iterator[None]:
    with virtual_gpus(2):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def leaf(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", requires_grad=True)


@pytest.mark.usefixtures("_deterministic")
def test_sizes_change_and_new_memory_is_filled() -> None:
    x = torch.zeros(2, device="cuda")
    x.resize_(4)
    assert x.shape == (4,)
    assert x.isnan().tolist() == [False, False, True, True]
    assert x.resize_as_(torch.zeros(2, 3, device="cuda")).shape == (2, 3)
    out = torch.empty(0, device="cuda")
    torch.cat([torch.ones(2, device="cuda")] * 2, out=out)
    assert out.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


REFUSED: dict[str, Callable[[], Any]] = {
    "median CUDA with indices output": lambda: leaf(4).median(0),
    "_histc_cuda with floating point input": lambda: leaf(4).histc(),
    "_bincount_cuda": lambda: torch.ones(2, dtype=torch.long, device="cuda").bincount(torch.ones(2).cuda()),
    "put_": lambda: torch.zeros(4, device="cuda").put_(torch.tensor([1]).cuda(), torch.ones(1).cuda()),
    "nll_loss2d_forward_out_cuda_template": lambda: functional.cross_entropy(
        leaf(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.long, device="cuda")
    ),
    "adaptive_avg_pool2d_backward_cuda": lambda: (
        functional.adaptive_avg_pool2d(leaf(1, 1, 4, 4), 3).sum().backward()
    ),
    "upsample_bicubic2d_backward_out_cuda": lambda: (
        # By `functional.interpolate` torch 2.15 never comes to this kernel.
        torch.ops.aten.upsample_bicubic2d(leaf(1, 1, 4, 4), [8, 8], False).sum().backward()
    ),
}


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("kernel", REFUSED)
def test_atomic_kernels_are_refused_in_cudas_words(kernel: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        REFUSED[kernel]()
    assert str(caught.value).startswith(f"{kernel} does not have a deterministic implementation, but you set")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        REFUSED[kernel]()


@pytest.mark.usefixtures("_deterministic")
def test_what_an_h200_computes_deterministically_is_computed() -> None:
    assert leaf(4).median().dim() == 0
    assert torch.ones(2, dtype=torch.long, device="cuda").bincount().tolist() == [0, 2]
    assert leaf(4).cumsum(0).shape == (4,)
    functional.cross_entropy(leaf(2, 3), torch.tensor([0, 1], device="cuda")).backward()
    functional.interpolate(leaf(1, 1, 4, 4), scale_factor=2, mode="bilinear").sum().backward()


def test_names_of_a_cuda_build() -> None:
    before = set(dir(torch._C))
    with virtual_gpus(2):
        torch.compiler.reset()
        torch.cuda.tunable.enable(True)
        assert torch.cuda.tunable.is_enabled()
        assert isinstance(torch.cuda.get_device_properties(0), torch._C._CudaDeviceProperties)
        parts = [torch.empty(1, device="cuda:1"), torch.empty(3, device="cuda:0")]
        comm.scatter(torch.arange(4.0, device="cuda"), out=parts)
        assert [part.tolist() for part in parts] == [[0.0], [1.0, 2.0, 3.0]]
        whole = torch.empty(4, device="cuda:1")
        assert comm.gather(parts, out=whole).tolist() == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(NotSimulated, match="_cuda_getCurrentBlasHandle"):
            torch.cuda.current_blas_handle()
    assert set(dir(torch._C)) == before


def test_a_host_that_is_too_small_is_no_fault_of_the_program() -> None:
    with virtual_gpus(1, memory="80000TiB"):
        # More than any address space has: a machine that promises more memory than it has would grant less.
        row = torch.zeros(2, device="cuda")
        for ask in (
            lambda: torch.empty(1 << 50, device="cuda"),
            lambda: row.expand(1 << 50, 2).contiguous(),
            lambda: torch.zeros(2).expand(1 << 50, 2).to("cuda"),
            lambda: row.untyped_storage().resize_(1 << 52),
        ):
            with pytest.raises(NotSimulated, match="--shapes-only"):
                ask()
