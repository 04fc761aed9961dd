"""On a GPU the check of every step waits for nothing: torch itself raises where something does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trimtab.hardware import probe
from trimtab.monitor.finite import GradientCheck
from trimtab.monitor.health import NonFiniteError, Standing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="no CUDA device here"),
]


@pytest.fixture
def no_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(needs="work that goes on while the host does")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fused", "way"), [(True, "gated"), (False, "undone")])
@pytest.mark.usefixtures("no_sync")
def test_no_step_waits_for_the_device_and_a_bad_one_changes_no_weight(
    fused: bool, way: str, dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    check = GradientCheck(model, scaler=False)
    sound = torch.ones(8, 64, device="cuda", dtype=dtype)
    broken = sound.clone()
    broken[3, 5] = float("nan")

    def step(number: int, batch: torch.Tensor) -> None:
        check.step_begins()
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        check.check(Standing(number, 1e-2, None, None), optimizer)
        optimizer.step()

    step(1, sound)
    assert check._gate is not None
    assert check._gate.way == way
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for number in range(2, 12):
        step(number, sound)
    before = [p.detach().clone() for p in model.parameters()]
    step(12, broken)
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(NonFiniteError, match="step 12: the gradient of 4 of 4"):
        step(13, sound)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_logits_that_are_nan_leave_the_device_alive() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from trimtab.monitor.logits import LogitsWatch

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).to("cuda")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    watch = LogitsWatch()
    with watch.on(model):
        model.generate(torch.ones(2, 3, dtype=torch.long, device="cuda"), do_sample=True, max_new_tokens=4)
    assert watch.found
    torch.cuda.synchronize()
