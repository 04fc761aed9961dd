"""Asks for trials: steps that are executed by shapes alone in a process beside this one, several at once.

Nothing of this process is changed by them, and no GPU is opened. The process is begun early, and looks at the model
too, so that this one need not import what takes long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Self

from trimtab.recipes import executed_before, trial_identity
from trimtab.recipes.trial_server import Answer, Look, Seen

if TYPE_CHECKING:
    from trimtab.config.schema import Config
    from trimtab.recipes.planning import Known
    from trimtab.recipes.trial_step import Trial


class Trials:
    """A process that makes trials: there from the first of them, or from `begin`, to the end of `with`.

    What the libraries say in it is kept from the console. With `keeps` what is found is kept on disk, and what is
    kept there is not looked for again, unless that is asked for (`fresh`).
    """

    def __init__(
        self,
        *,
        keeps: bool = False,
        fresh: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`tell` hears what is waited for."""
        self._keeps, self._fresh, self._tell = keeps, fresh, tell
        self.from_before = 0
        """How many trials were not made, for their answers were kept."""
        self._next = 0
        self._kept: list[tuple[int, Answer]] = []
        """Asked for, and kept from before."""
        self._asked: dict[int, tuple[Trial, str | None]] = {}
        """What is under way, with its identity."""
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
            self._process = start_server(there.fileno(), self._said.fileno())

    def end(self) -> None:
        if self._process is not None and self._here is not None:
            self._here.close()
            # It alone would leave behind what it executes.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = self._here = None
        self._said.close()

    def know(self, config: Config) -> Known:
        """`know_model`, by the process where it was begun; no trial may be under way."""
        identity = self._identity(trial_identity.of_model, config)
        if (before := executed_before.known(self._searched(identity))) is not None:
            return before
        known = self._look(config)
        # What it hangs on may have changed meanwhile.
        if identity is not None and identity == self._identity(trial_identity.of_model, config):
            executed_before.keep_known(identity, known)
        return known

    def _look(self, config: Config) -> Known:
        from trimtab.recipes.planning import know_model, may_compile

        self._tell("looking at the model")
        if self._process is None:
            return know_model(config)
        number = self._send(Look(config, may_compile(config)))
        try:
            answered, seen = self._receive()
        except TrialsEnded:
            return know_model(config)
        assert answered == number
        if isinstance(seen, Seen) and seen.refused is not None:
            raise seen.refused
        # What else went wrong there is met here, with all that there is to say about it.
        return seen.known if isinstance(seen, Seen) and seen.known is not None else know_model(config)

    def ask(self, trial: Trial) -> int:
        """Begin a trial; `answer` tells by this number what became of it."""
        identity = self._of(trial)
        before = executed_before.executed(self._searched(identity))
        if before is None and not trial.counts:
            # Counting kernels changes nothing of the memory: what `fit` executed answers `plan` too.
            before = executed_before.executed(self._searched(self._of(replace(trial, counts=True))))
        if before is not None:
            self.from_before += 1
            self._next += 1
            self._kept.append((self._next, before))
            return self._next
        self._tell(f"executing steps on virtual GPUs ({trial.plan.strategy})")
        self.begin()
        number = self._send(trial)
        self._asked[number] = trial, identity
        return number

    def answer(self) -> tuple[int, Answer]:
        """Wait for the next trial that is done."""
        if self._kept:
            return self._kept.pop(0)
        number, answer = self._receive()
        assert isinstance(answer, Answer)
        trial, identity = self._asked.pop(number)
        if answer.executed is not None and identity is not None and identity == self._of(trial):
            executed_before.keep_executed(identity, answer.executed)
        return number, answer

    def _of(self, trial: Trial) -> str | None:
        return self._identity(trial_identity.of_trial, trial)

    def _identity(self, of: Callable[[Any], str], asked: Any) -> str | None:
        """None where nothing is kept, or it cannot be told what the answer hangs on."""
        try:
            return of(asked) if self._keeps else None
        except trial_identity.Unknowable:
            return None

    def _searched(self, identity: str | None) -> str | None:
        return None if self._fresh else identity

    def make(self, trial: Trial) -> Answer:
        """One trial, waited for."""
        number = self.ask(trial)
        try:
            while (answered := self.answer())[0] != number:
                pass
        except TrialsEnded as error:
            return Answer(None, str(error))
        return answered[1]

    def _send(self, request: Look | Trial) -> int:
        assert self._here is not None
        self._next += 1
        # A process that is gone is told by the answer.
        with contextlib.suppress(OSError):
            self._here.send((self._next, request))
        return self._next

    def _receive(self) -> tuple[int, Answer | Seen]:
        assert self._here is not None
        try:
            number, answer = self._here.recv()
        except (EOFError, OSError):
            raise TrialsEnded(self._last_words()) from None
        return number, answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"the process that executes steps ended: {lines[-1] if lines else 'without a word'}"


def start_server(connection: int, said: int) -> subprocess.Popen[bytes]:
    """The process at the other end of a connection; what it says goes into a file."""
    return subprocess.Popen(
        [sys.executable, "-m", "trimtab.recipes.trial_server", str(connection)],
        pass_fds=(connection,),
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # ended with all of its forks
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
    )


class TrialsEnded(Exception):
    """The process is gone."""
