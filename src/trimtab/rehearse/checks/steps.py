"""Counts optimizer steps, and ends the script after as many as were asked for. Workers that RPC ties together cannot go
on without one of them: the parent is asked to end them all."""

from __future__ import annotations

import sys
import time
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.rehearse import session
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub
from trimtab.rehearse.process import StopRehearsal
from trimtab.virtual import imports, state

STEPPING = ("trimtab.zeroth.optimizer", "ZerothOrder", "step")
"""Steps without gradients: who makes them, by module, class and method."""


class Steps(BaseCheck):
    """The number of steps is that of the optimizer that has made most."""

    def install(self) -> None:
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._most = 0
        self._written_at = 0.0
        register_optimizer_step_post_hook(self._stepped)
        machine = state.machine()
        assert machine is not None
        imports.when_imported(machine, machine.undo, {STEPPING[0]: self._listen})
        backward_hub().after.append(self._differentiated)

    def _differentiated(self) -> None:
        self.process.differentiated = True
        self._tell()

    def _listen(self, _: Any) -> None:
        """Hear of steps that no optimizer of torch makes."""
        module, owner, name = STEPPING
        around(getattr(sys.modules[module], owner), name, self._one_step, whose="Steps")

    def _one_step(self, real: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(optimizer, *args, **kwargs)
        self._stepped(optimizer, args, kwargs)
        return result

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.process.trained = True
        count = self._counts.get(optimizer, 0) + 1
        self._counts[optimizer] = count
        self._most = max(self._most, count)
        self._tell()
        limit = self.process.settings.max_steps
        if limit is not None and self._most >= limit:
            self.process.cut_off = True
            self.process.recorder.write(t="stopped")
            if _has_rpc():
                session.stop_file(self.process.folder).touch()
            raise StopRehearsal(f"{limit} optimizer steps made")

    def _tell(self) -> None:
        """Say now and then how far it is: a process may be ended without a word."""
        now = time.monotonic()
        if now > self._written_at + 1:
            self._written_at = now
            self.process.recorder.write(t="steps", n=self._most)
            self.process.memory()

    def finish(self) -> None:
        if self._most:
            self.process.recorder.write(t="steps", n=self._most)


def _has_rpc() -> bool:
    api = sys.modules.get("torch.distributed.rpc.api")
    return api is not None and bool(api._is_current_rpc_agent_set())
