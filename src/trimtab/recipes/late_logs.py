"""Logs that do not stop the training to be read: a step's figures travel to the host and are logged when they arrive.

On a GPU that is a step later, under their own step's number and epoch; elsewhere at once. Whoever saves, evaluates or
ends calls `flush` first, so that nothing is written behind a step whose figures are still on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class _Sent:
    step: int
    epoch: float
    figures: torch.Tensor
    arrived: Any
    """An event of the device; None where the figures are here."""
    take: Callable[[list[float]], None]


class LateLogs:
    """Figures on their way, in the order of their steps."""

    def __init__(self, state: Any, *, late: bool) -> None:
        """`state` is the trainer's. `late`: figures of a step are read in the next one."""
        self._state, self._late = state, late
        self._sent: deque[_Sent] = deque()

    def send(self, figures: Sequence[torch.Tensor], take: Callable[[list[float]], None]) -> None:
        """Have `take` called with the figures of the step that the trainer stands at, and read those before it."""
        on_device = torch.stack([figure.detach().reshape(()).to(wide(figure.device)) for figure in figures])
        here, arrived = on_device, None
        if self._late and on_device.is_cuda:
            here = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            here.copy_(on_device, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(on_device.device))
        self._sent.append(_Sent(self._state.global_step, self._state.epoch, here, arrived, take))
        self.flush(keep=1 if self._late else 0)

    def flush(self, *, keep: int = 0, before: int | None = None) -> None:
        """Read all but the last `keep`; with `before` those of earlier steps alone, and forget the others."""
        while len(self._sent) > keep:
            sent = self._sent.popleft()
            if before is not None and sent.step >= before:
                self._sent.clear()
                return
            if sent.arrived is not None:
                sent.arrived.synchronize()
            self._at(sent)

    def _at(self, sent: _Sent) -> None:
        """Callbacks, trackers and the history are told by the trainer's state which step it is."""
        state = self._state
        now = state.global_step, state.epoch
        state.global_step, state.epoch = sent.step, sent.epoch
        try:
            sent.take(sent.figures.tolist())
        finally:
            state.global_step, state.epoch = now


def wide(device: torch.device) -> torch.dtype:
    """The format that counts of tokens keep their last digit in, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
