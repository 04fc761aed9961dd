"""Where the cells of a benchmark come from: a process that has imported what they need, of which each is a fork.

Imports are most of what a short cell costs, and the same for all. The nursery holds nothing else: no model, no device,
no thread of its own, so that each cell is still a process that sees nothing of another, and one that is killed is one
failed cell. Where processes cannot be forked (outside of Linux) cells are started anew each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


class Nursery:
    """The process, begun when the first cell is asked for, and again should it have ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def bear(self, asked: Path, answer: Path, said: Path) -> int | None:
        """Run `cells.main` in a fork, what it says on stderr into a file; its exit code, minus the signal if killed.

        None where the nursery itself ended.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trimtab.bench.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([str(asked), str(answer), str(said)]) + "\n")
            self._process.stdin.flush()
            told = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        return int(told) if told else None

    def close(self) -> None:
        """End it, and a cell that is still there: one that was interrupted."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.terminate()
            self._process.wait()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


@contextlib.contextmanager
def nursery() -> Iterator[Nursery | None]:
    """A nursery to its end; None where there can be none."""
    if sys.platform != "linux":
        yield None
        return
    opened = Nursery()
    try:
        yield opened
    finally:
        opened.close()


def _serve() -> None:
    """The process itself: one line for each cell, one line for each that ended."""
    import gc

    # What a library prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)

    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import trimtab.bench.cells  # noqa: F401

    children: list[int] = []

    def end(number: int, frame: object) -> NoReturn:
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    gc.collect()
    gc.freeze()  # or the first collection in a fork would write to all of these pages
    for line in sys.stdin:
        asked, answer, said = json.loads(line)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.dup2(nothing, 0)
            _be_a_cell(asked, answer, said)
        children.append(child)
        _, status = os.waitpid(child, 0)
        children.remove(child)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _be_a_cell(asked: str, answer: str, said: str) -> NoReturn:
    from trimtab.bench.cells import main

    code = 1
    try:
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT, 0o600), 2)
        code = main(asked, answer)
    except BaseException:  # the fork must never return into the nursery's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
