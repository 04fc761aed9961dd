"""How the judge and the worker speak: one JSON message a line, plain data by value, all else by reference.

Knows nothing of tests or verdicts. What has no plain form is for each side to refer to and to follow.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import socket
import sys
from collections import deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

PLAIN: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    # type: its tag, to something that JSON has, and back
    complex: ("complex", lambda v: [v.real, v.imag], lambda p: complex(*p)),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    bytearray: ("bytearray", bytearray.hex, bytearray.fromhex),
    range: ("range", lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    slice: ("slice", lambda v: [v.start, v.stop, v.step], lambda p: slice(*p)),
    Decimal: ("decimal", str, Decimal),
    Fraction: ("fraction", str, Fraction),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda p: timedelta(*p)),
}
COLLECTIONS: dict[type, str] = {kind: kind.__name__ for kind in (list, tuple, set, frozenset, deque)}
FROM_PLAIN = {tag: back for tag, _, back in PLAIN.values()}
FROM_COLLECTION: dict[str, Any] = {tag: kind for kind, tag in COLLECTIONS.items()}
SAFE_INTEGER = 2**53


class Gone(BaseException):
    """The other process has ended, or speaks nonsense. No `except Exception` of a test may swallow it."""


class Unsupported(BaseException):
    """A test hands over what cannot travel: the test is at fault, not the completion."""


class Side:
    """One end of the wire. While it waits for an answer, it serves what the other end asks."""

    def __init__(self, wire: socket.socket) -> None:
        self.stream = wire.makefile("rwb")
        self.given: list[Any] = []
        self.numbers: dict[int, int] = {}

    def ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        request: dict[str, Any] = {"ask": what, "args": [self.encode(a) for a in args]}
        request["kwargs"] = {name: self.encode(value) for name, value in kwargs.items()}
        self.send(request)
        while "ask" in (message := self.receive()):
            self.serve(message)
        self.heard(message)
        given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        for key, new in message.get("changed", {}).items():
            _refill(given[key], self.decode(new))
        if "same" in message:
            return given[message["same"]]
        if "error" in message:
            raise self.error(message["error"])
        return self.decode(message["value"])

    def heard(self, message: dict[str, Any]) -> None:
        """Look at an answer before it is taken."""

    def serve(self, message: dict[str, Any]) -> None:
        """Do what was asked, and send what came of it."""
        raise NotImplementedError

    def error(self, told: Any) -> BaseException:
        raise NotImplementedError

    def refer(self, value: Any) -> list[Any]:
        """How something travels that has no plain form."""
        raise NotImplementedError

    def follow(self, tag: str, rest: list[Any]) -> Any:
        """What such a reference stands for here."""
        raise NotImplementedError

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.stream.write(json.dumps(message).encode() + b"\n")
            self.stream.flush()
        except OSError:
            raise Gone from None

    def receive(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            message = json.loads(self.stream.readline())
            if isinstance(message, dict):
                return message
        raise Gone

    def number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.given)
            self.given.append(value)
        return self.numbers[id(value)]

    def encode(self, value: Any) -> Any:
        kind: Any = plain_type(value)
        if value is None or kind in (bool, str, float):
            return value if value is None or kind is type(value) else kind(value)
        if kind is int:
            return int(value) if -SAFE_INTEGER < value < SAFE_INTEGER else ["int", hex(value)]
        if kind in PLAIN:
            tag, there, _ = PLAIN[kind]
            return [tag, there(value)]
        if kind is tuple and hasattr(value, "_fields"):
            return ["named", type(value).__name__, list(value._fields), [self.encode(v) for v in value]]
        if kind in COLLECTIONS:
            return [COLLECTIONS[kind], [self.encode(v) for v in value]]
        if kind is dict:
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        name = value.__name__ if isinstance(value, type) else ""
        if name and getattr(builtins, name, None) is value:
            return ["builtin", name]
        return self.refer(value)

    def decode(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        tag, *rest = data
        if tag == "int":
            return int(rest[0], 16)
        if tag in FROM_PLAIN:
            return FROM_PLAIN[tag](rest[0])
        if tag in FROM_COLLECTION:
            return FROM_COLLECTION[tag](self.decode(v) for v in rest[0])
        if tag == "dict":
            return {self.decode(k): self.decode(v) for k, v in rest[0]}
        if tag == "named":
            return namedtuple(rest[0], rest[1])(*map(self.decode, rest[2]))
        if tag == "builtin" and isinstance(found := getattr(builtins, rest[0], None), type):
            return found
        return self.follow(tag, rest)


def plain_type(value: Any) -> type | None:
    """The plain type that a value travels as. A class of the completion's own is none; one of a library's may be."""
    kind = type(value)
    for base in kind.__mro__:
        if base in PLAIN or base in COLLECTIONS or base in (bool, int, float, str, dict):
            own = kind.__module__ == "__main__" and not hasattr(kind, "_fields")
            return None if own and base is not kind else base
    return None


def _refill(old: Any, new: Any) -> None:
    """What a function changed in a list, dict or set that it was given."""
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)


def builtin_error(names: list[str]) -> BaseException:
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):  # UnicodeError's want five arguments
                return kind()
    return Exception()


def known_module(name: str) -> bool:
    """Whether the judge may import a module that the completion has: not one that the completion could have written."""
    return name.partition(".")[0] in {*sys.stdlib_module_names, "numpy"}
