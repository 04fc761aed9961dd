"""One short run of `trimtab train` in a process of its own, for `bench train`: its log kept, its steps told.

It reads no figures and decides nothing about them; how the run ended badly is an error in the run's own words.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.reading import parse_json

Step = Callable[[int, Mapping[str, Any]], None]
"""Told how many steps are done, with the last one's line of metrics."""
LOOK_SECONDS = 0.5
GRACE_SECONDS = 20.0
"""For a run that is told to end, before it is ended."""


def run_training(words: list[str], folder: Path, step: Step) -> None:
    """Run it to its end. Interrupted, the run is ended first."""
    log = folder / "log.txt"
    with log.open("wb") as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "trimtab", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=told,
            stderr=subprocess.STDOUT,
        )
        try:
            _watch(process, folder / "run" / "metrics.jsonl", step)
        finally:
            _end(process)
    if process.returncode:
        raise TrimtabError(failure(process.returncode, log.read_text(encoding="utf-8", errors="replace")))


def failure(code: int, log: str) -> str:
    """Why a run ended with this code, from its last words."""
    if code == -signal.SIGKILL:
        return "the process was killed, most likely by the system for want of memory"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # An error of ours has three parts, of which the last two say what they are.
    first = next(
        (n for n, line in enumerate(lines) if line.startswith(("trimtab: ", "error: "))), len(lines) - 4
    )
    return " ".join(lines[max(0, first) :])[-600:] or f"it ended with {code} and said nothing"


def _watch(process: subprocess.Popen[bytes], metrics: Path, step: Step) -> None:
    done, read, half = 0, 0, b""
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_SECONDS)
        if not metrics.is_file():
            continue
        with metrics.open("rb") as file:
            file.seek(read)
            fresh = file.read()
        read += len(fresh)
        *lines, half = (half + fresh).split(b"\n")
        for line in map(parse_json, lines):
            if line["phase"] == "train":
                done += 1
                step(done, line)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
