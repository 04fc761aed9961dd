"""Which codec is taken: the real class from a folder or as the model's processor names it, or one that is learned."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
import trimtab
from trimtab.config.load import load_config
from trimtab.config.schema import Config
from trimtab.data.clips import Clip
from trimtab.data.voice_collate import CodedRow
from trimtab.data.voice_rows import VoiceRow
from trimtab.errors import RequestError
from trimtab.models.audio_codes import coded
from trimtab.models.codec import KEPT, codec_for, identity, load_run_codec
from trimtab.models.higgs_codec import higgs_codec_class, resample
from trimtab.models.spectral_codec import SpectralCodec
from trimtab.placement import PlacementPlan
from voices import voice, write_clip

CPU = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
BOOKS = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model as far as a codec looks at it."""
    folder = tmp_path / "model"
    tiny_models.config("higgs_audio_v2", num_codebooks=BOOKS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real-codec")
    tiny_models.codec().save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> list[VoiceRow]:
    for n in range(3):
        write_clip(tmp_path / f"{n}.wav", voice(n, 0.4))
    return rows_in(tmp_path)


def rows_in(folder: Path) -> list[VoiceRow]:
    """Two targets and one reference for both, as they lie in the folder."""
    clips = [Clip(folder / f"{n}.wav", f"row {n}") for n in range(3)]
    return [
        VoiceRow("words", target, clips[0], "other words", None, None, where=f"row {n}")
        for n, target in enumerate(clips[1:])
    ]


def config_of(model: Path, codec: str | None) -> Config:
    return load_config(None, ["recipe=voice", f"model.name={model}", f"voice.codec={codec or 'null'}"])


def nothing(_: str) -> None: ...


def test_the_real_class_goes_from_sound_to_codes_and_back(model: Path, real_folder: Path) -> None:
    codec = codec_for(config_of(model, str(real_folder)), CPU, [], nothing)
    assert type(codec) is higgs_codec_class()
    assert not codec.training
    assert codec.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in codec.parameters())
    codes = codec.encode(torch.from_numpy(voice(0))[None, None]).audio_codes
    assert codes.shape == (1, BOOKS, 25)
    assert len(codes.unique()) > 10
    assert codec.decode(codes).audio_values.shape == (1, 1, 24000)


def test_the_real_class_takes_our_resampling_and_nobody_else_is_told(real_folder: Path) -> None:
    script = (
        "import sys\n"
        "from trimtab.models.higgs_codec import FILE, higgs_codec_class, resample\n"
        "codec = higgs_codec_class()\n"
        "assert codec.__module__ == FILE\n"
        "from transformers.utils import is_torchaudio_available\n"
        "if not is_torchaudio_available():\n"
        "    assert sys.modules[FILE].torchaudio.functional.resample is resample\n"
        "    assert 'torchaudio' not in sys.modules\n"
        "assert higgs_codec_class() is codec\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(("old", "new"), [(24000, 16000), (16000, 24000), (22050, 24000), (24000, 24000)])
def test_resampling_is_the_sum_that_defines_it(old: int, new: int) -> None:
    draw = np.random.default_rng(0)
    sound = draw.standard_normal(400)
    found = resample(torch.from_numpy(sound)[None].float(), old, new)[0]
    assert len(found) == math.ceil(400 * new / old)
    if old == new:
        torch.testing.assert_close(found, torch.from_numpy(sound).float())
        return
    cut = min(old, new) * 0.99
    for place in (0, 7, 100, len(found) - 1):
        away = (np.arange(400) / old - place / new) * cut
        window = np.where(np.abs(away) < 6, np.cos(np.pi * away / 12) ** 2, 0)
        assert found[place].item() == pytest.approx(
            np.sum(sound * np.sinc(away) * window) * cut / old, abs=1e-5
        )


def test_the_models_own_codec_is_the_one_that_its_processor_names(model: Path, real_folder: Path) -> None:
    entry = {
        "audio_tokenizer_class": "HiggsAudioV2TokenizerModel",
        "audio_tokenizer_name_or_path": str(real_folder),
    }
    (model / "processor_config.json").write_text(json.dumps({"audio_tokenizer": entry}))
    assert type(codec_for(config_of(model, None), CPU, [], nothing)) is higgs_codec_class()


def test_it_may_lie_in_the_models_folder_and_be_named_by_the_older_file(
    model: Path, real_folder: Path
) -> None:
    (model / "audio_tokenizer").symlink_to(real_folder)
    entry = {"audio_tokenizer_class": "…", "audio_tokenizer_name_or_path": "audio_tokenizer"}
    (model / "audio_tokenizer_config.json").write_text(json.dumps(entry))
    assert type(codec_for(config_of(model, None), CPU, [], nothing)) is higgs_codec_class()


def test_as_transformers_saves_a_processor_it_is_found(model: Path, real_folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import (
        DacFeatureExtractor,
        HiggsAudioV2Processor,
        PreTrainedTokenizerFast,
    )

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    codec = higgs_codec_class().from_pretrained(real_folder)
    processor = object.__new__(HiggsAudioV2Processor)
    processor.feature_extractor, processor.tokenizer, processor.audio_tokenizer = (
        DacFeatureExtractor(),
        words,
        codec,
    )
    processor.chat_template = None
    processor.save_pretrained(model)
    assert json.loads((model / "processor_config.json").read_text())["audio_tokenizer"]
    assert type(codec_for(config_of(model, None), CPU, [], nothing)) is higgs_codec_class()


def refused(act: Callable[[], Any], *parts: str) -> None:
    with pytest.raises(RequestError) as error:
        act()
    for part in (*parts, "why: ", "change: "):
        assert part in str(error.value)


def test_a_model_without_a_codec_is_told_where_one_is(model: Path) -> None:
    refused(
        lambda: codec_for(config_of(model, None), CPU, [], nothing),
        "names no codec of its own",
        "voice.codec=spectral",
    )


def test_a_folder_that_is_no_codec_is_refused(model: Path, tmp_path: Path) -> None:
    refused(lambda: codec_for(config_of(model, str(model)), CPU, [], nothing), "is higgs_audio_v2\n")
    (tmp_path / "empty").mkdir()
    refused(
        lambda: codec_for(config_of(model, str(tmp_path / "empty")), CPU, [], nothing), "of no known type"
    )
    refused(lambda: codec_for(config_of(model, "owner/nowhere"), CPU, [], nothing), "could not be loaded")


def test_codebooks_that_the_model_has_not_are_refused(tmp_path: Path, real_folder: Path) -> None:
    tiny_models.config("higgs_audio_v2", num_codebooks=4).save_pretrained(tmp_path / "other")
    refused(
        lambda: codec_for(config_of(tmp_path / "other", str(real_folder)), CPU, [], nothing),
        "8 codebooks of 1024 entries",
        "takes 4 of 1024",
    )


def test_weights_that_are_not_whole_are_refused(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    codec = tiny_models.codec()
    codec.save_pretrained(tmp_path / "cut")
    weights = load_file(tmp_path / "cut" / "model.safetensors")
    del weights["fc2.weight"]
    save_file(weights, tmp_path / "cut" / "model.safetensors", {"format": "pt"})
    refused(lambda: codec_for(config_of(model, str(tmp_path / "cut")), CPU, [], nothing), "lack fc2.weight")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x00" * 20)
    refused(
        lambda: codec_for(config_of(model, str(tmp_path / "cut")), CPU, [], nothing), "could not be loaded"
    )


def test_a_spectral_codec_is_learned_once_from_the_same_clips(model: Path, rows: list[VoiceRow]) -> None:
    said: list[str] = []
    config = config_of(model, "spectral")
    first = codec_for(config, CPU, rows, said.append)
    assert isinstance(first, SpectralCodec)
    assert "learned from 3 of 3 clips (1 s of sound)" in said[-1]
    told = len(said)
    again = codec_for(config, CPU, list(reversed(rows)), said.append)
    assert len(said) == told, "kept"
    assert identity(first) == identity(again)
    other = codec_for(config, CPU, rows[:1], said.append)
    assert "learned from 2 of 2 clips" in said[-1]
    assert identity(other) != identity(first)


def test_a_spectral_codec_is_learned_to_fit_the_model(tmp_path: Path, rows: list[VoiceRow]) -> None:
    folder = tmp_path / "two"
    tiny_models.config(
        "higgs_audio_v2", num_codebooks=2, codebook_size=18, audio_stream_bos_id=16, audio_stream_eos_id=17
    ).save_pretrained(folder)
    codec = codec_for(config_of(folder, "spectral"), CPU, rows, nothing)
    assert codec.codebooks.shape[:2] == (2, 16)


def test_a_run_is_read_with_the_codec_that_it_keeps(
    model: Path, rows: list[VoiceRow], tmp_path: Path
) -> None:
    config = config_of(model, "spectral")
    codec = codec_for(config, CPU, rows, nothing)
    run = tmp_path / "run"
    refused(lambda: load_run_codec(config, CPU, run), "keeps no codec")
    codec.save_pretrained(run / KEPT)
    assert identity(load_run_codec(config, CPU, run)) == identity(codec)
    # Its folder may also be named, for another run to go on with.
    named = codec_for(config_of(model, str(run / KEPT)), CPU, [], nothing)
    assert identity(named) == identity(codec)


def test_a_run_with_a_named_codec_is_read_with_that_one(
    model: Path, real_folder: Path, tmp_path: Path
) -> None:
    codec = load_run_codec(config_of(model, str(real_folder)), CPU, tmp_path)
    assert type(codec) is higgs_codec_class()


def test_identity_is_the_weights_and_settings_not_the_place(real_folder: Path, tmp_path: Path) -> None:
    codec = higgs_codec_class().from_pretrained(real_folder)
    codec.save_pretrained(tmp_path)
    assert identity(higgs_codec_class().from_pretrained(tmp_path)) == identity(codec)
    with torch.no_grad():
        codec.fc.weight[0, 0] += 1
    assert identity(codec) != identity(higgs_codec_class().from_pretrained(tmp_path))


@pytest.mark.parametrize("real", [True, False])
def test_on_a_gpu_it_gives_what_it_gives_on_the_cpu(
    model: Path, rows: list[VoiceRow], real_folder: Path, real: bool
) -> None:
    from dataclasses import replace

    config = config_of(model, str(real_folder) if real else "spectral")
    sound = torch.from_numpy(voice(1))[None, None]
    with trimtab.virtual_gpus(1):
        codec = codec_for(config, replace(CPU, device="cuda:0"), rows, nothing)
        assert codec.device.type == "cuda"
        codes = codec.encode(sound.cuda()).audio_codes
        assert codec.decode(codes).audio_values.is_cuda
        codes = codes.cpu()
    assert torch.equal(codes, codec_for(config, CPU, rows, nothing).encode(sound).audio_codes)


def test_where_devices_hold_shapes_alone_codes_are_counted(model: Path, rows: list[VoiceRow]) -> None:
    from dataclasses import replace

    def shapes(some: list[CodedRow]) -> list[Any]:
        return [codes.shape for row in some for codes in (row.reference, row.target) if codes is not None]

    config, plan = config_of(model, "spectral"), replace(CPU, device="cuda:0")
    with trimtab.virtual_gpus(1, shapes=True):
        counted = shapes(coded(rows, codec_for(config, plan, rows, nothing), plan, nothing))
    assert counted == shapes(coded(rows, codec_for(config, CPU, rows, nothing), CPU, nothing))
