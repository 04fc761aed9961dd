"""Runs that are killed and resumed until they are done, and what must be true of them then."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.manifest import verify
from trimtab.recipes.checkpoints import by_step
from trimtab.recipes.unsealed import check_safetensors

HERE = Path(__file__).parent
KILLED = (-9, -25)
"""By SIGKILL, or by the kernel in the middle of a write."""


class Warm:
    """A process that starts runs at once (warm.py)."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._runs = logs, 0
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "warm.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(logs / "warm.txt").open("w"),
            text=True,
            env=environment,
            cwd=logs,
        )
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self._logs / "warm.txt").read_text()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def train(self, words: list[str], folder: Path, **kill: float | None) -> Ended:
        """`trimtab train` in a child, with its output; `at`, `torn`, `after` say when it dies."""
        self._runs += 1
        log = self._logs / f"{self._runs:04}.txt"
        job = {"words": ["train", *words], "folder": str(folder), "output": str(log), **kill}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Ended(
            answer["ended"], answer["operations"], answer["seconds"], log.read_text(errors="replace")
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, or minus the signal."""

    code: int
    operations: int | None
    seconds: float
    output: str

    @property
    def killed(self) -> bool:
        return self.code in KILLED


@dataclass
class Tally:
    """What a series of kills came to."""

    kills: int = 0
    torn: int = 0
    resumed: int = 0
    afresh: int = 0


def killed_until_done(
    warm: Warm, words: list[str], folder: Path, whole: Ended, kills: int, dice: random.Random, tally: Tally
) -> None:
    """The run is killed so many times, at random times and inside random writes, and each time goes on."""
    assert whole.operations is not None
    words = [*words, f"output_dir={folder}"]
    for number in range(kills + 1):
        how: dict[str, float | None] = {}
        if number < kills:
            # What is left of the run is shorter than the whole of it: aim at its first part, so that most kills hit.
            if dice.random() < 0.5:
                how = {"at": dice.randint(1, max(2, whole.operations // 2))}
                if dice.random() < 0.5:
                    how["torn"] = dice.choice((1, 100, 1000, 5000, 20_000))
            else:
                how = {"after": dice.uniform(0.2, 1.0) * whole.seconds}
        has_begun, resumable = (folder / ".trimtab-run.json").exists(), bool(by_step(folder / "checkpoints"))
        more = ["training.resume=true"] if resumable else ["overwrite=true"] if has_begun else []
        ended = warm.train([*words, *more], folder, **how)
        tally.resumed += resumable
        tally.afresh += has_begun and not resumable
        if "torn" in how and ended.code == 2 and "ulimit -f" in ended.output:
            continue  # a limit so low is seen before anything is written
        assert ended.killed or ended.code == 0, f"{ended.code} {how}: {ended.output[-3000:]}"
        if ended.killed:
            tally.kills += 1
            tally.torn += ended.code == -25
            no_rubbish(folder)
        else:
            return
    raise AssertionError(f"killed in its last turn, in which it was left alone: {ended.output[-2000:]}")


def no_rubbish(folder: Path) -> None:
    """Whatever has its final name is whole: right after a kill, before anything was mended."""
    for checkpoint in by_step(folder / "checkpoints").values():
        verify(checkpoint, beside=folder)
    for kept in (folder / "adapter", folder / "model"):
        if kept.is_dir():
            verify(kept)
    for file in folder.rglob("*"):
        if not file.is_file() or any(part.endswith((".partial", ".old")) for part in file.parts):
            continue
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            check_safetensors(file)


def weights(run: Path) -> dict[str, bytes]:
    """Every weights file that the run kept, byte by byte."""
    return {
        f"{name}/{file.name}": file.read_bytes()
        for name in ("adapter", "model")
        for file in sorted((run / name).glob("*.safetensors"))
    }


def steps(run: Path, phase: str) -> list[tuple[int, dict[str, Any]]]:
    """What was measured in each step, but for times and speeds."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [
        (line["step"], {k: line[k] for k in ("loss", "grad_norm", "learning_rate", "eval_loss") if k in line})
        for line in lines
        if line["phase"] == phase
    ]


def names(run: Path) -> set[str]:
    """All files of a finished run. What was moved aside, when it was killed before its first checkpoint, is extra."""
    found = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    return {str(path) for path in found if not path.parts[0].startswith("replaced-")}


def same_run(run: Path, plain: Path) -> None:
    """Nothing tells the killed run from the one that was left alone."""
    assert weights(run), run
    assert weights(run) == weights(plain)
    for phase in ("train", "eval"):
        assert steps(run, phase) == steps(plain, phase), phase
    assert names(run) == names(plain)
    no_rubbish(run)
