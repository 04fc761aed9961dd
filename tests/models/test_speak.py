"""Speech: the codes of a generation without cache or `generate`, ended as it was taught; the model as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import trimtab
from trimtab.config.schema import LoraSettings
from trimtab.config.voice import VoiceSettings
from trimtab.data.delay import spoken
from trimtab.errors import RequestError
from trimtab.models.adapters import add_lora
from trimtab.models.families import AUDIO
from trimtab.models.speak import speak
from trimtab.placement import take_inputs
from voice_parts import AUDIO as AUDIO_TOKEN
from voice_parts import BOOKS, BOS, DELAY, EOS, PLAN, Prompts, Tones, clip, learn, row, voice_model

SHORT = VoiceSettings(max_seconds=0.6)
FRAMES = 15
ROWS = [row([11, 12, 13]), row([21, 22, 23, 24], clip(5)), row([31], clip(9, seed=1))]


def step_by_step(model: Any, asked: Any, entries: int = 1024) -> torch.Tensor:
    """Column by column, the whole row each time: no cache, no `generate`; the delay by its definition."""
    batch = Prompts().asked([asked])
    said: list[torch.Tensor] = []
    ending = 0
    for column in range(FRAMES + BOOKS):
        with torch.no_grad():
            logits = model(**batch).logits[0, -1].reshape(BOOKS, -1)
        logits[:, entries:EOS] = -torch.inf
        new = logits.argmax(dim=1)
        new[column:] = BOS
        # The column after the first EOS ends codebook 0, the one after that codebook 1 as well, and so on.
        new[:ending] = EOS
        ending += bool(ending) or bool((new == EOS).any())
        said.append(new)
        if (new == EOS).all():
            break
        one = torch.ones(1, 1, dtype=torch.long)
        token = one * (DELAY if ending else AUDIO_TOKEN)
        batch["input_ids"] = torch.cat([batch["input_ids"], token], dim=1)
        batch["attention_mask"] = torch.cat([batch["attention_mask"], one], dim=1)
        earlier = batch.get("audio_input_ids", torch.zeros(1, 0, BOOKS, dtype=torch.long))
        batch["audio_input_ids"] = torch.cat([earlier, new[None, None]], dim=1)
        batch["audio_input_ids_mask"] = torch.ones(1, earlier.shape[1] + 1, dtype=torch.bool)
    return spoken(torch.stack(said), BOS, EOS)[0]


@pytest.mark.parametrize("entries", [1024, 50])
def test_each_row_is_spoken_as_column_by_column(entries: int) -> None:
    model = voice_model()
    given = speak(model, Prompts(), Tones(entries), ROWS, PLAN, SHORT)
    expected = [step_by_step(model, asked, entries) for asked in ROWS]
    for said, codes in zip(given, expected, strict=True):
        assert torch.equal(said.codes, codes)
        assert len(said.samples) == 960 * len(codes)
        assert (said.codes < entries).all()
    assert len({tuple(said.codes.flatten().tolist()) for said in given}) == len(ROWS)


@pytest.mark.parametrize("frames", [0, 1, 9])
def test_what_was_learned_is_said_and_ends_by_itself(frames: int) -> None:
    model, asked, said = voice_model(), ROWS[1], clip(frames, seed=5)
    learn(model, Prompts().asked([asked]), said)
    (heard,) = speak(model, Prompts(), Tones(), [asked], PLAN, SHORT)
    assert heard.ended
    assert torch.equal(heard.codes, said)
    assert heard.seconds == pytest.approx(frames / 25)


def test_a_clip_that_does_not_end_is_cut_off() -> None:
    model = voice_model()
    learn(model, Prompts().asked([ROWS[0]]), clip(40, seed=6))
    (heard,) = speak(model, Prompts(), Tones(), ROWS[:1], PLAN, SHORT)
    assert not heard.ended
    assert torch.equal(heard.codes, clip(40, seed=6)[:FRAMES])


def test_a_model_with_adapters_speaks_in_the_mode_it_was_in() -> None:
    model = voice_model()
    before = speak(model, Prompts(), Tones(), ROWS, PLAN, SHORT)
    adapted = add_lora(model, LoraSettings(r=2), AUDIO)
    adapted.train()
    state = torch.get_rng_state()
    after = speak(adapted, Prompts(), Tones(), ROWS, PLAN, VoiceSettings(max_seconds=0.6, temperature=0))
    assert all(torch.equal(old.codes, new.codes) for old, new in zip(before, after, strict=True))
    assert adapted.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.config.use_cache
    assert not model._forward_hooks


def test_a_seed_gives_one_clip_whatever_is_spoken_before() -> None:
    model = voice_model()
    drawn = VoiceSettings(max_seconds=0.6, temperature=1.5, top_k=200)
    state = torch.get_rng_state()
    both = speak(model, Prompts(), Tones(), ROWS[:2], PLAN, drawn, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    alone = speak(model, Prompts(), Tones(), ROWS[1:2], PLAN, drawn, seed=1)
    other = speak(model, Prompts(), Tones(), ROWS[1:2], PLAN, drawn, seed=2)
    assert torch.equal(both[1].codes, alone[0].codes)
    assert not torch.equal(alone[0].codes, other[0].codes)


def test_the_models_own_settings_hold_until_the_config_says_otherwise() -> None:
    model = voice_model()
    likeliest = speak(model, Prompts(), Tones(), ROWS, PLAN, SHORT)
    # As the published model has them: drawn, and what repeats is drawn anew.
    model.generation_config.update(do_sample=True, temperature=1.5, top_k=50)
    model.generation_config.ras_win_len, model.generation_config.ras_win_max_num_repeat = 7, 2
    drawn = [speak(model, Prompts(), Tones(), ROWS, PLAN, SHORT, seed=seed) for seed in (1, 2)]
    assert any(not torch.equal(a.codes, b.codes) for a, b in zip(*drawn, strict=True))
    greedy = VoiceSettings(max_seconds=0.6, temperature=0)
    again = [speak(model, Prompts(), Tones(), ROWS, PLAN, greedy, seed=seed) for seed in (1, 2)]
    for first, second, third in zip(likeliest, *again, strict=True):
        assert torch.equal(first.codes, second.codes)
        assert torch.equal(first.codes, third.codes)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_numbers_that_are_none_are_told_not_spoken(temperature: float) -> None:
    model = voice_model()
    with torch.no_grad():
        model.audio_lm_head.weight[3] = torch.nan
    voice = VoiceSettings(max_seconds=0.6, temperature=temperature)
    (heard,) = speak(model, Prompts(), Tones(), ROWS[:1], PLAN, voice)
    assert heard.fault is not None
    assert "not finite" in heard.fault
    assert heard.seconds == 0
    (heard,) = speak(voice_model(), Prompts(), Tones(loud=float("inf")), ROWS[:1], PLAN, SHORT)
    assert heard.fault == "the codec's sound is not finite"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_speaks(precision: str) -> None:
    half = torch.bfloat16 if precision == "bf16" else torch.float16
    plan = dataclasses.replace(PLAN, precision=precision, weight_precision=precision)
    for heard in speak(voice_model().to(half), Prompts(), Tones(), ROWS, plan, SHORT):
        assert heard.fault is None
        assert heard.samples.dtype == "float32"
        assert len(heard.samples)


def test_one_gpu_says_what_the_cpu_says() -> None:
    expected = speak(voice_model(), Prompts(), Tones(), ROWS, PLAN, SHORT)
    drawn = VoiceSettings(max_seconds=0.6, temperature=1.5)
    at_random = speak(voice_model(), Prompts(), Tones(), ROWS[:1], PLAN, drawn, seed=4)
    with trimtab.virtual_gpus(1):
        plan = dataclasses.replace(PLAN, device="cuda:0")
        model = voice_model().to("cuda:0")
        given = speak(model, Prompts(), Tones(), ROWS, plan, SHORT)
        repeated = speak(model, Prompts(), Tones(), ROWS[:1], plan, drawn, seed=4)
    for said, codes in zip([*given, *repeated], [*expected, *at_random], strict=True):
        assert torch.equal(said.codes, codes.codes)


@pytest.mark.parametrize("head", ["cuda:0", "cuda:1"])
def test_a_model_split_over_two_gpus_says_what_the_cpu_says(tmp_path: Path, head: str) -> None:
    whole = voice_model()
    expected = speak(whole, Prompts(), Tones(), ROWS, PLAN, SHORT)
    whole.save_pretrained(tmp_path)
    places = {
        "model.embed_tokens": "cuda:0",
        "model.embed_audio_tokens": "cuda:0",
        "model.rotary_emb": "cuda:0",
    }
    places |= {f"model.layers.{layer}": f"cuda:{layer // 2}" for layer in range(4)}
    places |= {"model.norm": head, "audio_lm_head": head}
    with trimtab.virtual_gpus(2):
        plan = dataclasses.replace(PLAN, device="cuda:0", strategy="split", device_map=places)
        model = type(whole).from_pretrained(tmp_path, device_map=places)
        take_inputs(model, plan)  # as a run's own loading does
        given = speak(model, Prompts(), Tones(), ROWS, plan, SHORT)
    assert all(torch.equal(said.codes, other.codes) for said, other in zip(given, expected, strict=True))


def test_a_prompt_that_generate_would_misread_is_refused() -> None:
    with pytest.raises(RequestError, match=f"fewer than {BOOKS} tokens"):
        speak(voice_model(), Prompts(between=1), Tones(), [row([5], clip(3))], PLAN, SHORT)
