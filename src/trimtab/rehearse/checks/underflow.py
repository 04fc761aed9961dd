"""Gradients that are zero because float16 cannot hold anything as small: trained without a GradScaler, in float16.

A parameter whose whole gradient was 0 is only a suspect. In the next step its gradient is computed once more, from the
loss times 65536: only one that is a number then was lost to the precision. Never looks at a loss that is scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.diagnose import graphs, mends_scaler
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks import base
from trimtab.rehearse.checks.cuts import leaves
from trimtab.rehearse.checks.sources import is_finite
from trimtab.virtual.unknown import is_unknown

_SCALE = 65536.0
_LOOKS = 6
"""Backward passes that are looked at."""


class Underflow(base.BaseCheck):
    """Looks at the gradients of the first backward passes of a loss that goes through float16."""

    def install(self) -> None:
        self._made = base.optimizers_made()
        self._scaled = False
        self._looks = 0
        self._suspects: list[torch.Tensor] = []
        self._root: torch.Tensor | None = None
        base.around(torch.amp.GradScaler, "scale", self._scale)
        hub = base.backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)

    def _scale(self, real: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        self._scaled |= scaler.is_enabled()
        return real(scaler, outputs)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._root = None
        usable = len(roots) == 1 and roots[0].numel() == 1 and not is_unknown(roots[0])
        self._looks += 1
        if self._scaled or not usable or self._looks > _LOOKS or _has_ranks():
            return
        if not _goes_through_half(roots[0].grad_fn):
            return
        self._root = roots[0]
        if self._suspects:
            self._judge(roots[0], place)

    def _after(self) -> None:
        if self._root is None:
            return
        trained = {id(p) for optimizer in list(self._made) for p in base.trained_by(optimizer)}
        self._suspects = [
            leaf
            for leaf in leaves(self._root)
            if id(leaf) in trained and leaf.grad is not None and not bool(leaf.grad.detach().any())
        ]
        self._root = None

    def _judge(self, root: torch.Tensor, place: Place | None) -> None:
        held = {id(leaf) for leaf in leaves(root)}
        mine = [leaf for leaf in self._suspects if id(leaf) in held]
        if not mine:
            return
        plain = torch.autograd.grad(root, mine, retain_graph=True, allow_unused=True)
        grown = torch.autograd.grad(root * _SCALE, mine, retain_graph=True, allow_unused=True)
        lost = [
            leaf
            for leaf, small, large in zip(mine, plain, grown, strict=True)
            if small is not None
            and large is not None
            and not bool(small.any())
            and bool(large.any())
            and is_finite(large)
        ]
        # A gradient that is 0 but for rounding (a key's bias) is lost to no precision: most of the model must be.
        trained = {id(p) for optimizer in list(self._made) for p in base.trained_by(optimizer)}
        if 2 * len(lost) < len(held & trained) or not lost:
            return
        self._looks = _LOOKS
        names = base.shown(base.names_of(lost))
        self.report(
            "no-gradient",
            f"The whole gradient of {names} is 0: it is smaller than float16 can hold (6e-8). Of the loss times 65536 "
            "it is not.",
            place,
            cause_at(place, "a loss that goes through float16 is sent backward without a GradScaler"),
            fix=mends_scaler.scaler_added(place, places.frames(), list(self._made)),
            op="backward",
        )


def _has_ranks() -> bool:
    """Whether a backward pass may have other ranks wait for it."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized()


def _goes_through_half(node: Any) -> bool:
    """Whether a loss goes through float16, and through torch's own operations alone: those can be run twice."""
    nodes = graphs.distances(node)
    # A checkpoint runs the program's own code again; so may a function of the program.
    plain = all(n.name().endswith(("Backward0", "Backward1", "AccumulateGrad")) for n in nodes)
    return plain and any(d.dtype is torch.float16 for n in nodes for d in getattr(n, "_input_metadata", ()))
