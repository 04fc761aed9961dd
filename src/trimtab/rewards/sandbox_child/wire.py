"""How the judge and the worker speak: one JSON message a line, plain data by value, all else by reference.

Knows nothing of tests or verdicts. What has no plain form is for each side to refer to and to follow.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import socket
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
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
DICTS: dict[type, str] = {Counter: "counter", OrderedDict: "ordered", dict: "dict"}
FROM_DICT: dict[str, Any] = {tag: kind for kind, tag in DICTS.items()}
FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple, bool)}
MUTABLE = (list, dict, set, deque, bytearray, Counter, OrderedDict, defaultdict)
SAFE_INTEGER = 2**53
LONGEST = 64 * 2**20
"""More bytes than this are no answer."""


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
        given = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        with self.taken_at_its_word():
            self.heard(message)
            for key, new in message.get("changed", {}).items():
                if not changes(given[key]):
                    raise Gone
                _refill(given[key], self.decode(new))
            if "same" in message:
                return given[message["same"]]
            if "error" not in message:
                return self.decode(message["value"])
            error = self.error(message["error"])
        raise error

    @contextlib.contextmanager
    def taken_at_its_word(self) -> Iterator[None]:
        """What cannot be read is no answer: the other side is as good as gone, and no test may make light of it."""
        try:
            yield
        except Exception:
            raise Gone from None

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
        with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError):
            message = json.loads(self.stream.readline(LONGEST))
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
            pairs = [[self.encode(k), self.encode(v)] for k, v in value.items()]
            factory = getattr(getattr(value, "default_factory", None), "__name__", "")
            if type(value) is defaultdict and factory in FACTORIES:
                return ["default", factory, pairs]
            return [DICTS.get(type(value), "dict"), pairs]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return ["numpy", str(value.dtype), list(value.shape), self.encode(value.tolist())]
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
        if tag in FROM_DICT:
            return FROM_DICT[tag]({self.decode(k): self.decode(v) for k, v in rest[0]})
        if tag == "default":
            return defaultdict(FACTORIES[rest[0]], {self.decode(k): self.decode(v) for k, v in rest[1]})
        if tag == "numpy":
            numpy, value = importlib.import_module("numpy"), self.decode(rest[2])
            kind = numpy.dtype(rest[0])
            return numpy.array(value, kind).reshape(rest[1]) if isinstance(value, list) else kind.type(value)
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
    elif type(old).__module__ == "numpy":
        old[...] = new
    else:
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)


def changes(value: Any) -> bool:
    """Whether a function can change what it was given, so that the giver has to be told."""
    return type(value) in MUTABLE or (type(value).__module__ == "numpy" and type(value).__name__ == "ndarray")


def builtin_error(names: list[str], args: list[Any] | None = None) -> BaseException:
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):  # UnicodeError's want five arguments
                return kind(*(args or []))
            with contextlib.suppress(TypeError):
                return kind()
    return Exception()


def known_module(name: str) -> bool:
    """Whether the judge may import a module that the completion has: not one that the completion could have written,
    nor one that does something when it is imported."""
    first, *rest = name.split(".")
    does = {"antigravity", "idlelib", "test", "this", "turtle", "turtledemo", "__main__"}
    return first in {*sys.stdlib_module_names, "numpy"} and not does & {first, *rest}
