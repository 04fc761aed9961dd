"""Speech on a real GPU: the CPU's codes in fp32, sound in half precision, the same clip for the same seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from trimtab.config.voice import VoiceSettings
from trimtab.hardware import probe
from trimtab.models.speak import speak
from voice_parts import PLAN, Prompts, Tones, clip, learn, row, voice_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="there is no CUDA device here"),
]

SHORT = VoiceSettings(max_seconds=0.6)
ASKED, SAID = row([21, 22, 23, 24], clip(5)), clip(9, seed=5)
GPU = dataclasses.replace(PLAN, device="cuda:0")


@pytest.fixture(scope="module")
def model() -> Any:
    """It says a clip that it has learned, so that its choices are far apart on any device."""
    model = voice_model()
    learn(model, Prompts().asked([ASKED]), SAID)
    return model.to("cuda:0")


def test_a_gpu_says_what_was_learned_and_ends(model: Any) -> None:
    (heard,) = speak(model, Prompts(), Tones(), [ASKED], GPU, SHORT)
    assert heard.ended
    assert torch.equal(heard.codes, SAID)


def test_a_seed_gives_one_clip_and_leaves_the_gpus_generator_alone(model: Any) -> None:
    drawn = VoiceSettings(max_seconds=0.6, temperature=3.0)
    state = torch.cuda.get_rng_state(0)
    one, two = (speak(model, Prompts(), Tones(), [ASKED], GPU, drawn, seed=7)[0] for _ in range(2))
    assert torch.equal(one.codes, two.codes)
    assert torch.equal(torch.cuda.get_rng_state(0), state)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_says_it_too(precision: str) -> None:
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    learned = voice_model()
    learn(learned, Prompts().asked([ASKED]), SAID)
    plan = dataclasses.replace(GPU, precision=precision, weight_precision=precision)
    (heard,) = speak(learned.to("cuda:0", half), Prompts(), Tones(), [ASKED], plan, SHORT)
    assert heard.fault is None
    assert heard.ended
    assert torch.equal(heard.codes, SAID)
