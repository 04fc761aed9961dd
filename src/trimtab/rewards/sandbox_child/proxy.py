"""An object of the completion's, as a test sees it: it can be used, but it does not decide whether a test passes.

A test is decided by plain data, which the judge compares itself. So an object

- never equals plain data, unless it is derived from a plain type; then its plain value is compared, by the judge;
- equals another object where its class says so *and* what is inside both is equal too, or its class has been seen to
  tell objects apart in a test that passed (`Judge.believed`);
- comes before another only where the other does not come before it;
- holds what it gives when it is gone through, not what it says that it holds;
- has, where a test expects text, a number or a set (what a function gives, not what a class of the test's choice
  makes), no `startswith`, `isdigit`, `issubset` of its own to say yes with;
- that is less, divided by or otherwise set against plain data, gives no number, length or truth any more:
  `abs(f(2) - 4) < 1e-6` would be answered by a `__sub__` that gives nothing;
- leaves a `with` without swallowing an error that a test did not raise by itself.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import decimal
import fractions
import operator
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .asking import ARITHMETIC, ASKED, DIFFERENCES, ORDER
from .wire import Unsupported

if TYPE_CHECKING:
    from .judge import Judge

_PLAIN_TYPES = (
    *(int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
    *(decimal.Decimal, fractions.Fraction, datetime.datetime, datetime.timedelta),
)
_OF_ARRAYS = {
    *(
        "all",
        "any",
        "sum",
        "mean",
        "std",
        "var",
        "min",
        "max",
        "prod",
        "item",
        "tolist",
        "flatten",
        "ravel",
        "flat",
    ),
    *(
        "T",
        "size",
        "shape",
        "ndim",
        "dtype",
        "norm",
        "nonzero",
        "round",
        "trace",
        "dot",
        "astype",
        "view",
        "reshape",
    ),
}
PLAIN_NAMES = {name for kind in _PLAIN_TYPES for name in dir(kind) if name[0] != "_"} | _OF_ARRAYS
PREDICATES = {name for name in PLAIN_NAMES if name.startswith("is")} | {
    "startswith",
    "endswith",
    "all",
    "any",
}
_ABOUT = {
    *(
        "__name__",
        "__qualname__",
        "__module__",
        "__doc__",
        "__dict__",
        "__annotations__",
        "__wrapped__",
        "__slots__",
    ),
    *(
        "__members__",
        "__init__",
        "__new__",
        "__bases__",
        "__mro__",
        "__defaults__",
        "__kwdefaults__",
        "__self__",
    ),
    *(
        "__func__",
        "__dataclass_fields__",
        "__match_args__",
        "__abstractmethods__",
        "__post_init__",
        "__version__",
    ),
}
"""What is told about an object under a name of Python's own; all else under such a name goes by the rules above."""
_NUMBERS = {
    "__len__": int,
    "__bool__": bool,
    "__hash__": int,
    "__float__": float,
    "__int__": int,
    "__index__": int,
}
_TEXTS = {"__str__": str, "__repr__": str, "__format__": str}
_CLOSED_TO_DIFFERENCES = {
    *(
        "__len__",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__abs__",
        "__iter__",
        "__next__",
        "__getitem__",
    ),
    *("__reversed__", "__call__"),
}


class Proxy:
    """See above. `made`: by a call of a class that the test names as one; `apart`: set against plain data."""

    __slots__ = ("_apart", "_base", "_judge", "_kind", "_made", "_number")

    def __init__(self, judge: Judge, number: int, has_base: bool) -> None:
        values = (False, has_base, judge, False, False, number)
        for name, value in zip(Proxy.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" and name not in _ABOUT:
            raise AttributeError(f"{name} of the completion's object is not for a test to call")
        if get(self, "_apart") and name in PLAIN_NAMES:
            raise AttributeError(f"an object that was set against plain data has no {name}")
        if name in PREDICATES and not get(self, "_made"):
            if get(self, "_base"):
                return getattr(get(self, "_judge").ask("base", self), name)
            raise AttributeError(f"an object in the place of plain data has no {name}")
        found = _asked(self, "__getattr__", name)
        if isinstance(found, Proxy) and named_as_class(name):
            put(found, "_kind", True)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = _asked(self, "__call__", *args, **kwargs)
        if isinstance(result, Proxy) and get(self, "_kind"):
            put(result, "_made", True)
            plain = [v for v in (*args, *kwargs.values()) if not isinstance(v, Proxy) and not callable(v)]
            get(self, "_judge").made_from.setdefault(get(result, "_number"), plain)
        return result

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Proxy):
            return self is other or bool(get(self, "_judge").believed(self, other))
        return bool(get(self, "_base") and get(self, "_judge").ask("base", self) == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, item: Any) -> bool:
        if get(self, "_base") and not isinstance(item, Proxy):
            return bool(item in get(self, "_judge").ask("base", self))
        return any(part is item or part == item for part in iter(self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Proxy) and _asked(self, "__instancecheck__", value) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Proxy) and _asked(self, "__subclasscheck__", kind) is True

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> bool:
        passed_on = error if isinstance(error, Exception) else None
        swallows = _asked(self, "__exit__", passed_on) is True
        return swallows and trace is not None and _raised_by_the_test(error, trace, get(self, "_judge").test)

    async def __anext__(self) -> Any:
        return _asked(self, "__anext__")

    async def __aenter__(self) -> Any:
        return _asked(self, "__aenter__")

    async def __aexit__(self, *_: object) -> bool:
        _asked(self, "__aexit__")
        return False


get, put = object.__getattribute__, object.__setattr__


def named_as_class(name: str) -> bool:
    """Whether a test, by how it writes a name, takes it for a class: a function's answer is expected to be plain."""
    return name.lstrip("_")[:1].isupper()


def kind_of(name: str, known: dict[str, type[Proxy]]) -> type[Proxy]:
    """The type of the proxies for a class of this name, so that a test reads it there."""
    if name not in known:
        known[name] = type(name, (Proxy,), {"__slots__": ()})
    return known[name]


def _asked(proxy: Proxy, what: str, *args: Any, **kwargs: Any) -> Any:
    judge: Judge = get(proxy, "_judge")
    result = judge.ask(what, proxy, *args, **kwargs)
    if isinstance(result, Proxy) and get(proxy, "_apart"):
        put(result, "_apart", True)
    return result


def _forward(name: str) -> Callable[..., Any]:
    word = name.strip("_")
    bare = word if word in ARITHMETIC else word[1:]
    promised = {**_NUMBERS, **_TEXTS}.get(name)

    def plain(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        if name in _CLOSED_TO_DIFFERENCES and get(self, "_apart"):
            raise TypeError("an object that was set against plain data gives none")
        result = _asked(self, name, *args, **kwargs)
        if promised and type(result) is not promised:
            raise TypeError(f"{name} gave a {type(result).__name__}")
        return result

    def ordered(self: Proxy, other: Any) -> bool:
        judge: Judge = get(self, "_judge")
        if not isinstance(other, Proxy):
            if get(self, "_base"):
                return bool(getattr(operator, word)(judge.ask("base", self), other))
            raise TypeError("an object does not come before or after plain data")
        if judge.ask(name, self, other) is not True:
            return False
        if judge.ask(name, other, self) is True and (word in ("lt", "gt") or not self == other):
            raise TypeError("each of two objects says that it comes before the other")
        return True

    def combined(self: Proxy, other: Any) -> Any:
        try:
            result = _asked(self, name, other)
        except Unsupported:
            raise TypeError("an object and plain data do not go together") from None
        if isinstance(other, Proxy):
            if isinstance(result, Proxy) and get(other, "_apart"):
                put(result, "_apart", True)
            return result
        if bare in DIFFERENCES:
            if isinstance(result, Proxy):
                put(result, "_apart", True)
            elif get(self, "_base"):
                base, apply = get(self, "_judge").ask("base", self), getattr(operator, f"__{bare}__")
                return apply(other, base) if word == f"r{bare}" else apply(base, other)
            else:
                raise TypeError("an object and plain data gave plain data")
        return result

    if word in ORDER:
        return ordered
    return combined if bare in ARITHMETIC else plain


for _name in ASKED:
    if _name.startswith("__") and _name not in vars(Proxy):
        setattr(Proxy, _name, _forward(_name))
Proxy.__hash__ = _forward("__hash__")  # type: ignore[method-assign]


def _raised_by_the_test(error: BaseException | None, trace: TracebackType, test: str) -> bool:
    """Whether the statement that raised it is a `raise`, or has no name in it but Python's own, as `1 / 0` has."""
    if isinstance(error, AssertionError) or trace.tb_next is not None:
        return False
    line = trace.tb_lineno
    found = [
        node
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line)
    ]
    inner = max(found, key=lambda node: node.lineno, default=None)
    if inner is None or isinstance(inner, ast.With):
        return False
    names = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)}
    return isinstance(inner, ast.Raise) or all(hasattr(builtins, name) for name in names)
