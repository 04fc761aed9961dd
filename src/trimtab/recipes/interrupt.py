"""Ctrl-C and SIGTERM end a run at the next whole step, with a checkpoint; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class GracefulStop(TrainerCallback):
    """Saves and stops after the current step when the process is told to end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.stopped = False
        self._say = say
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Handlers can only be set in the main thread; elsewhere the default behaviour stays.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stopped:
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Put the earlier signal handlers back; also called when training ended by an error."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.stopped:
            self.restore()
            raise KeyboardInterrupt
        self.stopped = True
        self._say(f"{signal.Signals(number).name}: saving after this step; once more to stop at once")
