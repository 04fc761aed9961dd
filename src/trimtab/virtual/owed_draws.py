"""By shapes: how many numbers the CPU draws where a tensor on the host is filled that has no values here.

Counted, and drawn when somebody asks where the generator stands (generators.py). Only for operations whose draws hang
on shapes alone, on all CPUs alike: bernoulli_ and exponential_ draw by another rule on Intel's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual.generators import HostGenerator, drawing_on, host_generator
from trimtab.virtual.plans import Kwargs, Plan
from trimtab.virtual.state import HOST, VirtualDevice

_UNIFORM, _NORMAL = ("aten::uniform_", "aten::rand_like"), ("aten::normal_", "aten::randn_like")
_BLOCK = 16
"""Numbers of a normal distribution that are made at a time, where a tensor has as many."""


def owe(plan: Plan, made: Tensor, named: Kwargs) -> None:
    """Count what would have been drawn to fill a tensor on the host."""
    generator = host_generator(named)
    if generator is None:
        return
    if plan.name in _UNIFORM:
        generator.owed += made.numel() * _words(made)
    elif plan.name in _NORMAL:
        _owe_normal(generator, made)


def _words(made: Tensor) -> int:
    return 2 if made.dtype is torch.float64 else 1


def _owe_normal(generator: HostGenerator, made: Tensor) -> None:
    count = made.numel()
    if count < _BLOCK or not made.is_contiguous():
        # By pairs of 64 bits, of which the generator keeps the second for whoever asks next.
        generator.owed += count // 2 * 4
        if count % 2:
            generator.settle()
            torch.empty(1, device="cpu").normal_(generator=generator.source)
        return
    rest = count % _BLOCK
    if rest and made.dtype in (torch.bfloat16, torch.float16):
        count += _BLOCK - rest  # the last ones again
    elif rest:
        count += _BLOCK
    generator.owed += count * _words(made)


def draw(plan: Plan, slot: VirtualDevice | None, payloads: Any, named: Kwargs) -> Any:
    """Carry out what draws values, from a generator that stands where it does in the run."""
    if slot is not None and slot.index != HOST:
        if named.get("generator") is not None:
            return plan.kernel(*payloads, **named)
        with drawing_on(slot):
            return plan.kernel(*payloads, **named)
    settle(plan, payloads, named)
    return plan.kernel(*payloads, **named)


def settle(plan: Plan, payloads: Any, named: Kwargs) -> None:
    """Come to stand where the run does before values are drawn.

    Not for small weights between big ones: nobody looks at their numbers, and it is the same to count before or after.
    """
    generator = host_generator(named)
    if generator is None or not generator.owed:
        return
    elements = payloads[0].numel() if plan.name in ("aten::uniform_", "aten::normal_") else 0
    kept = plan.name == "aten::normal_" and elements < _BLOCK and elements % 2  # one of a pair, for the next
    if elements < 2 or kept:
        generator.settle()
