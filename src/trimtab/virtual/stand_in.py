"""A number in the place of one that was never computed: it prints as `?`, and tells when a program decides by it.

Arithmetic with it gives another such number. It is never shown as a result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

SHOWN = "?"


class _Unknown:
    """What both kinds of number have in common."""

    decided: Callable[[], None]

    def __new__(cls, value: Any, decided: Callable[[], None]) -> Any:
        made: Any = super().__new__(cls, value)  # type: ignore[call-arg]
        made.decided = decided
        return made

    def __repr__(self) -> str:
        return SHOWN

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return SHOWN

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class StandIn(_Unknown, float):
    """A float that stands for an unknown one. `decided` is told when a program compares it."""

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __round__(self, digits: Any = None) -> Any:
        return self

    def __bool__(self) -> bool:
        self.decided()
        return bool(float(self))

    def __reduce__(self) -> Any:
        return again, (float(self),)


class WholeStandIn(_Unknown, int):
    """A whole number that stands for an unknown one: a score. `decided` is told when a program compares it."""

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __bool__(self) -> bool:
        self.decided()
        return int(self) != 0

    def __reduce__(self) -> Any:
        return again, (int(self),)


told_by: Callable[[], Callable[[], None] | None] | None = None
"""Who is told when a program decides by a number that it has read back; nobody where numbers are what they are."""


def again(value: float) -> Any:
    """What was written of such a number, read back: unknown as before, where tensors have shapes only."""
    decided = told_by() if told_by is not None else None
    if decided is None:
        return value
    return StandIn(value, decided) if isinstance(value, float) else WholeStandIn(value, decided)


def _arithmetic(name: str, kind: type = float) -> Callable[[Any, Any], Any]:
    own = getattr(kind, name)

    def compute(self: Any, *other: Any) -> Any:
        if name in ("__sub__", "__rsub__") and other[0].__class__ is self.__class__ is StandIn:
            return StandIn(1.0, self.decided)  # two that nobody knows are not the same number
        try:
            found = (
                getattr(float, name)(float(self), *other)
                if isinstance((*other, 0)[0], float)
                else own(self, *other)
            )
        except (ZeroDivisionError, OverflowError):
            found = math.nan
        if isinstance(found, float):
            return StandIn(found, self.decided)
        return WholeStandIn(found, self.decided) if isinstance(found, int) else found

    return compute


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    own = getattr(operator, name)

    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if other is not self and math.isfinite(other):
            # Else it is asked whether it is finite at all (so does json): numbers are taken to be.
            self.decided()
        return own(float(self), float(other))

    return compare


def nested(values: Any, decided: Callable[[], None]) -> Any:
    """Lists of numbers, with stand-ins for the floating-point ones."""
    if isinstance(values, list):
        return [nested(value, decided) for value in values]
    return StandIn(values, decided) if isinstance(values, float) else values


def unknown_array(array: Any, decided: Callable[[], None]) -> Any:
    """An array of numpy whose numbers stand in for others, also after sums and means over it."""
    kind = _array_kind(array.__class__)
    made = array.view(kind)
    made.decided = decided
    return made


@cache
def _array_kind(base: Any) -> Any:
    """A kind of array that gives out stand-ins. (numpy is there when a program asks for an array, and not before.)"""

    def __array_finalize__(self: Any, source: Any) -> None:
        self.decided = getattr(source, "decided", lambda: None)

    def item(self: Any, *index: Any) -> Any:
        return nested(base.item(self, *index), self.decided)

    def tolist(self: Any) -> Any:
        return nested(base.tolist(self), self.decided)

    def shown(self: Any, *spec: Any) -> str:
        return SHOWN

    methods: dict[str, Any] = {"__array_finalize__": __array_finalize__, "item": item, "tolist": tolist}
    return type(
        "UnknownArray", (base,), {**methods, **dict.fromkeys(("__format__", "__str__", "__repr__"), shown)}
    )


for _kind, _base in ((StandIn, float), (WholeStandIn, int)):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _arithmetic(f"__{_name}__", _base))
        setattr(_kind, f"__r{_name}__", _arithmetic(f"__r{_name}__", _base))
    for _name in ("neg", "pos", "abs"):
        setattr(_kind, f"__{_name}__", _arithmetic(f"__{_name}__", _base))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _comparison(_name))
