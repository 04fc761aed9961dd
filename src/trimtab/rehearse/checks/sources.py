"""Where values stop being finite: the program's own lines whose result holds NaN or infinity and whose inputs do not.

Only calls that stand in the user's files are looked at: a library's inner operations would cost too much, and it is
the user's line that has to change. Infinity that is written on purpose (a mask of -inf) is no source.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import flow, source
from trimtab.diagnose.finding import Cause, Place, cause_at
from trimtab.rehearse.checks.base import place_born
from trimtab.virtual import functions
from trimtab.virtual.tensor import payload_of
from trimtab.virtual.unknown import is_unknown

_ON_PURPOSE = frozenset(
    ("full", "full_like", "masked_fill", "masked_fill_", "where", "fill_", "empty", "empty_like", "tensor")
) | {"new_full", "triu", "tril", "zeros", "ones", "new_empty", "empty_strided", "__setitem__", "cat", "stack"}
_STEEP_AT_ZERO = frozenset(("sqrt", "rsqrt", "pow", "__pow__", "norm", "std", "var", "cdist", "acos", "asin"))
_LARGEST = 1 << 22
_TORCH = str(Path(torch.__file__).parent)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Source:
    """A line at which values stopped being finite, or may get a gradient that is not."""

    place: Place
    why: str
    fix: str = ""

    def cause(self) -> Cause | None:
        """As the cause of a finding."""
        return cause_at(self.place, self.why)


class Sources:
    """What was met since the last backward pass, and in the pass before that."""

    def __init__(self) -> None:
        self._births: list[Source] = []
        self._steep: list[Source] = []
        self.births: list[Source] = []
        self.steep: list[Source] = []
        functions.AFTER.append(self._after)

    def turn(self) -> None:
        """A backward pass begins: what was met so far belongs to it."""
        self.births, self.steep = self._births, self._steep
        self._births, self._steep = [], []

    def _after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not isinstance(result, torch.Tensor):
            return
        caller = _asking(sys._getframe(2))
        if not source.is_user_file(caller.f_code.co_filename):
            return
        values = payload_of(result)
        # Inside vmap, a trace or a fake-tensor mode there are no values to look at.
        if type(values) not in _PLAIN or torch._C._functorch.maybe_current_level() is not None:
            return
        if torch.jit.is_tracing():
            return
        if values.numel() > _LARGEST or not values.is_floating_point() or values.layout is not torch.strided:
            return
        if values.device.type == "meta" or is_unknown(result):
            return
        name = getattr(func, "__name__", "")
        if not is_finite(values):
            if not self._births and name not in _ON_PURPOSE:
                self._born(caller.f_code.co_filename, caller.f_lineno, name, args, kwargs)
        elif name in _STEEP_AT_ZERO and result.requires_grad and len(self._steep) < 8:
            with torch.no_grad():
                steep = (
                    bool((values.detach() == 0).any()) if name[0] != "a" else _has_one(payload_of(args[0]))
                )
            if steep:
                place = source.place(caller.f_code.co_filename, caller.f_lineno)
                why = f"the gradient of {name.strip('_')} is infinite here: its result is 0 for some element"
                self._steep.append(Source(place, why))

    def _born(self, file: str, line: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if name in ("cross_entropy", "nll_loss") and len(given) > 1:
            ignored = kwargs.get("ignore_index", -100)
            target = payload_of(given[1])
            if not target.is_floating_point() and bool((target == ignored).all()):
                why = f"every label is {ignored}, so none counts: the mean over no label is NaN"
                born = place_born(given[1]) or source.place(file, line)
                place = flow.writing_line(born.file, born.line, ignored) or born
                fix = "Leave a label in every batch: mask the prompt alone, and drop rows without an answer."
                self._births.append(Source(place, why, fix))
                return
        stray = next((value for value in given if not is_finite(payload_of(value))), None)
        if stray is not None and not _is_mask(payload_of(stray)):
            self._births.append(
                Source(place_born(stray) or source.place(file, line), "this is not finite already here")
            )
            return
        why = f"the result of {name.strip('_')} is not finite here, though what it is given is"
        self._births.append(Source(source.place(file, line), why))


def _asking(frame: FrameType) -> FrameType:
    """The line that called a torch function: one that is written in Python is reached through torch's own files."""
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are numbers; true of what has none."""
    if not values.is_floating_point() or not values.numel() or values.device.type == "meta":
        return True
    with torch.no_grad():
        return bool(torch.isfinite(wide(values)).all())


def wide(values: torch.Tensor) -> torch.Tensor:
    """The values in a type that can be computed with: eight-bit floats can only be converted."""
    values = values.detach()
    return values.float() if values.dtype.itemsize == 1 else values


def _is_mask(values: torch.Tensor) -> bool:
    """Only finite numbers and -inf: as attention masks have."""
    with torch.no_grad():
        values = wide(values)
        return not bool((torch.isnan(values) | (values == float("inf"))).any())


def _has_one(values: torch.Tensor) -> bool:
    return bool((values.detach().abs() == 1).any())
