"""examples/voice-3b.yaml: its plan on a GPU of 24 GB. Its rehearsal is in tests/rehearse/test_voice_shapes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config.load import load_config
from trimtab.errors import NoRoomError
from trimtab.hardware import Hardware, probe
from trimtab.hardware.catalogue import accelerators
from trimtab.placement import PlacementPlan
from trimtab.recipes.planning import plan_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "voice-3b.yaml"


def one_gpu() -> Hardware:
    from dataclasses import replace

    return replace(probe(), accelerators=accelerators("RTX-4090"))


def planned(*overrides: str) -> PlacementPlan:
    return plan_run(load_config(EXAMPLE, overrides), one_gpu()).plan


@pytest.mark.parametrize(("precision", "scaler"), [("bf16", False), ("fp16", True)])
def test_half_precision_fits_on_24_gb(precision: str, scaler: bool) -> None:
    plan = planned(f"precision={precision}")
    assert (plan.device, plan.scaler, plan.weight_precision) == ("cuda:0", scaler, precision)
    assert plan.trainable_precision == "fp32"


def test_full_precision_does_not_and_says_so() -> None:
    with pytest.raises(NoRoomError, match="does not fit on cuda:0") as refused:
        planned("precision=fp32")
    assert "has 23.5 GiB free" in str(refused.value)


def test_the_settings_are_those_that_were_asked_about() -> None:
    config = load_config(EXAMPLE)
    training = config.training
    assert (training.batch_size, training.gradient_accumulation_steps) == (1, 4)
    assert (training.max_grad_norm, training.learning_rate, config.lora.r) == (0.5, 1e-5, 8)
    assert config.lora.targets == ["attention", "audio_mlp", "audio_head"]
