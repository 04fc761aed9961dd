"""Keeps a step whose numbers are not finite out of the weights, without waiting for the device that found it.

The verdict on a step lies on the device when the host goes on to the optimizer. Three ways, the first that can be had:

- `gated`: a fused optimizer of torch is handed the verdict itself (`found_inf`, as a gradient scaler hands it) and does
  nothing on the device where it is bad.
- `undone`: of few trained weights a copy is made before the step, and put back when the verdict has been read.
- `at once`: the verdict is read before the optimizer is called. On the CPU that costs nothing; on a GPU it is a wait
  for the backward pass in every step.

With the first two the verdict is read a step later, when it has long arrived. It never decides what is bad. On virtual
GPUs it is read at once, and a copy is kept where it would be kept on real ones: it takes memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from trimtab.monitor.norms import local

UNDO_BYTES = 256 * 2**20
"""Up to so much of trained weights, adapters as a rule, a copy is kept; the plan's reserve has room for it."""

Way = Literal["gated", "undone", "at once"]


class Verdict:
    """Whether a step was bad, on its way from the device to the host."""

    def __init__(self, bad: torch.Tensor) -> None:
        self._arrived: Any = None
        self._bad = bad
        if _on_real_gpu(bad):
            self._bad = torch.empty(bad.shape, dtype=bad.dtype, pin_memory=True)
            self._bad.copy_(bad, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(bad.device))

    def read(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._bad.item())


class Gate:
    """Stands between the verdicts of a run and its optimizer."""

    def __init__(
        self, optimizer: Any, parameters: Sequence[nn.Parameter], *, scaler: bool, late: bool | None = None
    ) -> None:
        """`scaler`: a gradient scaler keeps bad steps out by itself. `late`: read a step later also off a GPU."""
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        self._parameters = [local(p.detach()) for p in parameters]
        self._copies: list[torch.Tensor] = []
        self.late = all(map(_on_real_gpu, self._parameters)) if late is None else late
        """Whether a verdict may be read a step later."""
        virtual = late is None and not self.late and all(p.is_cuda for p in self._parameters)
        way = self._choose(scaler, self.late or virtual, virtual)
        self.way: Way = "at once" if virtual and way == "gated" else way

    def _choose(self, scaler: bool, late: bool, virtual: bool) -> Way:
        if not late or not self._parameters:
            return "at once"
        plain = all(
            not hasattr(p, "to_local") if virtual else type(p) in (torch.Tensor, nn.Parameter)
            for p in self._of_optimizer()
        )
        if scaler or (plain and getattr(self._optimizer, "_step_supports_amp_scaling", False)):
            return "gated"
        if sum(p.nbytes for p in self._parameters) <= UNDO_BYTES:
            return "undone"
        return "at once"

    def _of_optimizer(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def shut_if(self, bad: torch.Tensor, *, scaler: bool) -> None:
        """The optimizer is about to step; `bad` is one number on the device, other than zero where it must not."""
        if self.way == "gated" and not scaler:
            self._optimizer.found_inf = bad
        elif self.way == "undone":
            if not self._copies:
                self._copies = [torch.empty_like(p) for p in self._parameters]
            torch._foreach_copy_(self._copies, self._parameters)

    def undo(self) -> None:
        """The step whose verdict has just been read was bad: the weights are those before it."""
        if self.way == "undone" and self._copies:
            torch._foreach_copy_(self._parameters, self._copies)

    def close(self) -> None:
        if self.way == "gated" and hasattr(self._optimizer, "found_inf"):
            del self._optimizer.found_inf
        self._copies = []


def _on_real_gpu(tensor: torch.Tensor) -> bool:
    """A virtual GPU's tensors are of a class of their own."""
    return tensor.is_cuda and type(tensor) in (torch.Tensor, nn.Parameter)
