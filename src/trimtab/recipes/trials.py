"""Asks for trials: steps that are executed by shapes alone in a process beside this one, several at once.

Nothing of this process is changed by them, and no GPU is opened. The process is begun early, so that it imports what a
step needs while this one does something else.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Self

from trimtab.recipes.trial_server import Answer

if TYPE_CHECKING:
    from trimtab.recipes.trial_step import Trial


class Trials:
    """A process that makes trials: there from the first of them, or from `begin`, to the end of `with`.

    What the libraries say in it is kept from the console.
    """

    def __init__(self) -> None:
        self._next = 0
        self._here: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def begin(self) -> None:
        """Start the process; nothing is waited for."""
        if self._process is not None:
            return
        self._here, there = Pipe()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trimtab.recipes.trial_server", str(there.fileno())],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
            )

    def end(self) -> None:
        if self._process is not None and self._here is not None:
            self._here.close()
            self._process.kill()
            self._process.wait()
            self._process = self._here = None
        self._said.close()

    def ask(self, trial: Trial) -> int:
        """Begin a trial; `answer` tells by this number what became of it."""
        self.begin()
        assert self._here is not None
        self._next += 1
        # A process that is gone is told by the answer.
        with contextlib.suppress(OSError):
            self._here.send((self._next, trial))
        return self._next

    def answer(self) -> tuple[int, Answer]:
        """Wait for the next trial that is done."""
        assert self._here is not None
        try:
            number, answer = self._here.recv()
        except (EOFError, OSError):
            raise TrialsEnded(self._last_words()) from None
        return number, answer

    def make(self, trial: Trial) -> Answer:
        """One trial, waited for."""
        number = self.ask(trial)
        try:
            while (answered := self.answer())[0] != number:
                pass
        except TrialsEnded as error:
            return Answer(None, str(error))
        return answered[1]

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"the process that executes steps ended: {lines[-1] if lines else 'without a word'}"


class TrialsEnded(Exception):
    """The process is gone."""
