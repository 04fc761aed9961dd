"""Where values stop being finite: the program's own lines whose result holds NaN or infinity and whose inputs do not.

Only calls that stand in the user's files are looked at: a library's inner operations would cost too much, and it is
the user's line that has to change. Infinity that is written on purpose (a mask of -inf) is no source.
"""

from __future__ import annotations

import ast
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import flow, mends_values, owners, source, spot
from trimtab.diagnose.finding import Cause, Edit, Place, cause_at
from trimtab.rehearse.checks.base import place_born
from trimtab.virtual import deeds, functions, origin, state
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.tensor import payload_of
from trimtab.virtual.unknown import is_unknown
from trimtab.virtual.wording import words

_ON_PURPOSE = words(
    """
    full full_like masked_fill masked_fill_ where fill_ empty empty_like tensor new_full triu tril zeros ones new_empty
    empty_strided __setitem__ cat stack
    """
)
_PENALTIES = {"mul", "__mul__", "__rmul__", "sub", "__sub__", "__rsub__", "add", "__add__", "__radd__"}
_OVERFLOWS = words("matmul mm bmm linear mul add pow square exp sum to half einsum")
# The gradients of norm, std and cdist are 0 at 0 in torch.
_STEEP_AT_ZERO = frozenset(("sqrt", "rsqrt", "pow", "__pow__", "acos", "asin", "hypot"))
_LARGEST = 1 << 22
_TORCH = str(Path(torch.__file__).parent)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Source:
    """A line at which values stopped being finite, or may get a gradient that is not."""

    place: Place
    why: str
    fix: str = ""
    edits: list[Edit] = field(default_factory=list)
    beyond: bool = False
    """Whether float16 cannot hold what it gives."""

    def cause(self) -> Cause | None:
        """As the cause of a finding."""
        return cause_at(self.place, self.why)


class Sources:
    """What was met since the last backward pass, and in the pass before that."""

    def __init__(self) -> None:
        self._births: list[Source] = []
        self._steep: list[Source] = []
        self._masked: Source | None = None
        """Where -inf was last written on purpose."""
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
        values = payload_of(result)
        if values.is_meta or not values.is_floating_point() or values.numel() > _LARGEST:
            return
        if values.layout is not torch.strided or is_unknown(result):
            return
        caller = _asking(sys._getframe(2))
        if not source.is_user_file(caller.f_code.co_filename):
            return
        # Inside vmap, a trace or a fake-tensor mode there are no values to look at.
        if type(values) not in _PLAIN or torch._C._functorch.maybe_current_level() is not None:
            return
        if torch.jit.is_tracing():
            return
        name = getattr(func, "__name__", "")
        file, line = caller.f_code.co_filename, caller.f_lineno
        if not is_finite(values):
            if name in _ON_PURPOSE or (name in _PENALTIES and _is_mask(values) and _too_large(args)):
                self._mask(file, line, values)
            elif not self._births:
                node = spot.running(caller)
                self._born(source.place(file, line), name, args, kwargs, values, node)
        elif (
            name in _STEEP_AT_ZERO and result.requires_grad and len(self._steep) < 8 and not _flat(name, args)
        ):
            with torch.no_grad():
                at = _steep_where(name, args, values)
            if at:
                place = source.place(file, line)
                why = f"the gradient of {name.strip('_')} is infinite here: {at} for some element"
                node = spot.running(caller)
                mend = mends_values.of_zero(place, name, _dtype(values), node, backward=True)
                self._steep.append(Source(_where(place, mend[1]) if mend else place, why, *(mend or ())))

    def _mask(self, file: str, line: int, values: torch.Tensor) -> None:
        if self._masked is None or (self._masked.place.file, self._masked.place.line) != (file, line):
            place = source.place(file, line)
            mend = mends_values.of_mask(place, _dtype_code(place, values))
            self._masked = Source(place, "-inf is written here, for a whole row at once", *(mend or ()))

    def _born(
        self,
        place: Place,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: torch.Tensor,
        node: ast.expr | None,
    ) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if name in ("cross_entropy", "nll_loss") and len(given) > 1:
            ignored = kwargs.get("ignore_index", -100)
            target = payload_of(given[1])
            if not target.is_floating_point() and bool((target == ignored).all()):
                why = f"every label is {ignored}, so none counts: the mean over no label is NaN"
                born = place_born(given[1]) or place
                place = flow.writing_line(born.file, born.line, ignored) or born
                fix = "Leave a label in every batch: mask the prompt alone, and drop rows without an answer."
                self._births.append(Source(place, why, fix))
                return
        stray = next((value for value in given if not is_finite(payload_of(value))), None)
        if stray is not None and _is_mask(payload_of(stray)):
            if _is_mask(values):
                # What hides a position goes on through sums and copies, as it is meant to.
                return
            if self._masked is not None and _hides_a_row(payload_of(stray)):
                self._births.append(self._masked)
                return
            if (said := _times_infinity(place, stray)) is not None:
                self._births.append(said)
                return
        elif stray is not None:
            born = place_born(stray) or place
            fix = "The data hold NaN or infinity: clean them where they are read (torch.nan_to_num), or drop such rows."
            read = isinstance(source.statement(born.file, born.line), ast.For)
            self._births.append(Source(born, "this is not finite already here", fix if read else ""))
            return
        self._births.append(_broken(place, name, given, values, node))


def _broken(
    place: Place, name: str, given: list[torch.Tensor], values: torch.Tensor, node: ast.expr | None
) -> Source:
    """An operation whose result is not finite, though what it is given is."""
    plain, dtype = name.strip("_"), _dtype(values)
    why = f"the result of {plain} is not finite here, though what it is given is"
    first = payload_of(given[0]) if given else values
    if not first.numel():
        said = mends_values.of_nothing(place.file, node, plain)
        return Source(place, f"nothing is left here, and the {plain} of no element is NaN", *said)
    infinite = bool((values.detach().abs() == float("inf")).any()) if values.numel() else False
    zero = mends_values.of_zero(place, name, dtype, node)
    if zero is not None and (not infinite or plain not in _OVERFLOWS):
        where = _where(place, zero[1])
        if where.line != place.line:
            why = f"this is meant to guard line {place.line}, whose result ({plain}) is not finite"
        return Source(where, why, *zero)
    if infinite and dtype == "float16":
        why = f"the result of {plain} is beyond what float16 can hold (65504)"
        return Source(
            place,
            why,
            *mends_values.in_float32(place.file, node, _half_weights()),
            beyond=True,
        )
    if infinite and plain in ("exp", "exp2", "expm1"):
        return Source(place, why, *mends_values.of_exp(place.file, node, plain))
    return Source(place, why)


def _half_weights() -> bool:
    """Whether layers of the program are in float16 themselves."""
    machine = state.machine()
    weights = (p for module in (machine.modules if machine else ()) for p in module._parameters.values())
    return any(weight is not None and weight.dtype is torch.float16 for weight in weights)


def _where(place: Place, edits: list[Edit]) -> Place:
    """The line to change, where it is another one than the line that breaks: an eps that is set elsewhere."""
    return source.place(edits[0].file, edits[0].start[0]) if len(edits) == 1 else place


def _times_infinity(place: Place, stray: torch.Tensor) -> Source | None:
    """A number that float16 cannot hold, kept in a tensor that was cast to it: the line that wrote the number."""
    machine = state.machine()
    held = owners.attributes_of(stray, list(machine.modules) if machine is not None else ())
    puts = (deeds.placement(attribute.module, attribute.name) for attribute in held)
    lines = [origin.resolve(put.line) for put in puts if put is not None]
    written = [source.place(line.file, line.line) for line in lines if line is not None]
    born = [place_born(stray) or place, place]
    found = mends_values.of_infinite([*written, *born], _dtype(payload_of(stray)))
    return Source(found[0], "this number is infinite in float16", *found[1:]) if found is not None else None


def _too_large(args: tuple[Any, ...]) -> bool:
    """Whether a plain number beyond float16 takes part: a penalty that hides what it is added to."""
    return any(isinstance(a, int | float) and abs(a) > 65504 for a in args)


def _flat(name: str, args: tuple[Any, ...]) -> bool:
    """A power of 1 and more has a slope of 0 or a number at 0."""
    power = args[1] if name.strip("_") == "pow" and len(args) > 1 else 0
    return isinstance(power, int | float) and power >= 1


def _dtype(values: torch.Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _dtype_code(place: Place, values: torch.Tensor) -> str:
    """The type of what is masked, as code: by the name of the tensor if it has one."""
    for call in source.call_on(place.file, place.line):
        fills = isinstance(call.func, ast.Attribute) and call.func.attr.startswith("masked_fill")
        filled = call.func.value if isinstance(call.func, ast.Attribute) and fills else None
        if isinstance(filled, ast.Name | ast.Attribute) and ast.unparse(filled) != "torch":
            return f"{ast.unparse(filled)}.dtype"
    return str(values.dtype)


def _hides_a_row(values: torch.Tensor) -> bool:
    """Whether everything along the last dimension is -inf somewhere: softmax has nothing to share out."""
    with torch.no_grad():
        return bool(values.dim() and (values.detach() == float("-inf")).all(-1).any())


def _asking(frame: FrameType) -> FrameType:
    """The line that called a torch function: one that is written in Python is reached through torch's own files."""
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are numbers; true of what has none."""
    if not values.is_floating_point() or not values.numel() or values.device.type == "meta":
        return True
    # No mode has to see what is asked of plain values.
    plain = type(values) in _PLAIN
    past: AbstractContextManager[object] = past_dispatch() if plain else nullcontext()
    with past, torch.no_grad():
        values = wide(values)
        # A sum of numbers of which one is not finite is not finite. It may be infinite by itself.
        return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def wide(values: torch.Tensor) -> torch.Tensor:
    """The values in a type that can be computed with: eight-bit floats can only be converted."""
    values = values.detach()
    return values.float() if values.dtype.itemsize == 1 else values


def _is_mask(values: torch.Tensor) -> bool:
    """Only finite numbers and -inf: as attention masks have."""
    with torch.no_grad():
        values = wide(values)
        return not bool((torch.isnan(values) | (values == float("inf"))).any())


def _steep_where(name: str, args: tuple[Any, ...], values: torch.Tensor) -> str:
    """For which element the slope of a function is infinite, in words; nothing if for none."""
    if name[0] == "a":
        return "what it is given is 1 or -1" if bool((payload_of(args[0]).abs() == 1).any()) else ""
    return "its result is 0" if bool((values == 0).any()) else ""
