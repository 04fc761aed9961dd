"""What the judge may ask of an object that stays with the worker: operators, conversions, calls, attributes."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

ORDER = ("lt", "le", "gt", "ge")
JOINING = ("add", "mul", "matmul", "pow", "lshift", "rshift")
DIFFERENCES = ("sub", "truediv", "floordiv", "mod", "and", "or", "xor")
"""By which a test asks how far an answer is from the right one: see `proxy`."""
ARITHMETIC = (*JOINING, *DIFFERENCES)


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


BASES: dict[type, Callable[[Any], Any]] = {
    # by the base's own methods, whatever the class says of itself
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    list: lambda value: list.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    dict: lambda value: {key: dict.__getitem__(value, key) for key in dict.__iter__(value)},
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    deque: lambda value: deque(deque.__iter__(value)),
}


def base_of(value: Any) -> type | None:
    """The plain type that a class of the completion's is derived from."""
    return next((kind for kind in type(value).__mro__ if kind in BASES), None)


def _base(value: Any) -> Any:
    kind = base_of(value)
    if kind is None:
        raise TypeError("no plain value")
    return BASES[kind](value)


def _state(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """All that is inside an object, as plain data."""
    if id(value) in seen:
        return ["round", seen.index(id(value))]
    seen = (*seen, id(value))
    kind = type(value)
    if kind in BASES:
        if isinstance(value, dict):
            return ["dict", [[_state(k, seen), _state(v, seen)] for k, v in value.items()]]
        if isinstance(value, list | tuple | deque):
            return [kind.__name__, [_state(part, seen) for part in value]]
        return value
    if value is None or kind is bool or kind.__module__ != "__main__":
        return value
    base = base_of(value)
    inside: list[Any] = [] if base is None else [_state(BASES[base](value), seen)]
    with contextlib.suppress(AttributeError):
        inside += [[k, _state(v, seen)] for k, v in object.__getattribute__(value, "__dict__").items()]
    for part in kind.__mro__:
        slots = vars(part).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                inside.append([name, _state(object.__getattribute__(value, name), seen)])
    return ["object", kind.__qualname__, inside]


def _left(manager: Any, error: BaseException | None) -> bool:
    return bool(manager.__exit__(type(error) if error else None, error, None))


ASKED: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("eq", "ne", *ORDER, *ARITHMETIC)},
    **{f"__r{name}__": _swapped(getattr(operator, f"__{name}__")) for name in ARITHMETIC},
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in ARITHMETIC},
    **{name: getattr(operator, name) for name in ("__getitem__", "__setitem__", "__delitem__")},
    **{
        f"__{f.__name__}__": f
        for f in (len, iter, next, reversed, bool, hash, str, repr, float, int, abs, format)
    },
    **{f"__{name}__": getattr(operator, name) for name in ("index", "neg", "pos", "invert")},
    "__enter__": lambda manager: manager.__enter__(),
    "__exit__": _left,
    # As the classes are, whatever a metaclass says.
    "__instancecheck__": lambda kind, value: type.__instancecheck__(kind, value),
    "__subclasscheck__": lambda kind, other: type.__subclasscheck__(kind, other),
    "__call__": lambda function, *args, **kwargs: function(*args, **kwargs),
    **{f"__{f.__name__}__": f for f in (getattr, setattr, delattr)},
    "await": lambda coroutine: _waited(coroutine),
    "__anext__": lambda generator: _waited(generator.__anext__()),
    "__aiter__": lambda generator: generator.__aiter__(),
    "__aenter__": lambda manager: _waited(manager.__aenter__()),
    "__aexit__": lambda manager: _waited(manager.__aexit__(None, None, None)),
    "base": _base,
    "state": _state,
}
"""What the judge may ask of an object of the worker's."""


def _waited(coroutine: Any) -> Any:
    import asyncio  # slow to import, and seldom needed

    async def wait() -> Any:  # also for what can be awaited and is no coroutine
        return await coroutine

    return asyncio.run(wait())
