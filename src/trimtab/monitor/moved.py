"""Whether weights that are trained in 16 bits change at all: an update below half the distance of two numbers is lost.

A few thousand weights are compared before and after a step, on the device; only those that have a gradient count. It is
looked at in a few steps near the full learning rate, and read when the run logs. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.monitor.blame import NAMES
from trimtab.monitor.norms import local

TENSORS, ELEMENTS = 16, 4096
LOOKS, EVERY = 4, 3
"""So many steps are looked at, and not all one after another."""
LOST = 0.05
"""A smaller share of changed weights is told."""


class Moved:
    """Looks at a sample of the trained weights."""

    def __init__(self, parameters: Sequence[torch.Tensor], full_rate: float) -> None:
        half = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
        apart = max(1, len(half) // TENSORS)
        self._sample = half[::apart][:TENSORS]
        self._full_rate = full_rate
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._looks, self._steps = 0, 0

    def about_to_step(self, rate: float | None) -> None:
        self._before = []
        if self._looks >= LOOKS or rate is None or rate < self._full_rate / 2:
            return
        self._steps += 1
        if self._steps % EVERY == 1:
            for parameter in self._sample:
                if parameter.grad is not None:
                    weights, slopes = _some(parameter.detach()), _some(parameter.grad)
                    self._before.append((weights, weights.clone(), slopes.ne(0)))

    def stepped(self) -> None:
        if self._before:
            self._looks += 1
            for now, before, pulled in self._before:
                self._counts.append(((now.ne(before) & pulled).sum(), pulled.sum()))
            self._before = []

    def read(self) -> tuple[float, str] | None:
        """The share that changed and the format, once, when all looks are taken; asks the device."""
        if self._looks < LOOKS or not self._counts:
            return None
        changed, pulled = (sum(int(count) for count in counts) for counts in zip(*self._counts, strict=True))
        self._counts = []
        return (changed / pulled, NAMES[self._sample[0].dtype]) if pulled else None


def _some(tensor: torch.Tensor) -> torch.Tensor:
    flat = local(tensor).view(-1) if local(tensor).is_contiguous() else local(tensor).flatten()
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
