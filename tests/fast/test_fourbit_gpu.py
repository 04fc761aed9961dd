"""The kernel that unpacks four-bit weights, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from trimtab.fast.fourbit import use_fast_fourbit
from trimtab.hardware import probe
from trimtab.models import nf4
from trimtab.models.nf4_linear import pack_layer
from trimtab.models.nf4_loading import nf4_layers, pack_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe().gpus, reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 64), (97, 192), (1000, 4096)])
def test_the_kernel_unpacks_as_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from trimtab.fast.kernels.nf4 import unpack

    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = nf4.pack(weight.cuda())
    # A scale may differ in its last bit: the kernel multiplies and adds in one.
    torch.testing.assert_close(unpack(packed, dtype), nf4.unpack(packed, dtype), rtol=1e-2, atol=0)
    on_cpu = nf4.unpack(nf4.pack(weight), dtype)
    torch.testing.assert_close(unpack(packed, dtype).cpu(), on_cpu, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu(needs="kernels as Triton compiles them")
def test_layers_on_a_gpu_take_the_kernel(tiny_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16, device_map={"": "cuda:0"})
    count = len(nf4_layers(base))
    pack_model(base)
    plain = pack_layer(nn.Linear(128, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(False))
    x = torch.randn(5, 128, device="cuda", dtype=torch.bfloat16)
    before = plain(x)
    assert use_fast_fourbit(base) == count
    torch.testing.assert_close(plain(x), before, rtol=2e-2, atol=2e-2)
