"""The tests' side: runs the tests and says which passed. Never executes anything of the completion's."""

from __future__ import annotations

import builtins
import importlib
import io
import socket
from collections.abc import Iterator
from typing import Any

from .proxy import Proxy, get, kind_of, named_as_class, put
from .wire import Gone, Side, Unsupported, builtin_error, known_module

OTHERS = 8
"""So many other objects of a class are looked into before a comparison of theirs is taken for nothing."""


class Judge(Side):
    """Runs the tests. Of what the worker asks, it grants two things: a call of a function that a test handed over,
    and what an iterator that a test handed over gives next."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(wire)
        self.proxies: dict[int, Any] = {}
        self.kinds: dict[str, type[Proxy]] = {}
        self.unsupported = ""
        self.test = ""
        self.made_from: dict[int, list[Any]] = {}
        self.failed_inside = False
        self.leans_on: set[type] = set()
        self.tells_apart: set[type] = set()

    def judge(self, tests: list[str]) -> list[bool]:
        """Which tests passed. One that leans on a class's own word counts if that class has told objects apart."""
        results, seen = [], set()
        for test in tests:
            self.leans_on, self.tells_apart = set(), set()
            passed = self.passes(test)
            results.append((passed, self.leans_on))
            if passed:
                seen |= self.tells_apart
        return [passed and leans_on <= seen for passed, leans_on in results]

    def passes(self, test: str) -> bool:
        """Whether a test runs to its end, and the worker is still there then."""
        self.test, self.failed_inside = test, False
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), Space(self))
            self.ask("__bool__", 1)
        except BaseException as error:
            # Whatever a test raises, an exit or an interrupt too: it did not pass.
            if isinstance(error, Unsupported):
                self.unsupported = str(error)
            return False
        return not self.failed_inside

    def believed(self, one: Proxy, other: Proxy) -> bool:
        """Whether two objects are equal: as their class says, if what is inside them bears it out."""
        if self.ask("__eq__", one, other) is not True:
            self.tells_apart.add(type(one))
            return False
        if self.ask("__ne__", one, other) is not False:
            raise TypeError("two objects are equal and unequal")
        inside, there = self.ask("state", one), self.ask("state", other)
        if inside != there or not self.means_something(inside, one, other):
            self.leans_on.add(type(one))
        return True

    def means_something(self, inside: Any, *alike: Proxy) -> bool:
        """Whether the inside of these tells them from others: it has in it what they were made from, or another of
        their class has another inside. That of a class which keeps nothing is the same for all."""
        leaves = _leaves(inside)
        for one in alike:
            made_from = _leaves(self.made_from.get(get(one, "_number"), []))
            if made_from and all(leaf in leaves for leaf in made_from):
                return True
        kind = type(alike[0])
        others = [p for p in self.proxies.values() if type(p) is kind and not any(p is one for one in alike)]
        return any(self.ask("state", other) != inside for other in others[-OTHERS:])

    def heard(self, message: dict[str, Any]) -> None:
        if "printed" in message:
            print(message["printed"], end="")

    def serve(self, message: dict[str, Any]) -> None:
        with self.taken_at_its_word():
            target, *sent = message["args"]
            given = self.given[abs(target[1])]
            args, kwargs = (
                [*map(self.decode, sent)],
                {k: self.decode(v) for k, v in message["kwargs"].items()},
            )
        next_one = message["ask"] == "__next__" and isinstance(given, Iterator) and not args
        if target[0] != "yours" or not (next_one or message["ask"] == "__call__"):
            raise Gone
        try:
            answer = {"value": self.encode(next(given) if next_one else given(*args, **kwargs))}
        except Exception as error:
            # A test that asserts in a function that it hands over has failed, whoever catches that.
            self.failed_inside |= isinstance(error, AssertionError)
            names = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
            answer = {"error": [names, None, [], {}, ""]}
        self.send(answer)

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, Proxy):
            return ["yours", get(value, "_number")]
        for number, proxy in self.proxies.items():
            if proxy is value:
                return ["yours", number]
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            return ["lazy", self.number(value)]
        if isinstance(value, Exception):
            names = [base.__name__ for base in type(value).__mro__ if base.__module__ == "builtins"]
            return ["error", names, [str(part) for part in value.args]]
        # A function is only ever called. An object of a class of the test's own would be more than that.
        if callable(value) and not isinstance(value, type) and type(value).__module__ != "__main__":
            return ["mine", self.number(value)]
        raise Unsupported(
            f"a test hands a {type(value).__name__} to the completion; what can be handed over is plain data "
            "(numbers, text, lists, dicts, sets, dates), functions, and what the completion made itself"
        )

    def follow(self, tag: str, rest: list[Any]) -> Any:
        if tag == "yours":
            return self.given[abs(rest[0])]
        if tag == "module" and known_module(rest[0]):
            return importlib.import_module(rest[0])
        if tag == "known":
            return _known_error(rest[0], rest[1])
        number = int(rest[0])
        if number not in self.proxies:
            if tag == "exception":
                self.proxies[number] = _error_class(rest[1], [self.decode(base) for base in rest[2]])
            else:
                name, has_base = (str(rest[1]), bool(rest[2])) if tag == "mine" else ("coroutine", False)
                self.proxies[number] = kind_of(name, self.kinds)(self, number, has_base)
        found = self.proxies[number]
        return self.awaiting(found) if tag == "coroutine" else found

    async def awaiting(self, coroutine: Any) -> Any:
        return self.ask("await", coroutine)

    def error(self, told: Any) -> BaseException:
        names, own, sent, inside, text = told
        args = [*map(self.decode, sent)]
        if own is None:
            return builtin_error(names, args)
        kind = self.decode(own)
        made: BaseException = kind.__new__(
            kind, *args
        )  # what its class would do then was done with the worker
        made.args = tuple(args)
        vars(made).update({name: self.decode(value) for name, value in inside.items()}, told_text=str(text))
        return made


class Space(dict[str, Any]):
    """A test's names: its own, then the completion's as they are now, never one of Python's own built-in names."""

    def __init__(self, judge: Judge) -> None:
        super().__init__({"__name__": "__main__", "__builtins__": builtins})
        self._judge = judge

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        found = self._judge.ask("name", name)
        if isinstance(found, Proxy) and named_as_class(name):
            put(found, "_kind", True)
        return found


def _leaves(data: Any) -> list[Any]:
    """The single values in nested data."""
    if isinstance(data, dict):
        return [leaf for pair in data.items() for leaf in _leaves(list(pair))]
    if isinstance(data, list | tuple | set | frozenset):
        return [leaf for part in data for leaf in _leaves(part)]
    return [data]


def _known_error(module: str, name: str) -> type[BaseException]:
    found: Any = importlib.import_module(module) if known_module(module) else None
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, type)
    assert issubclass(found, BaseException)
    return found


def _error_class(name: str, bases: list[Any]) -> type[BaseException]:
    """A class of the completion's errors, as a test names it in an `except`."""
    assert bases
    assert all(isinstance(base, type) and issubclass(base, BaseException) for base in bases)

    def text(self: BaseException) -> str:
        return str(vars(self).get("told_text", BaseException.__str__(self)))

    return type(str(name), tuple(bases), {"__str__": text})
