"""The CPU's autocast on tensors that have a shape only: what it does to those with values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.unknown import is_unknown

ON_CPU: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda t: F.linear(t, t[:, :64].mT @ t, t[0, :64]),
    "mm": lambda t: t @ t.mT,
    "half beside float": lambda t: torch.mm(t.bfloat16(), t.mT),
    "bmm": lambda t: torch.bmm(t[None], t.mT[None]),
    "conv1d": lambda t: F.conv1d(t[None], t[:, :1024].unsqueeze(-1)[:, :400]),
    "attention": lambda t: F.scaled_dot_product_attention(t[None], t[None], t[None]),
    "softmax": lambda t: (t @ t.mT).softmax(-1),
    "layer norm": lambda t: F.layer_norm(t @ t.mT, (400,)),
    "mse": lambda t: F.mse_loss(t.bfloat16(), t.bfloat16()),
    "cat of both": lambda t: torch.cat([t, t.bfloat16()]),
    "cat of half": lambda t: torch.cat([t @ t, t @ t]),
    "prod": lambda t: t.bfloat16().prod(-1),
    "add": lambda t: t + t.bfloat16(),
    "double": lambda t: t.double() @ t.double().mT,
    "norm": lambda t: t.bfloat16().norm(),
}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_on_the_host_are_cast_as_the_cpus_autocast_casts(name: str, dtype: torch.dtype) -> None:
    """The real one, on tensors with values, is the measure."""

    def found(t: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
        with torch.autocast("cpu", dtype=dtype):
            made = ON_CPU[name](t)
        return made.dtype, made.shape

    expected = found(torch.rand(400, 400))
    with virtual_gpus(1, shapes=True):
        assert found(torch.rand(400, 400)) == expected, "with values"
        shape = torch.rand(400, 400, device="cuda").cpu()
        assert is_unknown(shape)
        assert found(shape) == expected
        with torch.autocast("cpu", dtype=dtype), torch.autocast("cpu", enabled=False):
            assert (shape @ shape).dtype is torch.float32
        with torch.autocast("cpu", dtype=dtype), torch.autocast("cuda", dtype=torch.bfloat16):
            assert (shape @ shape).dtype is dtype
            on_gpu = shape.cuda()
            assert (on_gpu @ on_gpu).dtype is torch.bfloat16


def test_what_is_trained_on_the_host_under_its_autocast_gets_gradients_of_its_own_format() -> None:
    with virtual_gpus(1, shapes=True):
        layer = nn.Linear(512, 512, device="cuda").cpu()
        x = torch.rand(300, 512, device="cuda").cpu()
        for _ in range(2):
            with torch.autocast("cpu"):
                out = layer(x)
                assert out.dtype is torch.bfloat16
            out.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype is torch.float32
        layer.cuda()
