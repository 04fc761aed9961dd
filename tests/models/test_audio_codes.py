"""The codes of clips: computed once for each content and codec, whole or not there, by several processes at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
import trimtab
from trimtab.data.clips import Clip
from trimtab.data.voice_rows import VoiceRow
from trimtab.errors import RequestError
from trimtab.models.audio_codes import coded
from trimtab.models.codec import identity
from trimtab.models.spectral_codec import SpectralCodec
from trimtab.placement import PlacementPlan
from voices import voice, write_clip

CPU = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")
SETTINGS = {"num_quantizers": 4, "codebook_size": 32, "components": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def codec() -> SpectralCodec:
    return SpectralCodec.learn([voice(0), voice(1)], **SETTINGS)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a clip was encoded."""
    encode, times = SpectralCodec.encode, []

    def counted(self: SpectralCodec, *args: Any, **settings: Any) -> Any:
        times.append(1)
        return encode(self, *args, **settings)

    monkeypatch.setattr(SpectralCodec, "encode", counted)
    return lambda: len(times)


def rows_of(folder: Path, number: int = 3) -> list[VoiceRow]:
    """Rows with a target of their own each, and one reference for all, which lies there twice."""
    names = [f"{n}.wav" for n in range(number)]
    for n, name in enumerate(names):
        write_clip(folder / name, voice(n, 0.2 + 0.1 * (n % 4)))
    for name in ("reference.wav", "the-same.wav"):
        write_clip(folder / name, voice(99, 0.3))
    return [
        VoiceRow(
            "words",
            Clip(folder / name, f"row {n}"),
            Clip(folder / ("the-same.wav" if n else "reference.wav"), f"row {n}") if n != 1 else None,
            None,
            None,
            None,
            where=f"row {n}",
        )
        for n, name in enumerate(names)
    ]


def files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.safetensors"))


def test_rows_come_with_the_codes_of_their_clips(tmp_path: Path, codec: SpectralCodec) -> None:
    rows = rows_of(tmp_path)
    found = coded(rows, codec, CPU, lambda _: None)
    assert [one.row for one in found] == rows
    assert found[1].reference is None
    for one in found:
        assert one.row.target is not None
        assert one.target is not None
        sound = torch.from_numpy(one.row.target.sound(24000))
        alone = codec.encode(sound[None, None]).audio_codes[0].T
        assert torch.equal(one.target, alone)
        assert one.target.dtype == torch.long
    assert found[0].reference is not None
    assert found[2].reference is not None
    assert torch.equal(found[0].reference, found[2].reference)


def test_each_content_is_encoded_once_and_never_again(
    tmp_path: Path, codec: SpectralCodec, count: Callable[[], int], cache: Path
) -> None:
    rows, said = rows_of(tmp_path), []
    first = coded(rows, codec, CPU, said.append)
    assert count() == 4, "three targets and one reference"
    assert said == [f"codes: 4 clips encoded, kept in {cache / 'codes'}"]
    again = coded(rows, codec, CPU, said.append)
    assert count() == 4
    assert len(said) == 1
    for one, other in zip(first, again, strict=True):
        assert one.target is not None
        assert other.target is not None
        assert torch.equal(one.target, other.target)
    write_clip(tmp_path / "1.wav", voice(55))
    coded(rows, codec, CPU, said.append)
    assert count() == 5, "the file is another one now"
    assert said[1] == f"codes: 1 of 4 clips encoded, the others taken from {cache / 'codes'}"


def test_another_codec_has_codes_of_its_own(tmp_path: Path, codec: SpectralCodec, cache: Path) -> None:
    rows = rows_of(tmp_path)
    coded(rows, codec, CPU, lambda _: None)
    other = SpectralCodec.learn([voice(5)], **SETTINGS)
    coded(rows, other, CPU, lambda _: None)
    assert {file.parent.name for file in files(cache)} == {identity(codec), identity(other)}


def test_the_real_class_gives_codes_in_the_same_way(tmp_path: Path) -> None:
    codec = tiny_models.codec()
    (row,) = coded(rows_of(tmp_path, 1), codec, CPU, lambda _: None)
    assert row.target is not None
    assert row.target.shape == (5, 8)
    (again,) = coded(rows_of(tmp_path, 1), codec, CPU, lambda _: None)
    assert again.target is not None
    assert torch.equal(row.target, again.target)


def test_a_gpu_shares_the_codes_of_the_cpu(
    tmp_path: Path, codec: SpectralCodec, count: Callable[[], int]
) -> None:
    rows, folder = rows_of(tmp_path), tmp_path / "codec"
    codec.save_pretrained(folder)
    with trimtab.virtual_gpus(1):
        on_gpu = SpectralCodec.from_pretrained(folder).to("cuda:0")
        found = coded(rows, on_gpu, replace(CPU, device="cuda:0"), lambda _: None)
        assert all(row.target is not None and not row.target.is_cuda for row in found)
    assert count() == 4
    expected = coded(rows, codec, CPU, lambda _: None)
    assert count() == 4, "the same codec, wherever it is"
    assert [row.row for row in found] == [row.row for row in expected]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _other_shape(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"codes": torch.zeros(3, 9, dtype=torch.int32)}, path)


def _other_codes(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"codes": torch.full((3, 4), 999, dtype=torch.int32)}, path)


@pytest.mark.parametrize(
    "damage", [_cut, _other_shape, _other_codes, lambda path: path.write_bytes(b"")], ids=lambda f: f.__name__
)
def test_a_damaged_file_is_computed_again(
    tmp_path: Path, codec: SpectralCodec, cache: Path, damage: Callable[[Path], None]
) -> None:
    rows = rows_of(tmp_path)
    first = coded(rows, codec, CPU, lambda _: None)
    before = {file: file.read_bytes() for file in files(cache)}
    damage(files(cache)[0])
    said: list[str] = []
    again = coded(rows, codec, CPU, said.append)
    assert said[0].startswith("codes: 1 of 4 clips encoded")
    assert {file: file.read_bytes() for file in files(cache)} == before
    assert all(torch.equal(one.target, other.target) for one, other in zip(first, again, strict=True))  # type: ignore[arg-type]


def test_an_interruption_keeps_what_is_done(
    tmp_path: Path,
    codec: SpectralCodec,
    count: Callable[[], int],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rows_of(tmp_path)
    sound, read = Clip.sound, []

    def pressed(self: Clip, rate: int) -> Any:
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(1)
        return sound(self, rate)

    with monkeypatch.context() as patch:
        patch.setattr(Clip, "sound", pressed)
        with pytest.raises(KeyboardInterrupt):
            coded(rows, codec, CPU, lambda _: None)
    assert len(files(cache)) == 2
    coded(rows, codec, CPU, lambda _: None)
    assert count() == 4
    assert not list(cache.rglob("*.partial"))


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, codec: SpectralCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(RequestError, match="TRIMTAB_CACHE"):
        coded(rows_of(tmp_path), codec, CPU, lambda _: None)


WORKER = """
import os, sys, time
from pathlib import Path
import torch
from trimtab.models.audio_codes import coded
from trimtab.models.spectral_codec import SpectralCodec
from test_audio_codes import CPU, kept_rows

folder, name = Path(sys.argv[1]), sys.argv[2]
codec = SpectralCodec.from_pretrained(folder / "codec")
encode = codec.encode

def slow(*args):
    with (folder / "log").open("a") as log:
        log.write(name + "\\n")
    time.sleep(float(sys.argv[3]))
    return encode(*args)

codec.encode = slow
(folder / f"ready-{name}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
found = coded(kept_rows(folder / "clips", 10), codec, CPU, print)
torch.save([row.target for row in found], folder / f"{name}.pt")
"""


def started(folder: Path, name: str, delay: float) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), name, str(delay)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def kept_rows(folder: Path, number: int) -> list[VoiceRow]:
    return [
        VoiceRow("words", Clip(folder / f"{n}.wav", f"row {n}"), None, None, None, None, where=f"row {n}")
        for n in range(number)
    ]


def until(true: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not true():
        assert process.poll() is None
        time.sleep(0.01)


@pytest.fixture
def bench(tmp_path: Path, codec: SpectralCodec) -> Path:
    folder = tmp_path / "bench"
    (folder / "clips").mkdir(parents=True)
    rows_of(folder / "clips", 10)
    codec.save_pretrained(folder / "codec")
    return folder


@pytest.mark.slow
def test_two_processes_share_the_work_and_do_nothing_twice(bench: Path, codec: SpectralCodec) -> None:
    processes = [started(bench, name, 0.1) for name in ("a", "b")]
    for name, process in zip("ab", processes, strict=True):
        until((bench / f"ready-{name}").exists, process)
    (bench / "go").touch()
    assert [process.wait() for process in processes] == [0, 0]
    log = (bench / "log").read_text().split()
    assert len(log) == 10, "each clip once"
    assert set(log) == {"a", "b"}
    first, second = (torch.load(bench / f"{name}.pt") for name in "ab")
    expected = coded(kept_rows(bench / "clips", 10), codec, CPU, lambda _: None)
    for one, other, row in zip(first, second, expected, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, row.target)


@pytest.mark.slow
def test_a_killed_process_leaves_its_work_to_the_other(bench: Path, cache: Path) -> None:
    killed = started(bench, "a", 0.3)
    (bench / "go").touch()
    until(lambda: len(files(cache)) >= 2, killed)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    done = len(files(cache))
    assert done < 10
    other = started(bench, "b", 0)
    assert other.wait() == 0
    assert (bench / "log").read_text().split().count("b") == 10 - done
    assert len(torch.load(bench / "b.pt")) == 10
