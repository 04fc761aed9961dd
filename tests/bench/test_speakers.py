"""Voices: the same speaker is nearer than another, whatever is said; what has no voice has no embedding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trimtab.bench.speakers import RATE, SpeakerEncoder, centre, likeness
from trimtab.errors import RequestError

SENTENCES = (
    "The little boat sails across the quiet lake in the morning.",
    "She opened the old window of the garden.",
)


@pytest.fixture(scope="module")
def encoder() -> SpeakerEncoder:
    pytest.importorskip("webrtcvad", reason="webrtcvad is not installed (extra `judge`)")
    pytest.importorskip("resemblyzer", reason="Resemblyzer is not installed (extra `judge`)")
    return SpeakerEncoder()


def test_its_weights_are_tensors_alone(encoder: SpeakerEncoder) -> None:
    import resemblyzer
    import torch

    file = Path(resemblyzer.__file__).with_name("pretrained.pt")
    kept = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    own = encoder._encoder.state_dict()
    assert all(torch.equal(own[name], kept[name]) for name in own)
    assert {tensor.device.type for tensor in own.values()} == {"cpu"}


@pytest.mark.slow
def test_the_same_voice_is_nearer_than_another(
    encoder: SpeakerEncoder, espeak: Callable[..., tuple[np.ndarray, int]]
) -> None:
    voices = ("en-us+m3", "en-us+f2")
    said = {(voice, text): encoder.embed(*espeak(text, voice)) for voice in voices for text in SENTENCES}
    assert all(embedding is not None for embedding in said.values())
    for voice, other in (voices, voices[::-1]):
        own = likeness(said[voice, SENTENCES[0]], said[voice, SENTENCES[1]])
        assert own > max(likeness(said[voice, SENTENCES[0]], said[other, text]) for text in SENTENCES) + 0.05


def test_neither_loudness_nor_rate_nor_order_matters_much(
    encoder: SpeakerEncoder, espeak: Callable[..., tuple[np.ndarray, int]]
) -> None:
    from trimtab.data.sound import resample

    samples, rate = espeak(SENTENCES[0])
    first = encoder.embed(samples, rate)
    assert first is not None
    for other in ((samples * np.float32(0.02), rate), (resample(samples, rate, 44_100), 44_100)):
        found = encoder.embed(*other)
        assert found is not None
        assert likeness(first, found) > 0.97
    again = encoder.embed(samples, rate)
    assert again is not None
    assert np.array_equal(first, again)


@pytest.mark.parametrize("seconds", [0, 0.01, 2])
def test_without_a_voice_there_is_no_embedding(encoder: SpeakerEncoder, seconds: float) -> None:
    assert encoder.embed(np.zeros(int(seconds * RATE), dtype=np.float32), RATE) is None


def test_a_click_in_silence_is_no_voice(encoder: SpeakerEncoder) -> None:
    sound = np.zeros(2 * RATE, dtype=np.float32)
    sound[RATE : RATE + 20] = 0.5
    assert encoder.embed(sound, RATE) is None


def test_the_centre_of_voices() -> None:
    one, other = np.array([1, 0], dtype=np.float32), np.array([0, 1], dtype=np.float32)
    assert likeness(one, other) == 0
    assert likeness(one, one) == pytest.approx(1)
    assert likeness(centre([one, other]), one) == pytest.approx(0.5**0.5)
    assert np.linalg.norm(centre([one, one, other])) == pytest.approx(1)


def test_an_encoder_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resemblyzer", None)
    with pytest.raises(RequestError, match=r"trimtab\[judge\]"):
        SpeakerEncoder()
