"""Runs a completion's code against unit tests in a process of its own, with limits of time, memory, files and network.

The child cannot outlive its time, use more memory than it was given, write large files, start processes (unless it is
root), or reach a network (where the kernel gives a user a network namespace). It sees an empty folder and none of our
variables. It is a fence against accidents and lazy cheating, not against somebody who attacks the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """What one completion's tests may use."""

    seconds: float = 5.0
    megabytes: int = 512


# Read by `python -I -c`. The word at the end of a passed test is made for one run: code that leaves early, or prints
# what it likes, does not know it.
_CHILD = """
import json, os, sys
job = json.loads(sys.stdin.read())
try:
    import ctypes
    isolated = ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x40000000) == 0
except (OSError, AttributeError):
    isolated = False
import resource
def limit(what, value):
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
limit(resource.RLIMIT_CPU, int(job["seconds"]) + 1)
limit(resource.RLIMIT_FSIZE, 2**20)
limit(resource.RLIMIT_CORE, 0)
limit(resource.RLIMIT_NOFILE, 64)
if sys.platform != "darwin":
    limit(resource.RLIMIT_AS, job["bytes"])
answers = os.dup(1)
quiet = os.open(os.devnull, os.O_WRONLY)
os.dup2(quiet, 1)
os.dup2(quiet, 2)
limit(resource.RLIMIT_NPROC, 0)
def say(word):
    os.write(answers, (word + "\\n").encode())
say("network off" if isolated else "network on")
def run(job, say):
    word, tests = job["word"], job["tests"]
    space = {"__name__": "__main__"}
    exec(compile(job["code"], "<completion>", "exec"), space)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, "<test>", "exec"), dict(space))
        except Exception:
            continue
        say(word + str(number))
run(job, say)
"""


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
    job = {"code": code, "tests": tests, "word": word, "seconds": limits.seconds}
    job["bytes"] = limits.megabytes * MEBIBYTE
    with tempfile.TemporaryDirectory(prefix="trimtab-tests-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(json.dumps(job).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            _end(child)
            # Tests that passed before the time was up do not count: the answer has to end by itself.
            return 0.0, False
        finally:
            _end(child)
    said = set(output.decode(errors="replace").split("\n"))
    passed = sum(f"{word}{number}" in said for number in range(len(tests)))
    return passed / len(tests), "network off" in said


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def network_is_cut() -> bool:
    """Whether this machine lets the tests be cut off from the network."""
    return run_tests("", "pass", Limits())[1]
