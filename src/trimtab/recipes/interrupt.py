"""Ctrl-C, SIGTERM and SIGHUP end a run at the next whole step, with a checkpoint; a second one ends it at once.

Where the main thread is stuck, so that no handler runs, second_signal.py does the latter.

Of several processes one that is told is enough: they agree at the end of each step, so that all stop at the same one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from trimtab.monitor.gate import Verdict
from trimtab.recipes.second_signal import told_twice_by_torchrun

_HANG_UP = tuple(getattr(signal, name) for name in ("SIGHUP",) if hasattr(signal, name))


class GracefulStop(TrainerCallback):
    """Saves and stops after the current step when the process is told to end. After the last step, the run is whole."""

    def __init__(self, say: Callable[[str], None], every: int = 1) -> None:
        """`every`: how many steps belong together; a run stops after the last of them."""
        self.stopped = False
        """Whether this process was told to end."""
        self.ended_early = False
        """Whether the run ended before its last step for that, in all its processes alike."""
        self._say = say
        self._every = every
        self._before: dict[int, Any] = {}
        self._due = (False, False)
        """Whether a checkpoint, and an evaluation, wait for the last of the steps that belong together."""
        self._process = os.getpid()
        self._told = 0.0
        self._asked: Verdict | None = None
        """Whether a process was told, as of the step before."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Handlers can only be set in the main thread; elsewhere the default behaviour stays.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, *_HANG_UP):
                if number in _HANG_UP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup
                self._before[number] = signal.signal(number, self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._every > 1:
            self._hold(state, control)
        ends = self.stopped
        if args.world_size > 1:
            ends = self._agreed(ends, args.device)
        if ends and state.global_step < state.max_steps and state.global_step % self._every == 0:
            self.ended_early = True
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    def _agreed(self, ends: bool, device: torch.device) -> bool:
        """Whether any process was told. On GPUs that is read a step later, when it has long arrived, by all alike."""
        anyone = torch.full((), float(ends), device=device)
        dist.all_reduce(anyone, dist.ReduceOp.MAX)
        before, self._asked = self._asked, Verdict(anyone)
        if not anyone.is_cuda:
            return self._asked.read()
        return before is not None and before.read()

    def _hold(self, state: Any, control: Any) -> None:
        """Of steps that belong together only the last leaves something that a run can go on from: what is due waits."""
        saves, evaluates = self._due
        self._due = (control.should_save or saves, control.should_evaluate or evaluates)
        if state.global_step % self._every and state.global_step < state.max_steps:
            control.should_save = control.should_evaluate = False
        else:
            control.should_save, control.should_evaluate = self._due
            self._due = (False, False)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The trainer takes the end of the training for that of an epoch: it would evaluate, and save once more.
        if self.ended_early:
            control.should_save = False
            control.should_evaluate = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the earlier signal handlers back; also called when training ended by an error."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:
            # A forked worker of the data loader, which a terminal tells as well: it goes on until it is not needed.
            return
        now = time.monotonic()
        if self.stopped:
            if number in _HANG_UP or told_twice_by_torchrun(self._told, now):
                return  # of a terminal that closes both the shell and the system tell
            self.restore()
            raise KeyboardInterrupt
        self.stopped, self._told = True, now
        then = "this step" if self._every == 1 else f"this round of {self._every} steps"
        self._say(f"{signal.Signals(number).name}: saving after {then}; once more to stop at once")
