"""Operations that a program defines in Python: their kernels for CUDA run, and what is inside them obeys the rules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trimtab.virtual import virtual_gpus
from trimtab.virtual.faults import DeviceMismatch


@torch.library.custom_op("trimtab_tests::shorten", mutates_args=())
def shorten(rows: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    assert rows.is_cuda
    assert not length.is_cuda
    return rows[:, : int(length)] * torch.ones(1, device=rows.device)


@torch.library.custom_op("trimtab_tests::doubled", mutates_args=(), device_types="cuda")
def doubled(rows: torch.Tensor) -> torch.Tensor:
    return rows * 2


@torch.library.custom_op("trimtab_tests::stray", mutates_args=())
def stray(rows: torch.Tensor) -> torch.Tensor:
    return rows + torch.ones(rows.shape)


@torch.library.custom_op("trimtab_tests::host_only", mutates_args=(), device_types="cpu")
def host_only(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone()


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual_gpus(2):
        yield


def test_what_it_takes_and_gives_is_its_own_affair() -> None:
    rows = torch.ones(2, 4, device="cuda:1")
    made = shorten(rows, torch.tensor(3))
    assert (made.shape, made.device) == ((2, 3), torch.device("cuda:1"))
    assert doubled(rows).sum().item() == 16


def test_a_stray_tensor_inside_is_found() -> None:
    with pytest.raises(DeviceMismatch, match="found at least two devices, cuda:0 and cpu!"):
        stray(torch.ones(2, device="cuda"))


def test_without_a_kernel_for_cuda_it_does_not_run() -> None:
    with pytest.raises(NotImplementedError, match="Could not run 'trimtab_tests::host_only'"):
        host_only(torch.ones(2, device="cuda"))
    assert host_only(torch.ones(2)).sum() == 2


def test_kernels_that_a_library_names_by_their_device() -> None:
    """`Library.impl`, as older code and serving engines define operations."""
    library = torch.library.Library("trimtab_tests", "FRAGMENT")
    library.define("tripled(Tensor rows) -> Tensor")
    library.define("filled_(Tensor(a!) rows, float by) -> ()")

    def tripled(rows: torch.Tensor) -> torch.Tensor:
        assert rows.is_cuda
        return rows * torch.full((1,), 3.0, device=rows.device)

    library.impl("tripled", tripled, "CUDA")
    library.impl("filled_", lambda rows, by: rows.fill_(by) and None, "CompositeExplicitAutograd")
    rows = torch.ones(1, device="cuda:1")
    made = torch.ops.trimtab_tests.tripled(rows)
    assert (made.device, made.item()) == (torch.device("cuda:1"), 3)
    torch.ops.trimtab_tests.filled_(rows, 7.0)
    assert rows.item() == 7
