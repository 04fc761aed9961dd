"""Several machines: one torchrun on each, here two of them on loopback, as docs/multi-node.md starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from trimtab.config import load_config
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 280


@pytest.fixture
def settings(tiny_model: Path, tiny_rows: Path) -> list[str]:
    return [
        *(f"model={tiny_model}", f"data={tiny_rows}", "device=cpu", "monitor.progress=plain"),
        *("training.max_steps=3", "training.learning_rate=0.01", "training.keep_best=false"),
    ]


class Machines:
    """Two torchrun agents that know each other by an address alone."""

    def __init__(self, how: str, each: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meeting = {
            "static": ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}"],
            "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two"],
        }
        self._how = [*meeting[how], "--local-addr=127.0.0.1", "--nnodes=2", f"--nproc-per-node={each}"]
        self.agents: list[psutil.Popen] = []

    def start(self, node: int, folder: Path, *settings: str) -> psutil.Popen:
        """`torchrun … -m trimtab train …` on machine number `node`; what it says goes to a file beside the folder."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", *self._how, f"--node-rank={node}"]
        said, config = folder.parent / f"said-{node}.txt", folder.parent / "plain.yaml"
        config.write_text("recipe: sft\n")
        with said.open("w") as file:
            agent = psutil.Popen(
                [*torchrun, "-m", "trimtab", "train", str(config), *settings, f"output_dir={folder}"],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self.agents.append(agent)
        return agent

    def end(self) -> None:
        for agent in self.agents:
            for process in [*agent.children(recursive=True), agent] if agent.is_running() else []:
                process.kill()
            agent.wait()


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    made = Machines(*request.param)
    yield made
    made.end()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["phase"] == "train"]


def alone(settings: list[str], folder: Path, rows: int) -> Path:
    config = load_config(None, [*settings, f"output_dir={folder}", f"training.batch_size={rows}"])
    run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda text: None)
    return folder


@pytest.mark.parametrize("machines", [("static", 2), ("c10d", 1)], indirect=True, ids=["static", "c10d"])
def test_two_machines_train_as_one_process(
    machines: Machines, settings: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world = 2 * request.node.callspec.params["machines"][1]
    folder = tmp_path / "run"
    own = [f"training.batch_size={8 // world}", "training.effective_batch_size=8"]
    agents = [machines.start(node, folder, *settings, *own) for node in range(2)]
    told = [agent.wait(SECONDS) for agent in agents]
    said = [(tmp_path / f"said-{node}.txt").read_text() for node in range(2)]
    assert told == [0, 0], said

    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["strategy"], plan["processes"], plan["launcher"]) == ("data_parallel", world, "torchrun")
    assert losses(folder) == pytest.approx(losses(alone(settings, tmp_path / "alone", 8)), abs=1e-4)
    # Which agent has rank 0 is the rendezvous's to say; only there anything is said.
    speaks = [text for text in said if "trimtab train" in text]
    assert len(speaks) == 1
    assert f"{8 // world} × {world} × 1 = 8" in speaks[0]
    assert speaks[0].count("kept in") == 1
    quiet = next(text for text in said if text is not speaks[0])
    assert "step" not in quiet, quiet


@pytest.mark.parametrize("machines", [("static", 1)], indirect=True, ids=["static"])
def test_machines_without_a_common_disk(machines: Machines, settings: list[str], tmp_path: Path) -> None:
    """Each has an output_dir of its own: the run is kept on the machine of rank 0, and the other keeps no run."""
    folders = [tmp_path / f"machine{node}" / "run" for node in range(2)]
    for folder in folders:
        folder.parent.mkdir()
    more = ["training.batch_size=4", "training.save_steps=2", "training.eval_steps=2"]
    more += ["training.keep_best=true"]
    agents = [machines.start(node, folder, *settings, *more) for node, folder in enumerate(folders)]
    told = [agent.wait(SECONDS) for agent in agents]
    said = [(folder.parent / f"said-{node}.txt").read_text() for node, folder in enumerate(folders)]
    assert told == [0, 0], said
    assert json.loads((folders[0] / "summary.json").read_text())["status"] == "finished"
    assert load_file(folders[0] / "adapter" / "adapter_model.safetensors")
    beside = {path.name for path in folders[1].rglob("*") if path.is_file()}
    assert beside <= {"rng_state_1.pth"}, beside


@pytest.mark.parametrize("machines", [("static", 1)], indirect=True, ids=["static"])
def test_a_machine_that_is_lost_ends_the_run_on_the_other(
    machines: Machines, settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    more = ["training.batch_size=4", "training.max_steps=100000"]
    agents = [machines.start(node, folder, *settings, *more) for node in range(2)]
    until = time.monotonic() + SECONDS
    while not ((folder / "metrics.jsonl").is_file() and losses(folder)):
        assert all(agent.poll() is None for agent in agents), "an agent ended before the first step"
        assert time.monotonic() < until, "no step was made"
        time.sleep(0.5)
    for process in [*agents[1].children(recursive=True), agents[1]]:
        process.send_signal(signal.SIGKILL)
    assert agents[0].wait(SECONDS) == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed", summary
    assert summary["rank"] == 0
