"""The zeroth-order recipe and `trimtab replay` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trimtab.cli import app
from trimtab.errors import RequestError

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def test_help_of_replay_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from trimtab.cli import app\n"
        "try:\n"
        "    app(['replay', '--help'])\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "RUN_OR_FILE" in done.stdout


def in_a_process(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Nothing but the files is left of the run."""
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *words],
        capture_output=True,
        text=True,
        timeout=290,
        cwd=cwd,
        check=False,
    )


SHORTER = [
    *("data.max_rows=32", "training.batch_size=2", "training.max_steps=4", "training.eval_steps=4"),
    *("zeroth.interval=2", "zeroth.projection_iterations=1"),
]


@pytest.mark.parametrize(
    "less",
    [pytest.param([], id="as it stands", marks=[pytest.mark.slow, pytest.mark.timeout(900)]), SHORTER],
)
def test_the_example_runs_and_its_replay_is_the_same_to_the_bit(
    trimtab: Trimtab, repository: Path, tmp_path: Path, less: list[str]
) -> None:
    """examples/zeroth-order.yaml on the built-in model; then its weights again, from its losses."""
    done = trimtab("train", str(repository / "examples" / "zeroth-order.yaml"), *less, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "example-zeroth"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["projected_tensors"] == 120
    assert less or summary["eval_loss"]["after"] < summary["eval_loss"]["before"]
    assert "zeroth.eps 0.01: usual for MeZO over a LoRA adapter" in done.stdout
    assert "projection: 120 tensors (query, value)" in done.stdout
    assert "accuracy" in done.stdout
    checked = (trimtab if less else in_a_process)("replay", "runs/example-zeroth", "--check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "all 240 tensors equal the kept ones, bit for bit" in checked.stdout


def in_process(*arguments: str) -> Result:
    """The same verbs without a new interpreter; a foreseen error is in `exception`, as `main` would print it."""
    return CliRunner().invoke(app, list(arguments))


def test_what_cannot_be_replayed_says_why(trimtab: Trimtab, tmp_path: Path) -> None:
    (tmp_path / "noise.bin").write_bytes(b"\x00\x01" * 40)
    done = trimtab("replay", str(tmp_path / "noise.bin"))
    assert done.returncode == 2
    assert "is no trajectory" in done.stderr
    assert "Traceback" not in done.stderr
    assert isinstance(in_process("replay", str(tmp_path / "nothing.bin")).exception, RequestError)


def test_a_replay_that_differs_is_a_fault(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"film {n}", "label": n % 2} for n in range(12)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("run.yaml").write_text(
        f"recipe: zeroth-order\nmodel: {tiny_model}\ndata: rows.jsonl\ndevice: cpu\noutput_dir: run\n"
        'zeroth: {method: mezo, template: "{text} was", labels: {0: " bad", 1: " good"}}\n'
        "training: {max_steps: 2, batch_size: 4, learning_rate: 0.01}\n"
    )
    done = in_process("train", "run.yaml")
    assert done.exit_code == 0, done.output
    same = in_process("replay", "run", "--check")
    assert (same.exit_code, "bit for bit" in same.output) == (0, True)
    differs = in_process("replay", "run", "--check", "--steps", "1")
    assert (differs.exit_code, "differ from the kept ones" in differs.output) == (1, True)
    assert isinstance(in_process("replay", "run", "--steps", "9").exception, RequestError)
    assert in_process("replay", "run").exit_code == 0
    assert Path("run/replayed/adapter_model.safetensors").is_file()
    # A folder that holds something is not written into.
    assert isinstance(in_process("replay", "run").exception, RequestError)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_plan_knows_that_there_are_no_gradients(trimtab: Trimtab, method: str) -> None:
    shown = json.loads(
        trimtab(
            "plan",
            "recipe=zeroth_order",
            "zeroth.task=sst2",
            "samples.prompts=[]",
            f"method={method}",
            "--json",
        ).stdout
    )
    share = shown["memory"]["cpu"]
    assert share["gradients"] == 0
    assert shown["scaler"] is False
