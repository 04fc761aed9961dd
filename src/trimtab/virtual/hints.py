"""What is taken of values that nobody computed, where a program asks by a test: a value for it, and what it is about.

A test of unknown numbers is answered by what it says of ordinary ones. Whether they are finite at all is no decision
of the program that shapes leave open: a rehearsal takes them to be. How many whole numbers are equal is a score, which
is shown. Both are known by the operations that made the test. Never looks at a value that is there.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.virtual import unknown
from trimtab.virtual.plans import FRESH, Plan
from trimtab.virtual.unknown import filled, hint, stand_for, standing_for
from trimtab.virtual.wording import words

About = Literal["finite", "equal"]
_FINITE = frozenset(f"aten::{name}" for name in words("isnan isinf isfinite isposinf isneginf"))
_EQUAL = frozenset(("aten::eq", "aten::ne"))
_DRAWN = {
    "aten::normal_": lambda mean=0.0, std=1.0: mean,
    "aten::uniform_": lambda low=0.0, high=1.0: (low + high) / 2,
}
"""What numbers that are drawn are in the middle."""


_FEW = 65536


def note(plan: Plan, func: Any, payloads: Any, named: Any, made: Any) -> None:
    """Keep beside a result without values what is taken of them."""
    if unknown.some_stand:
        _stand(func, payloads, named, made)
    if plan.kind == FRESH:
        if made.dtype is torch.bool:
            made._hint = _truth(plan, func, payloads, named)
            made._about = _about(plan, payloads, named)
        elif plan.name == "aten::sum":
            _count(plan, payloads, named, made)
        elif plan.name == "aten::where":
            made._hint = hint(payloads[1] if hint(payloads[0]) else payloads[2])
        elif plan.name == "aten::_to_copy" and payloads[0].dtype is torch.bool:
            # What a test says stays said in another number format.
            made._hint = (float if made.dtype.is_floating_point else int)(hint(payloads[0]))
            made._about = about(payloads[0])
    elif (middle := _DRAWN.get(plan.name)) is not None and payloads[0].is_meta:
        payloads[0]._hint = float(middle(*payloads[1:3]))


def stand_for_view(plan: Plan, payloads: Any, named: Any, made: Any) -> None:
    """A view of counts that nobody knows has its part of what stands for them."""
    if unknown.some_stand:
        _stand(plan.kernel, payloads, named, made)


def _stand(func: Any, payloads: Any, named: Any, made: Any) -> None:
    """What is computed from a few numbers that stand for others, and from numbers that are known, stands too."""
    tensors = [value for value in (*payloads, *named.values()) if isinstance(value, Tensor)]
    if not any(standing_for(value) is not None for value in tensors):
        return
    results = list(made) if made.__class__ in (list, tuple) else [made]
    if not all(isinstance(one, Tensor) and one.is_meta and one.numel() <= _FEW for one in results):
        return
    if any(value.is_meta and standing_for(value) is None for value in tensors):
        return

    def values(value: Any) -> Any:
        return filled(value) if isinstance(value, Tensor) else value

    kept = {name: values(value) for name, value in named.items() if name not in ("device", "pin_memory")}
    found = func(*map(values, payloads), **kept)
    for one, stands in zip(results, found if made.__class__ in (list, tuple) else [found], strict=True):
        stand_for(one, stands)


def _count(plan: Plan, payloads: Any, named: Any, made: Tensor) -> None:
    """How many tests say yes. What is computed from so many (one more, the rest) has to agree with it: it stands."""
    tests = _tests(payloads, named)
    if not tests or not made.numel():
        return
    made._hint = tests[0].numel() // made.numel() * hint(tests[0])  # type: ignore[attr-defined]
    made._about = _about(plan, payloads, named)  # type: ignore[attr-defined]
    if made.is_meta and made.numel() <= _FEW:
        stand_for(made, torch.full(made.shape, hint(made), dtype=made.dtype, device="cpu"))


def about(payload: Tensor) -> About | None:
    """What a test without values is about, if nothing of a program hangs on it."""
    found: About | None = payload.__dict__.get("_about")
    return found


def _truth(plan: Plan, func: Any, payloads: Any, named: Any) -> Any:
    """What a test says of hints (that a shape is finite, not NaN …), and what is put together of such tests."""
    tests = _tests(payloads, named)
    if not plan.pointwise:
        return all(hint(value) for value in tests) if tests else None

    def single(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.tensor(hint(value), dtype=value.dtype, device="cpu")

    return bool(func(*map(single, payloads), **{name: single(value) for name, value in named.items()}))


def _about(plan: Plan, payloads: Any, named: Any) -> About | None:
    if plan.name in _FINITE:
        return "finite"
    if plan.name in _EQUAL:
        first, second = payloads[:2]
        if first is second or (isinstance(second, float) and math.isinf(second)):
            return "finite"  # as torch puts these tests together
        whole = [not value.is_floating_point() for value in (first, second) if isinstance(value, Tensor)]
        return "equal" if len(whole) == 2 and all(whole) else None
    found = {about(value) for value in _tests(payloads, named)}
    return found.pop() if len(found) == 1 else None


def _tests(payloads: Any, named: Any) -> list[Tensor]:
    flat: list[Any] = []
    for value in (*payloads, *named.values()):
        flat += value if value.__class__ in (list, tuple) else [value]
    return [value for value in flat if isinstance(value, Tensor) and value.dtype is torch.bool]
