"""Runs a completion's code against unit tests in two processes, with limits of time, memory, files and network.

The code runs in one process, the tests in another, which asks the first for what the tests use of it. So nothing that
the code does where it runs makes a pass: leaving early, printing, changing built-ins, or a search for a secret in its
memory. There is none, nor the text of a test; all it can give is answers to what a test asks, as plain data.

What remains: a test believes the completion's answers (see docs/grpo.md), and the processes cannot outlive their time,
use more memory than they were given, write large files, start processes (unless they are root), or reach a network
(where the kernel gives a user a network namespace). They see an empty folder and none of our variables, but they can
read what their user can read. It is a fence against accidents and cheating, not against an attack on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CHILD = str(Path(__file__).with_name("sandbox_child.py"))


@dataclass(frozen=True)
class Limits:
    """What one completion's tests may use."""

    seconds: float = 5.0
    megabytes: int = 512


def share_passed(jobs: Sequence[tuple[str, Any]], limits: Limits) -> list[float]:
    """For each pair of code and tests, the share of tests that passed: of a list each counts, a text is one."""
    with ThreadPoolExecutor(max_workers=max(1, min(len(jobs), os.cpu_count() or 1))) as pool:
        return list(pool.map(lambda job: run_tests(job[0], job[1], limits)[0], jobs))


def run_tests(code: str, tests: Any, limits: Limits) -> tuple[float, bool]:
    """The share of tests that passed, and whether the network was out of reach."""
    tests = [tests] if isinstance(tests, str) else [str(test) for test in tests]
    if not tests:
        raise ValueError("no tests to run: the column is empty")
    word = secrets.token_hex(16)
    job = json.dumps({"code": code, "tests": tests, "word": word}).encode()
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory(prefix="trimtab-tests-") as folder, ours, theirs:
        judge = _start("judge", ours, limits, folder)
        worker = _start("worker", theirs, limits, folder)
        ours.close()
        theirs.close()
        try:
            output, _ = judge.communicate(job, timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            # Tests that passed before the time was up do not count: the answer has to end by itself.
            return 0.0, False
        finally:
            _end(worker)
            _end(judge)
    try:
        verdict = json.loads(output)
    except ValueError:
        return 0.0, False  # a test took more memory than there is, or ended its process
    if verdict["word"] != word:
        raise RuntimeError("a verdict that is not of this run")
    if verdict["unsupported"]:
        raise ValueError(verdict["unsupported"])
    return sum(verdict["passed"]) / len(tests), verdict["isolated"]


def _start(role: str, wire: socket.socket, limits: Limits, folder: str) -> subprocess.Popen[bytes]:
    numbers = [str(wire.fileno()), str(limits.megabytes), str(limits.seconds)]
    judge = role == "judge"
    return subprocess.Popen(
        [sys.executable, "-I", _CHILD, role, *numbers],
        stdin=subprocess.PIPE if judge else subprocess.DEVNULL,
        stdout=subprocess.PIPE if judge else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[wire.fileno()],
        cwd=folder,
        env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
        start_new_session=True,
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started."""
    if child.returncode is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def network_is_cut() -> bool:
    """Whether this machine lets the tests be cut off from the network."""
    return run_tests("", "pass", Limits())[1]
