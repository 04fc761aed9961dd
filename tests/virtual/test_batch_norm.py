"""SyncBatchNorm, whose kernels only CUDA has, computes what BatchNorm computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm

from trimtab.virtual import virtual_gpus


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 4)])
@pytest.mark.parametrize("affine", [True, False])
def test_one_rank_is_batch_norm(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, affine=affine)
    if affine:
        nn.init.uniform_(norm.weight)
        nn.init.uniform_(norm.bias)
    rows, slope = torch.randn(shape) * 2 + 1, torch.randn(shape)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    expected_input = rows.clone().requires_grad_()
    expected = norm(expected_input)
    expected.backward(slope)
    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        try:
            given = rows.cuda().requires_grad_()
            weight, bias = (
                (p.detach().cuda().requires_grad_() for p in (norm.weight, norm.bias))
                if affine
                else (None, None)
            )
            mean, var = mean.cuda(), var.cuda()
            out = SyncBatchNorm.apply(given, weight, bias, mean, var, 1e-5, 0.1, dist.group.WORLD, 1)
            out.backward(slope.cuda())
        finally:
            dist.destroy_process_group()
        pairs = [
            (out, expected),
            (given.grad, expected_input.grad),
            (mean, norm.running_mean),
            (var, norm.running_var),
        ]
        if affine:
            pairs += [(weight.grad, norm.weight.grad), (bias.grad, norm.bias.grad)]
        for made, right in pairs:
            assert made.is_cuda
            torch.testing.assert_close(made.cpu(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [4, 4096])
def test_shapes_alone_are_told_for_any_size(rows: int) -> None:
    """Also where small statistics have values and the rows have none."""
    with virtual_gpus(1, shapes=True):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        try:
            given = torch.randn(rows, 8, 64, 64, device="cuda", requires_grad=True)
            norm = nn.SyncBatchNorm(8).cuda()
            # By hand, as with several ranks: one rank alone goes another way.
            out = SyncBatchNorm.apply(
                given,
                norm.weight,
                norm.bias,
                norm.running_mean,
                norm.running_var,
                1e-5,
                0.1,
                dist.group.WORLD,
                1,
            )
            out.backward(torch.ones_like(out))
        finally:
            dist.destroy_process_group()
        assert (out.shape, given.grad.shape) == (given.shape, given.shape)
        assert norm.weight.grad.shape == norm.bias.grad.shape == (8,)
        assert given.grad.is_cuda
