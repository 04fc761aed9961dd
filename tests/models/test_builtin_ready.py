"""The built-in model is made before a rehearsal that reads rows by its tokenizer, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.models import builtin, builtin_ready


def _words(folder: Path, model: str) -> list[str]:
    config = folder / "run.yaml"
    config.write_text(f"model: {model}\ndata: rows.jsonl\noutput_dir: runs/x\n")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return [str(config), "training.max_steps=2", "export=null"]


@pytest.mark.parametrize("shapes", [False, True])
def test_whose_rows_are_read_by_its_tokenizer(tmp_path: Path, shapes: bool) -> None:
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    for folder in (bare, whole):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (whole / "tokenizer.json").write_text("{}")
    needed = {
        name: builtin_ready._is_needed(_words(tmp_path, name), shapes_only=shapes)
        for name in ("smollm2", "llava-8b-shape", str(bare), str(whole), "owner/name")
    }
    assert needed == {
        "smollm2": True,
        "llava-8b-shape": True,
        str(bare): shapes,
        str(whole): False,
        "owner/name": False,
    }
    assert not builtin_ready._is_needed(["train.py", "run.yaml"], shapes_only=shapes)


def test_one_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    made: list[list[str]] = []
    monkeypatch.setattr(builtin_ready.subprocess, "run", lambda words, **_: made.append(words))
    assert not builtin.is_there()
    builtin_ready.make_ready(_words(tmp_path, "smollm2"), shapes_only=True)
    assert len(made) == 1
    kept = tmp_path / "cache" / "models" / "smollm2-135m-instruct-2"
    kept.mkdir(parents=True)
    (kept / builtin.WEIGHTS).write_bytes(b"")
    builtin_ready.make_ready(_words(tmp_path, "smollm2"), shapes_only=True)
    assert len(made) == 1
