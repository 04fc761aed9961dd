"""The built-in model is made before a rehearsal that reads rows by its tokenizer, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.models import builtin
from trimtab.rehearse import built_in_ready
from trimtab.rehearse.target import Target


def _target(folder: Path, model: str) -> Target:
    config = folder / "run.yaml"
    config.write_text(f"model: {model}\ndata: rows.jsonl\noutput_dir: runs/x\n")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    return Target(("-m", "trimtab", "train", str(config), "training.max_steps=2", "export=null"), "run.yaml")


@pytest.mark.parametrize("shapes", [False, True])
def test_whose_rows_are_read_by_its_tokenizer(tmp_path: Path, shapes: bool) -> None:
    bare, whole = tmp_path / "bare", tmp_path / "whole"
    for folder in (bare, whole):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (whole / "tokenizer.json").write_text("{}")
    needed = {
        name: built_in_ready._is_needed(_target(tmp_path, name), shapes_only=shapes)
        for name in ("smollm2", "llava-8b-shape", str(bare), str(whole), "owner/name")
    }
    assert needed == {
        "smollm2": True,
        "llava-8b-shape": True,
        str(bare): shapes,
        str(whole): False,
        "owner/name": False,
    }
    assert not built_in_ready._is_needed(Target(("train.py", "run.yaml"), "train.py"), shapes_only=shapes)


def test_one_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    made: list[list[str]] = []
    monkeypatch.setattr(built_in_ready.subprocess, "run", lambda words, **_: made.append(words))
    assert not builtin.is_there()
    built_in_ready.make(_target(tmp_path, "smollm2"), shapes_only=True)
    assert len(made) == 1
    kept = tmp_path / "cache" / "models" / "smollm2-135m-instruct-2"
    kept.mkdir(parents=True)
    (kept / builtin.WEIGHTS).write_bytes(b"")
    built_in_ready.make(_target(tmp_path, "smollm2"), shapes_only=True)
    assert len(made) == 1
