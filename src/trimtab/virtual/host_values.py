"""By shapes: what is asked of numbers that a program copied from the host, which are still known there.

A batch of pictures is made on the host with its values, and only its copy on a GPU has none. Some models look at that
copy before they compute with it: which of these pictures are padding, all zeros? Such questions (tests, counts, places)
are answered by the host's numbers, as long as nobody has written to either. What is computed of them stays unknown.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.virtual.plans import VIEW, Plan
from trimtab.virtual.wording import words

MOST = 1 << 26
"""Elements, of all copies together, whose host's numbers are kept; the oldest are let go."""
_ASKS = frozenset(
    f"aten::{name}" for name in words("eq ne lt le gt ge any all count_nonzero nonzero isnan isinf isfinite")
)


class _Known(NamedTuple):
    """The numbers of a copy, and what nobody may have written to since."""

    values: Tensor
    source: Tensor
    version: int


_kept: deque[tuple[weakref.ref[Tensor], int]] = deque()
"""The copies that have such numbers, in their order, and how many."""


def answer(plan: Plan, payloads: Any, named: Any, args: Any) -> Any:
    """What a question to one tensor has for an answer; None where it is none, or its numbers are not known."""
    if plan.name not in _ASKS or any(isinstance(value, Tensor) for value in payloads[1:]):
        return None
    known = _of(payloads[0])
    if known is None or args[0]._block.unknown:
        return None
    return plan.kernel(known.values, *payloads[1:], **named)


def note(plan: Plan, payloads: Any, args: Any, made: Any) -> None:
    """Keep beside a copy of the host's numbers, or a view of such a copy, where they are known."""
    if plan.name == "aten::_to_copy":
        source = payloads[0]
        if not source.is_meta:
            if _is_the_programs(source, made):
                _keep(made, _Known(source.detach().to(made.dtype), source, source._version))
            return
        if not args[0]._block.unknown and (known := _of(source)) is not None and made.is_meta:
            values = known.values.to(made.dtype)
            if values.stride() == made.stride():
                _keep(made, known._replace(values=values))
    elif plan.kind == VIEW and (known := _of(payloads[0])) is not None and isinstance(made, Tensor):
        values = plan.binding(known.values, *payloads[1:])
        if values.shape == made.shape:
            made._known = known._replace(values=values)  # type: ignore[attr-defined]


def _is_the_programs(source: Tensor, made: Any) -> bool:
    """Whether these are numbers on the host, as a batch is; weights are computed with, and never asked."""
    return (
        isinstance(made, Tensor)
        and made.is_meta
        and source.__class__ is Tensor
        and source.layout is torch.strided
        and source.stride() == made.stride()
        and not source.requires_grad
        and not source.is_inference()
    )


def _keep(payload: Tensor, known: _Known) -> None:
    payload._known = known  # type: ignore[attr-defined]
    _kept.append((weakref.ref(payload), payload.numel()))
    alive = [(copy, count) for copy, count in _kept if copy() is not None]
    elements = sum(count for _, count in alive)
    _kept.clear()
    for copy, count in alive:
        if elements > MOST and (old := copy()) is not None:
            del old._known  # type: ignore[attr-defined]
            elements -= count
        else:
            _kept.append((copy, count))


def _of(payload: Any) -> _Known | None:
    known: _Known | None = payload.__dict__.get("_known") if isinstance(payload, Tensor) else None
    return known if known is not None and known.source._version == known.version else None
