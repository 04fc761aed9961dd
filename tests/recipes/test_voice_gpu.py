"""A voice on a real GPU: the losses of the CPU in fp32, and within two hundredths of them in bf16 and fp16."""

from __future__ import annotations

from pathlib import Path

import pytest
from voice_training import adapted_model, logged, plan_for, trainer_of

from trimtab.hardware import probe
from voice_batches import rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe().gpus, reason="no CUDA device here")]
STEPS = 50


def losses(out: Path, device: str, precision: str) -> tuple[list[float], list[float]]:
    plan = plan_for(device, precision)
    trainer = trainer_of(
        plan,
        out,
        rows(16, 8),
        model=adapted_model(plan, books=8),
        max_steps=STEPS,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        gradient_checkpointing=True,
    )
    trainer.train()
    return logged(trainer, "loss"), logged(trainer, "grad_norm")


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-3), ("bf16", 0.02), ("fp16", 0.02)])
def test_fifty_steps_on_the_gpu_are_those_of_the_cpu(tmp_path: Path, precision: str, near: float) -> None:
    wanted, _ = losses(tmp_path / "cpu", "cpu", "fp32")
    found, norms = losses(tmp_path / "gpu", "cuda:0", precision)
    assert all(0 < norm < float("inf") for norm in norms), "finite, and not zero, from the first step on"
    assert found == pytest.approx(wanted, rel=near)
