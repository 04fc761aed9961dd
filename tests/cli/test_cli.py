"""The command line as a user meets it: exit codes, messages, and nothing slow before it is needed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def start(*arguments: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=os.environ,
        check=False,
    )


@pytest.mark.parametrize("verb", ["", "train", "plan", "fit", "export", "doctor", "config-schema"])
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


def test_a_long_setting_is_not_taken_for_a_file() -> None:
    """The first word may be a config or a setting; file systems refuse to look for names this long."""
    from trimtab.cli.arguments import config_from

    prompt = "why " * 200
    request = config_from([f"samples.prompts=[{prompt}]"])
    config = request.config
    assert request.origin == "the built-in quick start"
    assert config.samples.prompts == [prompt.strip()]


def test_without_a_file_another_recipe_stands_on_its_own_defaults() -> None:
    from trimtab.cli.arguments import config_from

    request = config_from(["recipe=grpo", "data=sums.jsonl", "reward=answer"])
    config = request.config
    assert (config.recipe, config.data.source, request.origin) == ("grpo", "sums.jsonl", "the command line")
    assert config.training.batch_size == 8  # the quick start's would not fit the generations
    assert config.lora.r == 16
    assert {default.key for default in request.defaults} >= {"training.batch_size", "grpo.system"}


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


SHORTER = [
    *("data.max_rows=20", "data.max_length=128", "training.batch_size=1", "training.max_steps=3"),
    "samples.max_new_tokens=4",
]


@pytest.mark.parametrize(
    "less",
    [pytest.param([], id="as it stands", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]), SHORTER],
)
def test_the_sft_example_runs(trimtab: Trimtab, repository: Path, tmp_path: Path, less: list[str]) -> None:
    """examples/sft.yaml on the built-in model."""
    done = trimtab("train", str(repository / "examples" / "sft.yaml"), *less, cwd=tmp_path)
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


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_rehearsal_whose_report_has_no_folder_is_not_begun(
    trimtab: Trimtab, tmp_path: Path, option: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = trimtab("rehearse", option, str(tmp_path / "nothing" / "report"), str(script))
    assert done.returncode == 2
    assert f"there is no folder {tmp_path / 'nothing'}" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_two_reports_of_a_rehearsal_are_not_written_to_one_file(trimtab: Trimtab, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = trimtab("rehearse", "--json", "report", "--html", "./report", str(script), cwd=tmp_path)
    assert done.returncode == 2
    assert "--html report: --json writes the same file" in done.stderr
    assert not (tmp_path / "ran").exists()


def run_doctor(tmp_path: Path, *lines: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`trimtab doctor` in a process of its own, in which these lines stand in for looking at the machine."""
    script = tmp_path / "look.py"
    body = "".join(f"    {line}\n" for line in lines)
    script.write_text(
        "import sys\n"
        "import trimtab.hardware.doctor as room\n"
        "from trimtab.cli import main\n"
        f"def look(*_):\n{body}"
        "room.examine = look\n"
        "sys.argv = ['trimtab', 'doctor']\n"
        "main()\n",
        encoding="utf-8",
    )
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | env,
        check=False,
    )


def test_an_unforeseen_error_keeps_its_traceback_on_request_and_shows_no_secret(tmp_path: Path) -> None:
    key, word = "hf_" + "aB3dE" * 7, "pa/ss@word"
    lines = (
        f"try: raise OSError('GET https://me:{word}@host/a?X-Amz-Signature=hush&n=1')",
        f"except OSError as cause: raise ValueError('sent {key}') from cause",
    )
    short = run_doctor(tmp_path, *lines)
    assert short.returncode == 1
    assert "Traceback" not in short.stderr
    assert short.stderr.startswith("error: ValueError: sent (not shown)\n")
    assert 'look.py", line 6, in look' in short.stderr
    done = run_doctor(tmp_path, *lines, TRIMTAB_DEBUG="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    for part in ('look.py", line 5, in look', 'look.py", line 6, in look', "the direct cause of"):
        assert part in done.stderr
    assert "OSError: GET https://(not shown)@host/a?X-Amz-Signature=(not shown)&n=1\n" in done.stderr
    assert done.stderr.endswith("\nValueError: sent (not shown)\n")
    for secret in (key, word, "ss@word", "hush"):
        assert secret not in done.stderr + done.stdout


def test_a_foreseen_error_shows_neither_traceback_nor_secret(tmp_path: Path) -> None:
    done = run_doctor(
        tmp_path,
        "from trimtab.errors import RequestError",
        "raise RequestError('no answer from https://me:word@host')",
    )
    assert done.returncode == 2
    assert done.stderr == "error: no answer from https://(not shown)@host\n"


def test_an_encoding_without_our_marks_ends_no_run(tmp_path: Path) -> None:
    """A file on Windows has no ✓ in its encoding."""
    done = run_doctor(tmp_path, "print('\u2713 fine')", "raise SystemExit(0)", PYTHONIOENCODING="cp1252")
    assert (done.returncode, done.stdout, done.stderr) == (0, "? fine\n", "")


def hears(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, by the kernel's word."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="signal masks are read from /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_train_is_told_reaches_the_processes_that_it_started(tmp_path: Path, number: int) -> None:
    """Told to end, `trimtab train` ends its torchrun too, which else would go on and keep the GPUs."""
    (tmp_path / "launcher.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def told(number, frame):\n"
        "    pathlib.Path('told').write_text(str(number))\n"
        "    sys.exit(3)\n"
        f"signal.signal({int(number)}, told)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "start.py").write_text(
        "import os, sys\n"
        "from trimtab.recipes.launch import wait_for\n"
        "sys.exit(wait_for([sys.executable, 'launcher.py'], dict(os.environ)))\n"
    )
    # In a background job SIGINT is ignored from the start, and what is ignored stays so.
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)
    started = subprocess.Popen([sys.executable, "start.py"], cwd=tmp_path, preexec_fn=heard)
    try:
        # Set after ours for SIGINT, for which Python has a handler of its own from the start.
        while not ((tmp_path / "ready").exists() and hears(started.pid, signal.SIGTERM)):
            assert started.poll() is None
            time.sleep(0.02)
        started.send_signal(number)
        assert started.wait(200) == 3
        assert (tmp_path / "told").read_text() == str(int(number))
    finally:
        started.kill()
        started.wait()
