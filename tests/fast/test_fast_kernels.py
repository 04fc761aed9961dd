"""The Triton kernels of the fast parts: interpreted where there is no GPU, on one where there is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimtab.hardware import probe

pytest.importorskip("triton")
GPU = pytest.mark.skipif(not probe().gpus, reason="no CUDA device here")
PROGRAM = Path(__file__).with_name("interpreted_fast.py")


def test_the_interpreted_kernels_agree_with_plain_code() -> None:
    # A process of its own: Triton decides at import whether it interprets.
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "all agree" in done.stdout


@pytest.mark.gpu
@GPU
def test_the_kernels_agree_with_plain_code_on_the_gpu() -> None:
    import interpreted_fast

    interpreted_fast.main("cuda")


@pytest.mark.gpu(needs="kernels as Triton compiles them")
@GPU
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_in_bf16_agrees_with_plain_peft_on_the_gpu(compiled: bool) -> None:
    """Against fp32: the fused step is no farther from it than PEFT's own in bf16."""
    import transformers
    from torch import nn

    from trimtab.fast.head import Head, head_loss
    from trimtab.fast.lora import use_fast_adapters
    from trimtab.fast.mlp import use_fused_mlp
    from trimtab.fast.siblings import use_joint_products

    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    exact = peft.get_peft_model(
        transformers.LlamaForCausalLM(config).cuda(), peft.LoraConfig(r=16, target_modules="all-linear")
    )
    for name, parameter in exact.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    halved = copy.deepcopy(exact)
    for parameter in halved.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    fused = copy.deepcopy(halved)
    assert use_fast_adapters(fused) == 21
    assert use_joint_products(fused) == 3
    assert use_fused_mlp(fused) == 3
    if compiled:
        for layer in fused.base_model.model.model.layers:
            layer.forward = torch.compile(layer.forward)
    ids = torch.randint(0, 2000, (2, 300), device="cuda")

    def slopes(model: nn.Module, *, half: bool, ours: bool) -> tuple[float, torch.Tensor]:
        model.train()
        bare = model.base_model.model
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            if ours:
                hidden = bare.model(input_ids=ids, use_cache=False).last_hidden_state
                loss = head_loss(hidden[:, :-1], Head(bare.lm_head.weight), ids[:, 1:]).loss
            else:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    loss, right = slopes(exact, half=False, ours=False)
    plain_loss, plain = slopes(halved, half=True, ours=False)
    fused_loss, found = slopes(fused, half=True, ours=True)
    assert abs(fused_loss - loss) < 1e-2 * loss
    assert abs(plain_loss - fused_loss) < 1e-2 * loss
    apart, theirs = ((slope - right).norm() / right.norm() for slope in (found, plain))
    assert apart < 1.2 * theirs + 1e-3
