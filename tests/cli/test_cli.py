"""The command line as a user meets it: exit codes, messages, and nothing slow before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def start(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env=os.environ,
        check=False,
    )


@pytest.mark.parametrize("verb", ["", "train", "plan", "export", "doctor", "config-schema"])
def test_help_needs_no_torch(verb: str) -> None:
    code = (
        "import sys\n"
        "from trimtab.cli import app\n"
        "try:\n"
        f"    app({[verb, '--help'] if verb else ['--help']!r})\n"
        "except SystemExit as done:\n"
        "    assert not done.code, done.code\n"
        "heavy = [m for m in ('torch', 'transformers', 'datasets', 'trl', 'peft') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_version() -> None:
    import trimtab as package

    assert start("--version").stdout.strip() == f"trimtab {package.__version__}"


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_device_that_is_not_there_exits_2_without_importing_torch(verb: str) -> None:
    from trimtab.hardware import probe

    if probe().gpus:
        pytest.skip("there is a CUDA device here")
    done = start(verb, "device=cuda")
    assert done.returncode == 2
    text = done.stdout + done.stderr
    assert "device=cuda: there is no CUDA device here" in text
    assert "change: set device=auto or device=cpu" in text
    assert "Traceback" not in text


def test_five_mistakes_are_five_errors(trimtab: Trimtab, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "device: gpu\nmethod: qlora\ntraining:\n  learning_rate: fast\n  batch_size: 0\n  batchsize: 4\n"
    )
    done = trimtab("train", str(config))
    assert done.returncode == 2
    assert "5 problems in" in done.stderr
    for key in ("device", "method", "training.learning_rate", "training.batch_size", "training.batchsize"):
        assert key in done.stderr


def test_stale_rank_variables_are_ignored_and_said(trimtab: Trimtab) -> None:
    done = trimtab("plan", RANK="0", WORLD_SIZE="4", MASTER_ADDR="10.0.0.1")
    assert done.returncode == 0, done.stderr
    assert "ignoring RANK, WORLD_SIZE, MASTER_ADDR" in done.stdout
    assert "single, 1 process" in done.stdout


def test_the_plan_of_the_tinyllama_example(trimtab: Trimtab, repository: Path) -> None:
    """The counts of a well-known run: r 32 on q, k, v and o of TinyLlama is 9,011,200 parameters, 0.81 %."""
    done = trimtab("plan", "examples/tinyllama-ollama.yaml", cwd=repository)
    assert done.returncode == 0, done.stderr
    assert "9,011,200 of 1,109,059,584 parameters are trained (0.81 %)" in done.stdout
    assert "cpu: asked for" in done.stdout
    as_json = json.loads(trimtab("plan", "examples/tinyllama-ollama.yaml", "--json", cwd=repository).stdout)
    assert as_json["device"] == "cpu"
    assert as_json["model"]["trainable"] == 9_011_200
    assert as_json["reasons"]["device"] == "asked for"


def test_the_sft_example_runs(repository: Path, tmp_path: Path) -> None:
    """examples/sft.yaml as it stands, on the built-in model."""
    done = start("train", str(repository / "examples" / "sft.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "example-sft"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"]
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert "held-out loss" in done.stdout


def test_missing_model_and_data_say_what_to_do(trimtab: Trimtab, tmp_path: Path) -> None:
    done = trimtab("train", "model=./no-such-model", f"output_dir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "model.name=./no-such-model: no such folder" in done.stderr
    assert not (tmp_path / "run").exists()
