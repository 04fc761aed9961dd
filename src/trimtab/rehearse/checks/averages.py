"""Running averages of weights kept in 16 bits, whose updates are all rounded away: the average stays what it was.

Speaks when a tensor was drawn to another one several times with a share that its precision cannot hold, and 99 % of
what differs from the other have not changed by a bit. Never computes an average of its own.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn

from trimtab.diagnose import rewrite, source, trace
from trimtab.diagnose.finding import Edit, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, plain_values
from trimtab.virtual import functions

_TIMES = 4


class Averages(BaseCheck):
    """Looks at what is drawn to another tensor in place, under no_grad: `lerp_`, and `add_` with a share."""

    def install(self) -> None:
        self._first: dict[int, tuple[ref[torch.Tensor], torch.Tensor, int]] = {}
        """Averages by id, with what they held and how often they were written."""
        functions.AFTER.append(self._after)

    def _after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name not in ("lerp_", "add_") or torch.is_grad_enabled() or len(args) < 2:
            return
        kept, other = args[:2]
        share = kwargs.get("alpha") if name == "add_" else kwargs.get("weight", (*args, None)[2])
        if not isinstance(kept, torch.Tensor) or not isinstance(other, torch.Tensor):
            return
        if not isinstance(share, float) or kept.dtype not in (torch.float16, torch.bfloat16):
            return
        values, there = plain_values(kept), plain_values(other)
        # Half the gap between two numbers is at least a quarter of eps: only what is twice as large would count.
        if not 0 < share < torch.finfo(kept.dtype).eps / 4 or values is None or there is None:
            return
        held, start, times = self._first.get(id(kept), (None, None, 0))
        if start is None or held is None or held() is not kept or start.shape != values.shape:
            self._first[id(kept)] = ref(kept), values.clone(), 1
            return
        self._first[id(kept)] = held, start, times + 1
        away = there != values if there.shape == values.shape else torch.zeros_like(values, dtype=torch.bool)
        still = away & (values == start)
        if times + 1 >= _TIMES and away.float().mean() > 0.05 and still.sum() > 0.99 * away.sum():
            self._report(kept, share)

    def _report(self, kept: torch.Tensor, share: float) -> None:
        found = next((copy for frame in places.frames() if (copy := _copied(kept, frame)) is not None), None)
        if found is None:
            return  # not known to be a copy of weights
        file, call = found
        dtype, end = str(kept.dtype).removeprefix("torch."), rewrite.end_of(file, call)
        self.report(
            "no-effect",
            f"A running average in {dtype} was drawn to the weights {_TIMES} times, and 99 % of what differs from them "
            f"changed not one bit: a share of {share:g} is less than the gap between two numbers of {dtype}.",
            places.here(),
            cause_at(source.place(file, call.lineno), f"this makes the average in {dtype}"),
            fix=f"Keep the average in float32: {ast.unparse(call)}.float(); cast a copy of it back to run the model.",
            op="average",
            once="average",
            edits=[Edit(file, end, end, ".float()")],
        )


def _copied(kept: torch.Tensor, frame: FrameType) -> tuple[str, ast.Call] | None:
    """The one call that copied the weights which a frame reaches as a variable or an attribute of its object."""
    owner, file = frame.f_locals.get("self"), frame.f_code.co_filename
    own = {**getattr(owner, "__dict__", {}), **getattr(owner, "_modules", {})}
    for code, value in [*frame.f_locals.items(), *((f"self.{name}", value) for name, value in own.items())]:
        inside = value.parameters() if isinstance(value, nn.Module) else value
        inside = inside.values() if isinstance(inside, dict) else inside
        if (
            code == "self"
            or not isinstance(value, nn.Module | dict | list)
            or all(t is not kept for t in inside)
        ):
            continue
        _, made = trace.decided(file, frame.f_lineno, ast.parse(code, mode="eval").body)
        calls = [n for n in ast.walk(made) if isinstance(n, ast.Call)]
        copies = [c for c in calls if source.called_name(c) in ("deepcopy", "clone")]
        if len(copies) == 1:
            return file, copies[0]
    return None
