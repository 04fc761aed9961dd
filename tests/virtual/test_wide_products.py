"""What CUDA's kernels take and the CPU's do not: wider products, histograms of whole numbers."""

from __future__ import annotations

import pytest
import torch

import trimtab


@pytest.mark.virtual_gpus(1)
def test_products_of_bf16_with_a_float32_result() -> None:
    one, two = (torch.randn(4, 4, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    right = one.float() @ two.float()
    made = torch.mm(one, two, out_dtype=torch.float32)
    assert made.dtype is torch.float32
    assert made.is_cuda
    assert torch.equal(made, right)
    kept = torch.ones(4, 4, device="cuda")
    torch.addmm(kept, one, two, out_dtype=torch.float32, out=kept)
    torch.testing.assert_close(kept, right + 1)
    batched = torch.bmm(one[None], two[None], out_dtype=torch.float32)
    torch.testing.assert_close(batched[0], right)  # another kernel than that of one product


def test_products_of_shapes_with_a_float32_result() -> None:
    """torch 2.11's own kernels for shapes take the wider type of `addmm` for a number."""
    with trimtab.virtual_gpus(1, shapes=True):
        one, two = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        kept = torch.mm(one, two).float()  # takes the workspace of products too
        before = torch.cuda.memory_allocated()
        torch.addmm(kept, one, two, out_dtype=torch.float32, out=kept)
        assert torch.cuda.memory_allocated() == before
        made = torch.addmm(kept, one, two, out_dtype=torch.float32)
        batched = torch.baddbmm(kept[None], one[None], two[None], out_dtype=torch.float32)
        assert (made.shape, made.dtype) == (kept.shape, torch.float32)
        assert (batched.shape, batched.dtype) == ((1, 512, 512), torch.float32)
        assert torch.cuda.memory_allocated() == before + 2 * 512 * 512 * 4


@pytest.mark.virtual_gpus(1)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_a_histogram_of_whole_numbers(dtype: torch.dtype) -> None:
    """How a mixture of experts counts its tokens, where it runs on a GPU."""
    experts = torch.tensor([0, 3, 3, 1, 0, 3], dtype=dtype, device="cuda")
    counted = torch.histc(experts, bins=4, min=0, max=3)
    assert counted.is_cuda
    assert counted.dtype is dtype
    assert counted.tolist() == [2, 1, 0, 3]
