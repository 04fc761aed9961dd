"""What the judge may ask of an object that stays with the worker: operators, conversions, calls, attributes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

ORDER = ("eq", "ne", "lt", "le", "gt", "ge")
ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


ASKED: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*ORDER, *ARITHMETIC)},
    **{f"__r{name}__": _swapped(getattr(operator, f"__{name}__")) for name in ARITHMETIC},
    **{name: getattr(operator, name) for name in ("__getitem__", "__setitem__", "__delitem__")},
    **{f"__{f.__name__}__": f for f in (len, iter, next, reversed, bool, hash, str, repr, float, int, abs)},
    **{f"__{name}__": getattr(operator, name) for name in ("index", "neg", "pos", "invert")},
    "__enter__": lambda manager: manager.__enter__(),
    "__exit__": lambda manager, *_: manager.__exit__(None, None, None),
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__call__": lambda function, *args, **kwargs: function(*args, **kwargs),
    **{f"__{f.__name__}__": f for f in (getattr, setattr, delattr)},
    "await": lambda coroutine: _waited(coroutine),
}
"""What the judge may ask of an object of the worker's."""


def _waited(coroutine: Any) -> Any:
    import asyncio  # slow to import, and seldom needed

    return asyncio.run(coroutine)
