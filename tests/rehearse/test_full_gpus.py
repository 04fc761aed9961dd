"""A full GPU: a program that handles it and then runs within the memory is right; one that ends there is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_gpus import ENDS, GOES_ON, HEAD

Rehearse = Callable[..., dict[str, Any]]
SETTINGS = {"gpus": 1, "shapes_only": True, "memory_bytes": 3 << 30}


def written(folder: Path, name: str, programs: dict[str, str]) -> Path:
    """Each under a name of its own: the process that stays warm remembers what it has read."""
    path = folder / f"{''.join(filter(str.isalpha, name))}.py"
    path.write_text(HEAD + programs[name])
    return path


@pytest.mark.parametrize("name", GOES_ON)
def test_a_full_gpu_that_the_program_handles(ask: Rehearse, tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, GOES_ON)
    report = ask(str(path), ranks=None, timeout=120, settings=SETTINGS)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]
    assert report["memory"]["cuda:0"]["peak_bytes"] < 3 << 30
    assert any("is full at" in note and "catches that" in note for note in report["notes"])


@pytest.mark.parametrize("name", ENDS)
def test_a_full_gpu_that_ends_the_program(ask: Rehearse, tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, ENDS)
    report = ask(str(path), ranks=None, timeout=120, settings=SETTINGS)
    (finding,) = report["findings"]
    assert (report["verdict"], finding["kind"]) == ("fault", "out-of-memory"), report["text"]
    assert finding["lack"]["short_bytes"] > 0, finding["lack"]
    assert not any("goes on" in note for note in report["notes"])


AGAIN = """
def careful(rows):
    x = torch.randn(rows, 4096, device="cuda")
    hidden = net(x)
    hidden.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(2):
    try:
        careful(1 << 16)
    except torch.OutOfMemoryError:
        print("full")
{}"""


def test_what_is_tried_again_inside_the_handler_stands_beside_what_failed(
    ask: Rehearse, tmp_path: Path
) -> None:
    inside, behind = (
        AGAIN.format(f"{indent}list(careful(1 << 14) for _ in range(4))\n") for indent in ("        ", "    ")
    )
    path = written(tmp_path, "inside", {"inside": inside})
    report = ask(str(path), ranks=None, timeout=120, settings=SETTINGS)
    (finding,) = report["findings"]
    assert (report["verdict"], finding["kind"]) == ("fault", "out-of-memory"), report["text"]
    assert path.read_text().splitlines()[finding["cause"]["line"] - 1].startswith("        list(careful("), (
        finding
    )
    assert "Leave the handler first" in finding["fix"]
    assert not any("goes on" in note for note in report["notes"])
    path = written(tmp_path, "behind", {"behind": behind})
    report = ask(str(path), ranks=None, timeout=120, settings=SETTINGS)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]


def test_the_cause_is_on_the_gpu_that_is_full(ask: Rehearse, tmp_path: Path) -> None:
    program = """
other = [torch.empty(1 << 28, device="cuda:1") for _ in range(2)]
mine = torch.empty(3 << 27, device="cuda:0")
more = torch.empty(3 << 28, device="cuda:0")
"""
    path = written(tmp_path, "two", {"two": program})
    report = ask(str(path), ranks=None, timeout=120, settings={**SETTINGS, "gpus": 2})
    (finding,) = report["findings"]
    assert finding["lack"]["device"] == "cuda:0"
    assert path.read_text().splitlines()[finding["cause"]["line"] - 1].startswith("mine"), finding
    assert "on cuda:0" in finding["cause"]["why"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("halves", [True, False])
def test_a_run_that_halves_its_batch_fits(rehearse: Rehearse, tmp_path: Path, halves: bool) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": "word " * 400} for n in range(32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "model": "smollm2",
        "data": {
            "source": str(tmp_path / "rows.jsonl"),
            "max_length": 256,
            "too_long": "truncate",
            "eval_fraction": 0,
        },
        "training": {"batch_size": 8, "max_steps": 3, "halve_batch_on_oom": halves},
        "samples": {"prompts": []},
        "speed": {"compile": False, "kernels": "plain"},
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    report = rehearse(
        str(tmp_path / "config.yaml"),
        gpus=1,
        shapes_only=True,
        memory_bytes=5 << 29,
        max_steps=2,
        timeout=500,
    )
    assert [finding["kind"] for finding in report["findings"]] == ([] if halves else ["out-of-memory"]), (
        report["text"]
    )
    assert any("catches that (run.py:" in note for note in report["notes"]) is halves
    # Nothing above Trimtab's own verb takes the error, so that one rehearsal tells all.
    assert report["stdout"].count("model smollm2 on cuda:0") == 1 + halves
