"""The tests' side: runs the tests and says which passed. Never executes anything of the completion's."""

from __future__ import annotations

import builtins
import importlib
import io
import socket
from collections.abc import Callable, Iterator
from typing import Any

from .asking import ARITHMETIC, ASKED, ORDER
from .wire import Gone, Side, Unsupported, builtin_error, known_module


class Judge(Side):
    """Runs the tests. Of what the worker asks, it grants one thing: a call of a function that a test handed over."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(wire)
        self.proxies: dict[int, Any] = {}
        self.unsupported = ""

    def passes(self, test: str) -> bool:
        """Whether a test runs to its end, and the worker is still there then."""
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), Space(self))
            self.ask("__bool__", 1)
        except BaseException as error:
            # Whatever a test raises, an exit or an interrupt too: it did not pass.
            if isinstance(error, Unsupported):
                self.unsupported = str(error)
            return False
        return True

    def heard(self, message: dict[str, Any]) -> None:
        if "printed" in message:
            print(message["printed"], end="")

    def serve(self, message: dict[str, Any]) -> None:
        target, *args = message["args"]
        if message["ask"] != "__call__" or target[0] != "yours":
            raise Gone
        kwargs = {name: self.decode(value) for name, value in message["kwargs"].items()}
        try:
            result = self.given[target[1]](*map(self.decode, args), **kwargs)
            answer = {"value": self.encode(result)}
        except Exception as error:
            names = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
            answer = {"error": [names, None, []]}
        self.send(answer)

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, Proxy):
            return ["yours", object.__getattribute__(value, "_number")]
        for number, proxy in self.proxies.items():
            if proxy is value:
                return ["yours", number]
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            return ["iterator", self.encode(list(value))]
        # A function is only ever called. An object of a class of the test's own would be more than that.
        if callable(value) and not isinstance(value, type) and type(value).__module__ != "__main__":
            return ["mine", self.number(value)]
        raise Unsupported(
            f"a test hands a {type(value).__name__} to the completion; what can be handed over is plain data "
            "(numbers, text, lists, dicts, sets, dates), functions, and what the completion made itself"
        )

    def follow(self, tag: str, rest: list[Any]) -> Any:
        if tag == "yours":
            return self.given[rest[0]]
        if tag == "module" and known_module(rest[0]):
            return importlib.import_module(rest[0])
        if tag == "numpy":
            numpy, value = importlib.import_module("numpy"), self.decode(rest[1])
            kind = numpy.dtype(rest[0])
            return numpy.array(value, kind) if isinstance(value, list) else kind.type(value)
        number = rest[0]
        if number not in self.proxies:
            made: Any = Proxy(self, number)
            if tag == "exception":
                made = type(rest[1], (builtin_error([rest[2]]).__class__,), {})
            self.proxies[number] = made
        found = self.proxies[number]
        return self.awaiting(found) if tag == "coroutine" else found

    async def awaiting(self, coroutine: Any) -> Any:
        return self.ask("await", coroutine)

    def error(self, told: Any) -> BaseException:
        names, own, args = told
        kind = type(builtin_error(names)) if own is None else self.decode(own)
        made = kind(*map(self.decode, args))
        assert isinstance(made, BaseException)
        return made


class Space(dict[str, Any]):
    """A test's names: its own, then the completion's as they are now, never one of Python's own built-in names."""

    def __init__(self, judge: Judge) -> None:
        super().__init__({"__name__": "__main__", "__builtins__": builtins})
        self._judge = judge

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self._judge.ask("name", name)


class Proxy:
    """An object that stays with the worker. Compared with plain data it differs, whatever its class says of itself."""

    def __init__(self, judge: Judge, number: int) -> None:
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)


def _asked(proxy: Proxy, what: str, *args: Any, **kwargs: Any) -> Any:
    judge: Judge = object.__getattribute__(proxy, "_judge")
    return judge.ask(what, proxy, *args, **kwargs)


def _forward(name: str) -> Callable[..., Any]:
    def plain(self: Proxy, *args: Any, **kwargs: Any) -> Any:
        return _asked(self, name, *args, **kwargs)

    def compared(self: Proxy, other: Any) -> Any:
        return _asked(self, name, other) if isinstance(other, Proxy) else NotImplemented

    def combined(self: Proxy, other: Any) -> Any:
        result = _asked(self, name, other)
        if not isinstance(other, Proxy) and not isinstance(result, Proxy):
            # `abs(f(2) - 4.0) < 1e-6` must not be answered by a __sub__ that always gives 0.0.
            raise TypeError("an object and plain data gave plain data")
        return result

    word = name.strip("_")
    if word in ORDER:
        return compared
    return combined if word in ARITHMETIC or word.removeprefix("r") in ARITHMETIC else plain


for _name in ASKED:
    if _name.startswith("__"):
        setattr(Proxy, _name, _forward(_name))
