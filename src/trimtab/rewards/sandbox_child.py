"""The two processes behind a run of unit tests: a worker runs the completion's code, a judge runs the tests.

The judge never executes anything of the completion's, and the worker is never told a test or a verdict. Where a test
uses a name of the completion, the judge asks the worker; answers come as plain data, or as references to objects that
stay with the worker. Started by path (`python -I sandbox_child.py judge …`); imports the standard library alone.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import operator
import os
import socket
import sys
import types
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

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
COLLECTIONS: dict[type, str] = {
    **{list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"},
}
FROM_PLAIN = {tag: back for tag, _, back in PLAIN.values()}
FROM_COLLECTION: dict[str, Any] = {tag: kind for kind, tag in COLLECTIONS.items()}
SAFE_INTEGER = 2**53
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
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "await": lambda coroutine: _waited(coroutine),
}
"""What the judge may ask of an object of the worker's."""


def _waited(coroutine: Any) -> Any:
    import asyncio  # slow to import, and seldom needed

    return asyncio.run(coroutine)


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
        for key, new in message.get("changed", {}).items():
            _refill(kwargs[key] if key in kwargs else args[int(key)], self.decode(new))
        if "same" in message:
            key = message["same"]
            return kwargs[key] if key in kwargs else args[int(key)]
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
        try:
            line = self.stream.readline()
            message = json.loads(line)
        except (OSError, ValueError):
            raise Gone from None
        if not isinstance(message, dict):
            raise Gone
        return message

    def number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.given)
            self.given.append(value)
        return self.numbers[id(value)]

    def encode(self, value: Any) -> Any:
        kind: Any = _plain_type(value)
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


def _plain_type(value: Any) -> type | None:
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


class Worker(Side):
    """Runs the completion's code, and answers for its names."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(wire)
        self.space: dict[str, Any] = {"__name__": "__main__"}

    def run(self) -> None:
        while True:
            self.serve(self.receive())

    def serve(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                answer = self.do(message)
        except BaseException as error:
            # An exit, too, is what the code did; whether it may is for the test to say.
            if isinstance(error, Gone):
                raise
            names = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
            kind = self.encode(type(error)) if type(error).__module__ == "__main__" else None
            with contextlib.suppress(Exception):
                answer = {"error": [names, kind, [self.encode(a) for a in error.args]]}
            answer = answer or {"error": [names, None, []]}
        if printed.getvalue():
            answer["printed"] = printed.getvalue()
        self.send(answer)

    def do(self, message: dict[str, Any]) -> dict[str, Any]:
        what, sent = message["ask"], dict(enumerate(message["args"])) | message["kwargs"]
        given = {key: self.decode(value) for key, value in sent.items()}
        args = [value for key, value in given.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        if what == "load":
            exec(compile(args[0], "<completion>", "exec"), self.space)
            result = None
        elif what == "name":
            result = self.space[args[0]]
        else:
            result = ASKED[what](*args, **kwargs)
        answer: dict[str, Any] = {"value": None}
        changed = {
            key: new
            for key, value in given.items()
            if isinstance(value, list | dict | set | deque | bytearray)
            and _plain_type(value) is type(value)
            and (new := self.encode(value)) != sent[key]
        }
        if changed:
            answer["changed"] = changed
        same = [k for k, v in given.items() if v is result and isinstance(v, list | dict | set | deque)]
        if same:
            answer["same"] = str(same[0])
        else:
            answer["value"] = self.encode(result)
        return answer

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, Callback):
            return ["yours", value.number]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", self.number(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(b.__name__ for b in value.__mro__ if b.__module__ == "builtins")
            return ["exception", self.number(value), value.__name__, base]
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return ["numpy", str(value.dtype), self.encode(value.tolist())]
        return ["mine", self.number(value)]

    def follow(self, tag: str, rest: list[Any]) -> Any:
        if tag == "yours":
            return self.given[rest[0]]
        if tag == "iterator":
            return iter(self.decode(rest[0]))
        return Callback(self, rest[0])

    def error(self, told: Any) -> BaseException:
        return _builtin_error(told[0])


class Callback:
    """A function of a test's, as the completion sees it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.worker.ask("call", self, *args, **kwargs)


class Judge(Side):
    """Runs the tests. Of what the worker asks, it grants one thing: a call of a function that a test handed over."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(wire)
        self.proxies: dict[int, Any] = {}
        self.unsupported = ""

    def passes(self, test: str) -> bool:
        """Whether a test runs to its end, and the worker is still there then."""
        try:
            exec(compile(test, "<test>", "exec"), Space(self))
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
        if message["ask"] != "call" or target[0] != "yours":
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
        if tag == "module":
            return importlib.import_module(rest[0])
        if tag == "numpy":
            numpy, value = importlib.import_module("numpy"), self.decode(rest[1])
            return (
                numpy.array(value, rest[0]) if isinstance(value, list) else numpy.dtype(rest[0]).type(value)
            )
        number = rest[0]
        if number not in self.proxies:
            made: Any = Proxy(self, number)
            if tag == "exception":
                made = type(rest[1], (_builtin_error([rest[2]]).__class__,), {})
            self.proxies[number] = made
        found = self.proxies[number]
        return self.awaiting(found) if tag == "coroutine" else found

    async def awaiting(self, coroutine: Any) -> Any:
        return self.ask("await", coroutine)

    def error(self, told: Any) -> BaseException:
        names, own, args = told
        kind = type(_builtin_error(names)) if own is None else self.decode(own)
        made = kind(*map(self.decode, args))
        assert isinstance(made, BaseException)
        return made


def _builtin_error(names: list[str]) -> BaseException:
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            with contextlib.suppress(TypeError):  # UnicodeError's want five arguments
                return kind()
    return Exception()


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _asked(self, "call", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _asked(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _asked(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _asked(self, "delattr", name)


def _asked(proxy: Proxy, what: str, *args: Any, **kwargs: Any) -> Any:
    judge: Judge = object.__getattribute__(proxy, "_judge")
    return judge.ask(what, proxy, *args, **kwargs)


def _forward(name: str) -> Callable[..., Any]:
    def plain(self: Proxy, *args: Any) -> Any:
        return _asked(self, name, *args)

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


def isolate(megabytes: int, seconds: float) -> bool:
    """Take this process's rights away; whether the network is out of reach."""
    import ctypes
    import resource

    try:
        libc = ctypes.CDLL(None, use_errno=True)
        isolated = bool(libc.unshare(0x10000000 | 0x40000000) == 0)  # a user and a network namespace
        libc.prctl(4, 0, 0, 0, 0)  # not dumpable: no other process of this user may look into it
    except (OSError, AttributeError):
        isolated = False

    def limit(what: int, value: int) -> None:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))

    limit(resource.RLIMIT_CPU, int(seconds) + 1)
    limit(resource.RLIMIT_FSIZE, 2**20)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 64)
    if sys.platform != "darwin":
        limit(resource.RLIMIT_AS, megabytes * 2**20)
    limit(resource.RLIMIT_NPROC, 0)
    return isolated


def work(wire: socket.socket, megabytes: int, seconds: float) -> None:
    isolated = isolate(megabytes, seconds)
    worker = Worker(wire)
    worker.send({"isolated": isolated})
    with contextlib.suppress(Gone):
        worker.run()


def judge(wire: socket.socket, megabytes: int, seconds: float) -> None:
    """Read the job, run its tests, and write the verdict, which only this process can."""
    job = json.loads(sys.stdin.buffer.read())
    verdicts = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    isolate(megabytes, seconds)
    side = Judge(wire)
    isolated, passed = False, [False] * len(job["tests"])
    # Whatever comes of loading the code, an exit too, no test has passed then.
    with contextlib.suppress(BaseException):
        isolated = bool(side.receive()["isolated"])
        side.ask("load", job["code"])
        passed = [side.passes(test) for test in job["tests"]]
    verdict = {"word": job["word"], "passed": passed, "isolated": isolated, "unsupported": side.unsupported}
    verdicts.write(json.dumps(verdict))
    verdicts.flush()


def main() -> NoReturn:
    sys.set_int_max_str_digits(0)
    role, wire, megabytes, seconds = sys.argv[1:]
    run = {"judge": judge, "worker": work}[role]
    del sys.argv[1:]
    run(socket.socket(fileno=int(wire)), int(megabytes), float(seconds))
    # Threads and atexit functions that a completion left behind have no say.
    os._exit(0)


if __name__ == "__main__":
    main()
