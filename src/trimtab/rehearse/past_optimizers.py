"""The state of an optimizer that steps no more, while another one trains the same weights: a first stage's Trainer that
is still bound when the second stage begins. It looks, and changes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse.checks.base import BaseCheck, around, optimizers_made, trained_by
from trimtab.rehearse.memory_text import size
from trimtab.virtual import state

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process

_SHARE = 0.05
"""The part of a GPU from which on it is worth a word."""


class PastOptimizers(BaseCheck):
    """Counts optimizers that are made and their steps, to know which one follows which."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._deeds = 0
        self._born: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def install(self) -> None:
        self._made = optimizers_made()
        around(torch.optim.Optimizer, "__init__", self._init)
        register_optimizer_step_post_hook(lambda optimizer, *_: self._count(self._stepped, optimizer))

    def _init(self, real: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, *args, **kwargs)
        self._count(self._born, optimizer)

    def _count(self, when: WeakKeyDictionary[Any, int], optimizer: Any) -> None:
        self._deeds += 1
        when[optimizer] = self._deeds

    def beside(self, finding: Finding, device: str) -> tuple[Finding, int]:
        """The finding of a full GPU, with such a state there as its cause, and its bytes."""
        machine = state.machine()
        capacity = (
            next((d.total_bytes for d in machine.devices if str(d.device) == device), 0) if machine else 0
        )
        past = [(_state_on(one, device), one) for one in self._followed()]
        count, optimizer = max(past, key=lambda pair: pair[0], default=(0, None))
        place: Place | None = self._made.get(optimizer) if optimizer is not None else None
        if place is None or count < _SHARE * capacity:
            return finding, 0
        why = (
            f"{size(count)} on {device} are the state of the optimizer that was made here: it steps no more, another "
            "one trains its weights now, and the program still holds it"
        )
        fix = (
            "Let go of it, and of what holds it (a Trainer, a schedule), before the next one is made: del …, then "
            "gc.collect(); or let a function make each, which returns before the next one begins."
        )
        return replace(finding, cause=cause_at(place, why), fix=fix, edits=[]), count

    def _followed(self) -> list[Any]:
        """Optimizers that made their last step before another one was made for all that they train."""
        ended = {one: last for one, last in self._stepped.items() if one in self._made}
        return [
            one
            for one, last in ended.items()
            if any(
                born > last and {id(p) for p in trained_by(one)} <= {id(p) for p in trained_by(other)}
                for other, born in self._born.items()
            )
        ]


def _state_on(optimizer: Any, device: str) -> int:
    """The bytes of its state on a GPU."""
    held = (one for one in tree_leaves(list(optimizer.state.values())) if isinstance(one, torch.Tensor))
    return sum(one.numel() * one.element_size() for one in held if str(one.device) == device)
