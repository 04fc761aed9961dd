"""Runs a completion's code against unit tests in two processes, with limits of time, memory, files and network.

The code runs in one process, the tests in another, which asks the first for what the tests use of it. So nothing that
the code does where it runs makes a pass: leaving early, printing, changing built-ins, or a search for a secret in its
memory. There is none, nor the text of a test; all it can give is answers to what a test asks, and what decides a test
is plain data among them, which the tests' process compares itself.

Both processes stand behind a fence (sandbox_child/fence.py): a root with the interpreter's files and an empty folder,
Landlock, a list of the calls to the kernel that they may make, and limits of time, memory, threads and sizes. What of
it a machine gives is found out before training by trying (promises.py), and said. It is a fence against cheating and
against code that looks around; a fault in the kernel itself is beyond it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.errors import RequestError

# The child's parts import each other by their own package, not as a part of Trimtab: see sandbox_child.
_START = "import sys; sys.path.insert(0, sys.argv[1]); from sandbox_child.nursery import main; main()"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


@dataclass(frozen=True)
class Limits:
    """What one completion's tests may use."""

    seconds: float = 5.0
    megabytes: int = 512


def share_passed(jobs: Sequence[tuple[str, Any]], limits: Limits) -> list[float]:
    """For each pair of code and tests, the share of tests that passed: of a list each counts, a text is one."""
    with Sandbox(limits) as sandbox, ThreadPoolExecutor(max_workers=_at_once(len(jobs))) as pool:
        return list(pool.map(lambda job: sandbox.run(*job)[0], jobs))


def run_tests(code: str, tests: Any, limits: Limits) -> tuple[float, bool]:
    """The share of tests that passed, and whether the network was out of reach."""
    with Sandbox(limits) as sandbox:
        return sandbox.run(code, tests)


def network_is_cut() -> bool:
    """Whether this machine lets the tests be cut off from the network."""
    return run_tests("", "pass", Limits())[1]


def cannot_run() -> str:
    """Why there is no sandbox at all on this system; empty where there is one."""
    if os.name == "posix":
        return ""
    return f"it forks processes and hands sockets to them, which {sys.platform} does not do"


class Sandbox:
    """An interpreter that was started once and forks for each job. Threads may share one."""

    def __init__(self, limits: Limits) -> None:
        if why := cannot_run():
            raise RequestError.of(
                "grpo.reward=code: completions' code is to be run",
                why,
                "run it on Linux or macOS (also: WSL, a container)",
            )
        self._turn = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-tests-", ignore_cleanup_errors=True)
        self._control, theirs = socket.socketpair()
        with theirs:
            # Where there are namespaces, jobs have this folder for a root, and elsewhere folders below it.
            os.chmod(self._folder.name, 0o711)
            numbers = [str(theirs.fileno()), str(limits.megabytes), str(limits.seconds), self._folder.name]
            self._nursery = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(Path(__file__).parent), *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Memory is counted by addresses, and libc would set many aside for each thread.
                env={"PATH": os.defpath, "MALLOC_ARENA_MAX": "1", **_ONE_THREAD},
                start_new_session=True,
            )

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._control.close()  # which ends the nursery, as soon as nothing runs any more
        self._nursery.wait()
        self._folder.cleanup()

    @property
    def folder(self) -> str:
        """Where jobs' folders are, as far as they are on a disk."""
        return self._folder.name

    def run(self, code: str, tests: Any) -> tuple[float, bool]:
        """The share of tests that passed, and whether the network was out of reach."""
        tests = [tests] if isinstance(tests, str) else [str(test) for test in tests]
        if not tests:
            raise ValueError("no tests to run: the column is empty")
        folder = tempfile.mkdtemp(dir=self._folder.name)
        started = output = b""
        ours, theirs = socket.socketpair()
        # Whatever ends before it has read or said all is told below, by what is missing.
        with ours, contextlib.suppress(ConnectionError):
            with theirs, self._turn:
                socket.send_fds(self._control, [folder.encode()], [theirs.fileno()])
                self._control.recv(1)  # it has a copy now
            with ours.makefile("rwb") as stream:
                stream.write(json.dumps({"code": code, "tests": tests}).encode() + b"\n")
                stream.flush()
                started = stream.readline()
                output = stream.readline()
        shutil.rmtree(folder, ignore_errors=True)  # what is still being written to goes with the whole
        if not started:
            raise RuntimeError(
                f"the sandbox did not start: {sys.executable} ended before the first test, most likely because this "
                "user or this container may start no more processes"
            )
        if not output.endswith(b"\n"):
            # The time was up, or a test took more memory than there is. Tests that passed before do not count: the
            # answer has to end by itself.
            return 0.0, False
        verdict = json.loads(output)
        if verdict["unsupported"]:
            raise ValueError(verdict["unsupported"])
        return sum(verdict["passed"]) / len(tests), verdict["isolated"]


def _at_once(jobs: int) -> int:
    there = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # The other processes of the run on this machine have tests to run at the same time.
    return max(1, min(jobs, there // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
