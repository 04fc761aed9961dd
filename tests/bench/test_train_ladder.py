"""`bench train`: rows of short real runs, what is left out, what fails, what an interruption keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.bench.ladder import PLAIN, RUNGS, start
from trimtab.bench.steady import Steps, figures_of, furthest, steps_of
from trimtab.bench.train import TrainRequest, run_train
from trimtab.bench.train_cell import failure
from trimtab.config import load_config
from trimtab.errors import TrimtabError
from trimtab.monitor.progress import make_progress

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def asked(tiny_model: Path, tmp_path: Path) -> Callable[..., TrainRequest]:
    """A request for a few steps of the tiny model on rows of several lengths."""
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n % 7 + 1)))} for n in range(24)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = [f"model={tiny_model}", f"data={rows}", "device=cpu", "training.batch_size=2"]
    words += ["data.max_length=64", "samples.held_out=3", "training.eval_steps=1"]

    def make(*rows: str, **more: Any) -> TrainRequest:
        return TrainRequest(
            config=load_config(None, words), origin="a test", steps=2, warm_up=1, rows=rows, **more
        )

    return make


@pytest.fixture
def here(trimtab: Cli) -> Callable[..., None]:
    """`trimtab train` as a row runs it, without a new interpreter."""

    def train(words: list[str], folder: Path, step: Any) -> None:
        done = trimtab("train", *words)
        (folder / "log.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            raise TrimtabError(failure(done.returncode, done.stdout + done.stderr))

    return train


def test_rows_are_runs_of_train_and_what_the_plan_leaves_is_told(
    asked: Callable[..., TrainRequest], here: Any, trimtab: Cli, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    stand, whole = run_train(asked("head", "compile"), out, make_progress("none"), here)
    assert whole
    assert not stand.failures, stand.failures
    plain, head = stand.cells
    assert [plain["row"], head["row"]] == ["plain", "head"]
    assert [row["row"] for row in stand.more["left_out"]] == ["compile"]
    assert "on the CPU by request" in stand.more["left_out"][0]["reason"]
    for cell in stand.cells:
        assert len(cell["losses"]) == 3
        assert cell["timed_steps"] == 2
        assert cell["tokens"] == plain["tokens"]
        assert cell["tokens_per_second"] > 0
        assert cell["loss_difference"] < 1e-4
    assert head["settings"] == {**plain["settings"], "speed.head": "chunked"}
    page = (out / "results.md").read_text(encoding="utf-8")
    assert "+ head in chunks" in page
    assert "compiling pays on GPUs" in page
    assert json.loads((out / "results.json").read_text(encoding="utf-8"))["cells"][1]["row"] == "head"
    assert (out / "rows/head/metrics.jsonl").is_file()
    assert not (out / "rows/head/run").exists(), "the weights of a short run are not kept"
    written = trimtab("report", str(out), "--out", str(tmp_path / "page.html"))
    assert written.returncode == 0, written.stderr
    assert "+ head in chunks" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_row_that_fails_is_told_and_an_interruption_keeps_what_is_done(
    asked: Callable[..., TrainRequest], here: Any, tmp_path: Path
) -> None:
    def train(words: list[str], folder: Path, step: Any) -> None:
        if 'speed.head="chunked"' in words:
            raise TrimtabError("no room")
        if 'speed.head="plain"' not in words:
            raise KeyboardInterrupt
        here(words, folder, step)

    out = tmp_path / "out"
    stand, whole = run_train(asked("head", "optimizer", "default"), out, make_progress("none"), train)
    assert not whole
    plain, head, optimizer = stand.cells
    assert [plain["status"], head["status"], optimizer["status"]] == ["finished", "failed", "finished"]
    assert head["reason"] == "no room"
    fused = {"training.optimizer": "adamw_torch_fused"}
    assert optimizer["settings"] == plain["settings"] | fused, (
        "the part that failed is not in the rows after it"
    )
    assert "no room" in (out / "results.md").read_text(encoding="utf-8")
    kept = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [cell["row"] for cell in kept["cells"]] == ["plain", "head", "optimizer"]
    assert kept["run"]["whole"] is False


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rows", "wings"], "the ladder has no such row"),
        (["recipe=zeroth_order", "zeroth.task=sst2", "data=sample"], "its steps have no gradients"),
        (["--steps", "2", "--learning-rate", "no"], "training.learning_rate"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(
    trimtab: Cli, tmp_path: Path, words: list[str], told: str
) -> None:
    done = trimtab("bench", "train", *words, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert told in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_row_adds_one_setting() -> None:
    assert {rung.setting for rung in RUNGS} == {*PLAIN, "training.optimizer"}
    assert all(start("adamw_torch_fused").get(rung.setting) != rung.value for rung in RUNGS)
    assert "training.optimizer" not in start("adafactor")


def test_a_run_is_timed_after_its_warm_up(tmp_path: Path) -> None:
    lines = [{"step": 0, "time": 99.0, "phase": "eval", "eval_loss": 3.0}]
    for step, at in enumerate([110.0, 111.0, 112.0, 114.0], 1):
        figures = {
            "loss": 3.0 - step / 10,
            "num_tokens": 100 * step,
            "elapsed_seconds": at - 100,
            "mfu": 0.1 * step,
        }
        lines.append({"step": step, "time": at, "phase": "train", "peak_memory_bytes": step * 10, **figures})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    steps = steps_of(tmp_path)
    assert steps.tokens == [100] * 4
    assert steps.begun == 100.0
    found = figures_of(steps, 2)
    assert found["tokens_per_second"] == pytest.approx(200 / 3)
    assert found["step_seconds"] == pytest.approx(1.5)
    assert found["warm_up_seconds"] == pytest.approx(11 - 2 * 1.5)
    assert found["peak_bytes"] == 40
    assert found["mfu"] == pytest.approx(0.35)
    assert found["last_loss"] == pytest.approx(2.75)
    with pytest.raises(TrimtabError, match="one step"):
        figures_of(Steps(begun=0.0, times=[1.0], losses=[1.0], tokens=None, peak=None), 1)


def test_curves_are_compared_where_both_have_a_loss() -> None:
    assert furthest([1.0, None, 2.2], [1.0, 5.0, 2.0, 9.0]) == pytest.approx(0.1)
    assert furthest([None], [1.0]) is None


@pytest.mark.slow
def test_the_whole_ladder_by_the_command(
    trimtab: Cli, asked: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    config = asked().config
    words = [f"model={config.model.name}", f"data={config.data.source}", "device=cpu", "batch_size=2"]
    done = trimtab(
        "bench", "train", *words, "--steps=2", "--warm-up", "1", "--json", "--out", str(tmp_path / "o")
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["run"]["whole"]
    assert len(found["cells"]) + len(found["left_out"]) == 2 + len(RUNGS)
    assert all(cell["loss_difference"] < 1e-4 for cell in found["cells"])


@pytest.mark.slow
def test_the_benchmark_with_peers_runs_on_the_cpu(repository: Path, tmp_path: Path) -> None:
    """HF Trainer + PEFT, TRL and `trimtab train` train on the same rows from the same adapter: one loss curve."""
    rows = [
        {"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n % 9)))} for n in range(1, 80)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    cells = "8B/hf,8B/trl,8B/trimtab,alpaca/hf,alpaca/trimtab"
    options = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "found")]
    options += ["--cells", cells, "--steps", "6", "--warm-up", "2", "--alpaca", str(tmp_path / "rows.json")]
    script = repository / "benchmarks" / "sft_speed.py"
    done = subprocess.run(
        [sys.executable, str(script), "--tiny", "--device", "cpu", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["cells"]
    beside = [cell for cell in found if cell["cell"] != "hf"]
    assert [cell["cell"] for cell in beside] == ["trl", "trimtab", "trimtab"]
    for cell in beside:
        assert cell["same_rows"], cell["cell"]
        assert cell["curve_difference"] < 1e-4, cell["cell"]
