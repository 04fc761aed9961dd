"""The spectral codec: frames and phases against direct evaluations, codebooks, the round trip, transformers' ways."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trimtab
from trimtab.hardware import probe
from trimtab.models.higgs_codec import resample
from trimtab.models.kmeans import nearest, residual_codebooks
from trimtab.models.spectral_codec import SpectralCodec, SpectralCodecConfig
from trimtab.models.spectral_frames import Frames, mel_filters
from voices import RATE, voice

SMALL = {"num_quantizers": 8, "codebook_size": 64, "components": 48, "phase_rounds": 20}
FRAMES = Frames(RATE, 240, 1024, 100)


@pytest.fixture(scope="module")
def codec() -> SpectralCodec:
    return SpectralCodec.learn([voice(seed) for seed in range(4)], **SMALL)


def levels(sound: Any) -> torch.Tensor:
    """What the ear has of a sound, in decibels above -80."""
    bands = FRAMES.bands(FRAMES.magnitudes(torch.as_tensor(sound)[None]))
    return 20 * torch.log10(1e-4 + bands) + 80


def distance(sound: Any, other: Any) -> float:
    """Decibels, as the square root of the mean square over bands and frames."""
    count = min(len(sound), len(other)) // 240 * 240
    return float((levels(sound[:count]) - levels(other[:count])).square().mean().sqrt())


def there_and_back(codec: SpectralCodec, sound: Any) -> Any:
    return codec(torch.as_tensor(sound)[None, None]).audio_values[0, 0].numpy()


def test_a_frame_is_the_spectrum_around_its_middle() -> None:
    sound = voice(0, 0.1)
    found = FRAMES.magnitudes(torch.from_numpy(sound)[None])[0]
    assert found.shape == (10, 513)
    padded = np.pad(sound.astype(np.float64), 2048)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    for frame in (0, 3, 9):
        middle = 2048 + frame * 240 + 120
        direct = np.abs(np.fft.rfft(padded[middle - 512 : middle + 512] * window)) * 2 / window.sum()
        np.testing.assert_allclose(found[frame], direct, atol=1e-6)


def test_a_full_scale_sine_has_magnitude_one() -> None:
    sine = torch.sin(2 * math.pi * 40 / 1024 * torch.arange(9600.0))[None]
    assert FRAMES.magnitudes(sine)[0, 20].max() == pytest.approx(1, abs=1e-3)


def test_each_band_is_a_mean_and_every_bin_belongs_to_one() -> None:
    filters = mel_filters(RATE, 1024, 100)
    torch.testing.assert_close(filters.sum(0), torch.ones(100))
    assert (filters[1:-1].sum(1) > 0).all()


def test_magnitudes_found_from_bands_have_these_bands_and_are_not_negative() -> None:
    bands = FRAMES.bands(FRAMES.magnitudes(torch.from_numpy(voice(1))[None]))
    found = FRAMES.from_bands(bands)
    assert (found >= 0).all()
    assert (FRAMES.bands(found) - bands).norm() < 0.03 * bands.norm()


def test_a_sound_found_from_magnitudes_has_these_magnitudes() -> None:
    wanted = FRAMES.magnitudes(torch.from_numpy(voice(2))[None])
    found = FRAMES.sound(wanted, 60, 0.99)
    assert found.shape == (1, RATE)
    missed = [
        (FRAMES.magnitudes(FRAMES.sound(wanted, n, 0.99)) - wanted).norm() / wanted.norm() for n in (0, 60)
    ]
    assert missed[1] < 0.2 < missed[0]


def test_k_means_finds_clusters_that_lie_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[10.0, 0], [0, 10], [-10, 0], [7, 7]])
    vectors = (centres[:, None] + 0.1 * torch.randn(4, 50, 2, generator=generator)).flatten(0, 1)
    (book,) = residual_codebooks(vectors, 1, 5, 8, 10, generator)
    assert not book[0].any()
    means = vectors.view(4, 50, 2).mean(1)
    torch.testing.assert_close(book[1:][nearest(means, book[1:])], means, atol=1e-4, rtol=0)


def test_codes_are_the_nearest_entries_one_codebook_after_another(codec: SpectralCodec) -> None:
    codes = codec.encode(torch.from_numpy(voice(9))[None, None]).audio_codes[0]
    bands = FRAMES.bands(FRAMES.magnitudes(torch.from_numpy(voice(9))[None]))[0].double()
    left = torch.log1p(bands / codec.config.floor).view(25, 400) @ codec.basis.T.double()
    for book, (entries, own) in enumerate(zip(codec.codebooks.double(), codes, strict=True)):
        distances = torch.cdist(left, entries[: codec.entries[book]])
        # By distance, not by number: two entries may be equally near but for rounding.
        torch.testing.assert_close(
            distances.gather(1, own[:, None])[:, 0], distances.min(1).values, atol=1e-3, rtol=0
        )
        left = left - entries[own]


def test_every_codebook_brings_it_nearer(codec: SpectralCodec) -> None:
    sound = torch.from_numpy(voice(1))[None, None]
    codes = codec.encode(sound).audio_codes
    wanted = codec._vectors(sound[:, 0], 4) @ codec.basis.T
    kept = [
        (sum(codec.codebooks[b][codes[:, b]] for b in range(books)) - wanted).norm().item()
        for books in range(9)
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[8] < 0.2 * kept[0]


def test_a_learned_clip_comes_back_nearly_as_it_was(codec: SpectralCodec) -> None:
    sound = voice(0)
    found = there_and_back(codec, sound)
    assert distance(sound, found) < 4
    assert distance(sound, found) < 0.3 * distance(sound, voice(1))


def test_another_clip_of_the_same_voice_comes_back_better_than_one_of_another_voice(
    codec: SpectralCodec,
) -> None:
    same, other = voice(7), voice(7, pitch=210.0)
    assert distance(same, there_and_back(codec, same)) < distance(other, there_and_back(codec, other))


@pytest.mark.parametrize("gain", [1.0, 0.1])
def test_levels_are_kept(gain: float) -> None:
    sounds = [gain * voice(seed) for seed in range(3)]
    codec = SpectralCodec.learn(sounds, **SMALL)
    found = there_and_back(codec, sounds[0])
    assert abs(20 * math.log10(np.abs(found).max() / np.abs(sounds[0]).max())) < 4
    assert abs(20 * math.log10(found.std() / sounds[0].std())) < 1.5


def test_silence_has_code_zero_and_stays_silent(codec: SpectralCodec) -> None:
    codes = codec.encode(torch.zeros(1, 1, 4800)).audio_codes
    assert not codes.any()
    assert not codec.decode(codes).audio_values.any()
    pause = np.concatenate([voice(0), np.zeros(RATE, np.float32), voice(1)])
    found = there_and_back(codec, pause)
    assert np.abs(found[RATE + 2400 : 2 * RATE - 2400]).max() < 1e-3


@pytest.mark.parametrize("samples", [1, 959, 960, 961, 24001])
def test_any_length_is_filled_up_to_whole_frames(codec: SpectralCodec, samples: int) -> None:
    sound = torch.from_numpy(voice(3, 1.1))[None, None, :samples]
    codes = codec.encode(sound).audio_codes
    assert codes.shape == (1, 8, -(-samples // 960))
    assert codec.decode(codes).audio_values.shape == (1, 1, codes.shape[2] * 960)
    assert codec(sound).audio_values.shape == sound.shape


def test_a_batch_gives_what_each_clip_gives_alone(codec: SpectralCodec) -> None:
    first, second = (torch.from_numpy(voice(seed)) for seed in (4, 5))
    second[9600:] = 0
    codes = codec.encode(torch.stack([first, second])[:, None]).audio_codes
    alone = codec.encode(second[None, None, :9600]).audio_codes
    assert torch.equal(codes[0], codec.encode(first[None, None]).audio_codes[0])
    assert torch.equal(codes[1, :, :10], alone[0]), "silence behind a clip does not matter"
    assert torch.equal(codes[1, :, 12:], torch.zeros(8, 13, dtype=torch.long))
    sounds = codec.decode(codes).audio_values
    alone_sound = codec.decode(codes[:1]).audio_values
    # Phases are found step by step, and each step makes what another rounding left a little larger.
    assert torch.cosine_similarity(sounds[0].flatten(), alone_sound.flatten(), dim=0) > 0.99


def test_the_same_seed_learns_the_same_and_another_does_not() -> None:
    sounds = [voice(0), voice(1)]
    first, again, other = (SpectralCodec.learn(sounds, seed=seed, **SMALL) for seed in (1, 1, 2))
    assert torch.equal(first.codebooks, again.codebooks)
    assert not torch.equal(first.codebooks, other.codebooks)


def test_little_sound_gives_small_codebooks_whose_rest_adds_nothing() -> None:
    codec = SpectralCodec.learn([voice(0, 0.2)])
    assert codec.config.codebook_size == 1024
    assert 1 < codec.entries.max() < 30
    assert not codec.codebooks[:, 30:].any()
    codes = torch.full((1, 8, 5), 1023)
    assert not codec.decode(codes).audio_values.any()
    assert codec.encode(torch.from_numpy(voice(8))[None, None]).audio_codes.max() < 30


def test_silent_clips_alone_are_learned_from_without_harm() -> None:
    codec = SpectralCodec.learn([np.zeros(4800, np.float32)], **SMALL)
    assert codec.entries.tolist() == [1] * 8
    assert codec(torch.from_numpy(voice(0))[None, None]).audio_values.isfinite().all()


def test_codes_that_no_sound_led_to_are_finite(codec: SpectralCodec) -> None:
    codes = torch.randint(64, (2, 8, 20), generator=torch.Generator().manual_seed(0))
    found = codec.decode(codes).audio_values
    assert found.isfinite().all()
    assert found.abs().max() < 100


@pytest.mark.parametrize("code", [-1, 64])
def test_a_code_beyond_the_codebook_is_refused(codec: SpectralCodec, code: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 63"):
        codec.decode(torch.full((1, 8, 2), code))


@pytest.mark.parametrize("shape", [(24000,), (1, 24000), (1, 2, 24000), (1, 1, 0)])
def test_sound_of_another_shape_is_refused(codec: SpectralCodec, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(batch, 1, samples\)"):
        codec.encode(torch.zeros(shape))


def test_it_is_saved_and_loaded_as_transformers_models_are(codec: SpectralCodec, tmp_path: Path) -> None:
    codec.save_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = SpectralCodec.from_pretrained(tmp_path, use_safetensors=True)
    sound = torch.from_numpy(voice(3))[None, None]
    ours, theirs = codec(sound), loaded(sound)
    assert torch.equal(ours.audio_codes, theirs.audio_codes)
    assert torch.equal(ours.audio_values, theirs.audio_values)
    assert loaded.config.to_dict() == codec.config.to_dict() | {
        key: loaded.config.to_dict()[key]
        for key in ("_name_or_path", "architectures", "dtype")
        if key in loaded.config.to_dict()
    }


def test_it_has_the_outputs_of_the_real_one(codec: SpectralCodec) -> None:
    sound = torch.from_numpy(voice(3))[None, None]
    codes = codec.encode(sound, return_dict=False)
    assert isinstance(codes, torch.Tensor)
    assert torch.equal(codes, codec.encode(sound)[0])
    assert torch.equal(codec.decode(codes, return_dict=False), codec.decode(codes)[0])
    assert codes.dtype == torch.long
    config = SpectralCodecConfig()
    assert (config.sample_rate, config.frame_rate, config.num_quantizers, config.codebook_size) == (
        24000,
        25,
        8,
        1024,
    )


def test_half_precision_around_it_does_not_matter(codec: SpectralCodec) -> None:
    sound = torch.from_numpy(voice(6))[None, None]
    expected = codec(sound)
    with torch.autocast("cpu", torch.bfloat16):
        found = codec(sound)
    assert torch.equal(found.audio_codes, expected.audio_codes)
    assert torch.equal(found.audio_values, expected.audio_values)


def test_no_frame_is_refused(codec: SpectralCodec) -> None:
    with pytest.raises(ValueError, match="hold no frame"):
        codec.decode(torch.zeros(1, 8, 0, dtype=torch.long))


def test_a_gpu_gives_what_the_cpu_gives(codec: SpectralCodec) -> None:
    sounds = [voice(0), voice(1)]
    sound = torch.from_numpy(sounds[0])[None, None]
    on_cpu = SpectralCodec.learn(sounds, **SMALL)
    with trimtab.virtual_gpus(1):
        codec = SpectralCodec.learn(sounds, device="cuda:0", **SMALL)
        assert codec.device.type == "cuda"
        codes = codec.encode(sound.cuda()).audio_codes
        found = codec.decode(codes).audio_values
        assert codes.is_cuda
        assert found.is_cuda
        codes, found = codes.cpu(), found.cpu()
    assert torch.equal(codes, on_cpu.encode(sound).audio_codes)
    torch.testing.assert_close(found, on_cpu.decode(codes).audio_values, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not probe().gpus, reason="no CUDA device here")
def test_a_real_gpu_learns_the_same_again_and_comes_as_near_as_the_cpu() -> None:
    sounds = [voice(seed) for seed in range(4)]
    first, again = (SpectralCodec.learn(sounds, device="cuda:0", **SMALL) for _ in range(2))
    assert torch.equal(first.codebooks, again.codebooks)
    sound = torch.from_numpy(sounds[0])[None, None]
    found = first(sound.cuda()).audio_values[0, 0].cpu().numpy()
    on_cpu = there_and_back(SpectralCodec.learn(sounds, **SMALL), sounds[0])
    assert distance(sounds[0], found) < 1.2 * distance(sounds[0], on_cpu)


SAID = "mister quilter is the apostle of the middle classes and we are glad to welcome his gospel"


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> tuple[list[Any], SpectralCodec]:
    """Two recordings, one of which says `SAID`, and a codec that was learned from both."""
    soundfile = pytest.importorskip("soundfile", reason="reads the recordings")
    folder = request.config.rootpath.parent / "shared" / "data" / "speech"
    if not folder.is_dir():
        pytest.skip("no recordings beside the checkout")
    sounds = []
    for name in ("2.wav", "3.flac"):
        samples, rate = soundfile.read(folder / name, dtype="float32")
        sounds.append(resample(torch.from_numpy(samples), rate, RATE).numpy())
    return sounds, SpectralCodec.learn(sounds)


@pytest.mark.slow
def test_recorded_speech_is_still_understood(recorded: tuple[list[Any], SpectralCodec]) -> None:
    """By a recogniser that errs by itself: it may err by three words more."""
    pocketsphinx = pytest.importorskip("pocketsphinx", reason="the recogniser is an extra")
    (_, sound), codec = recorded

    def errors(sound: Any) -> int:
        decoder = pocketsphinx.Decoder(samprate=16000, loglevel="FATAL")
        narrow = resample(torch.from_numpy(sound.copy()), RATE, 16000).clamp(-1, 1).numpy()
        decoder.start_utt()
        decoder.process_raw((narrow * 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        return edits(SAID.split(), decoder.hyp().hypstr.split())

    assert errors(there_and_back(codec, sound)) <= errors(sound) + 3 <= 10


@pytest.mark.slow
def test_recorded_speech_is_still_of_its_speaker(recorded: tuple[list[Any], SpectralCodec]) -> None:
    resemblyzer = pytest.importorskip("resemblyzer", reason="the speaker encoder is an extra")
    encoder = resemblyzer.VoiceEncoder("cpu", verbose=False)
    sounds, codec = recorded

    def speaker(sound: Any) -> Any:
        return encoder.embed_utterance(resemblyzer.preprocess_wav(sound.copy(), source_sr=RATE))

    before = [speaker(sound) for sound in sounds]
    after = [speaker(there_and_back(codec, sound)) for sound in sounds]
    assert all(one @ other > 0.9 for one, other in zip(before, after, strict=True))
    assert before[0] @ before[1] < 0.9, "two speakers"


def edits(words: list[str], other: list[str]) -> int:
    """Words to change, leave out or put in."""
    row = list(range(len(other) + 1))
    for i, word in enumerate(words, 1):
        row, above = [i], row
        for j, found in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (word != found)))
    return row[-1]
