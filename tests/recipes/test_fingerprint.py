"""Fingerprints: the same for the same content wherever it lies, another for any other."""

from __future__ import annotations

import datetime
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from trimtab.config import load_config
from trimtab.data.clips import Clip
from trimtab.data.pictures import Picture, asked
from trimtab.data.voice_collate import CodedRow
from trimtab.data.voice_rows import VoiceRow
from trimtab.recipes import fingerprint
from trimtab.recipes.fingerprint import files_print, model_print, reward_prints, rows_print
from trimtab.zeroth.objective import Example


def test_rows_of_a_table_by_content_and_order() -> None:
    def of(ids: list[list[int]]) -> str:
        labels = [[-100, *row[1:]] for row in ids]
        return str(rows_print(datasets.Dataset.from_dict({"input_ids": ids, "labels": labels}))["digest"])

    one = of([[1, 2, 3], [4, 5]])
    assert one == of([[1, 2, 3], [4, 5]])
    others = [
        [[4, 5], [1, 2, 3]],
        [[1, 2], [3, 4, 5]],
        [[1, 2, 3], [4, 6]],
        [[1, 2, 3]],
        [[1, 2, 3], [4, 5], [6]],
    ]
    assert len({one, *map(of, others)}) == len(others) + 1
    table = datasets.Dataset.from_dict(
        {"prompt": ["a", "b", "c"], "day": [datetime.date(2026, 1, n) for n in (1, 2, 3)]}
    )
    assert rows_print(table)["digest"] == rows_print(table.select([0, 1, 2]))["digest"]
    assert rows_print(table)["digest"] != rows_print(table.select([0, 2, 1]))["digest"]


def test_rows_of_every_recipe_do_not_count_by_their_place(tmp_path: Path) -> None:
    def picture(name: str, colour: str) -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), colour).save(tmp_path / name)
        return tmp_path / name

    red, moved, blue = picture("a/x.png", "red"), picture("b/x.png", "red"), picture("c/y.png", "blue")
    rows = [
        asked("which?", ("red",), (Picture(path, f"{path}, row 1"),), f"{path}, row 1")
        for path in (red, moved, blue)
    ]
    same, also, other = (rows_print([row])["digest"] for row in rows)
    assert same == also != other
    clips = [Clip(path, "row") for path in (red, moved, blue)]
    codes = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])]
    spoken = [
        CodedRow(VoiceRow("hello", clip, None, None, None, None, f"{clip.path}"), reference=None, target=code)
        for clip, code in zip(clips, codes, strict=True)
    ]
    same, also, other = (rows_print([row])["digest"] for row in spoken)
    assert same == also != other
    assert rows_print([Example([1], [[2], [3]], 0)]) == rows_print([Example([1], [[2], [3]], 0)])
    assert rows_print([Example([1], [[2], [3]], 0)]) != rows_print([Example([1], [[2], [3]], 1)])
    assert rows_print([{"x": np.float32(1.5)}]) == rows_print([{"x": np.float32(1.5)}])
    assert rows_print([{"x": object()}]) == rows_print([{"x": object()}]), "a place in memory is no content"


def test_a_reward_counts_as_it_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["recipe=grpo", "reward=[mine_of_this_test:score, answer]"])
    module = tmp_path / "mine_of_this_test.py"

    def of(text: str) -> str | None:
        module.write_text(text)
        return reward_prints(config)["mine_of_this_test:score"]

    first = of("def score(completions, **kw):\n    return [1.0 for c in completions]\n")
    assert first == of(
        "# a note\ndef score(completions, **kw):\n\n    return [1.0 for c in completions]  # one\n"
    )
    assert first != of("def score(completions, **kw):\n    return [2.0 for c in completions]\n")
    assert of("def (") is not None
    module.unlink()
    assert reward_prints(config) == {"mine_of_this_test:score": None}


def test_a_large_file_counts_by_places_all_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_SAMPLE", 64)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = bytearray(range(256)) * 64
    (folder / "model.safetensors").write_bytes(weights)
    config = load_config(None, [f"model={folder}"])
    first = model_print(config)
    assert first is not None
    assert first["read"] == "in samples"
    assert first == model_print(config)
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert model_print(config) != first
    assert files_print(str(folder)).keys() == {"config.json"}
    assert files_print("someone/elsewhere") == {}
    assert model_print(load_config(None, [])) is None, "the built-in model is made by the program"
