"""The completion's side: runs its code and answers for its names. Is never told a test or a verdict."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import types
from typing import Any

from .asking import ASKED, base_of
from .wire import Gone, Side, builtin_error, changes, known_module

PRINTED = 2**20
"""So many characters of what a completion prints reach a test, and no more."""


class Worker(Side):
    """Runs the completion's code, and answers for its names."""

    def __init__(self, wire: socket.socket) -> None:
        super().__init__(wire)
        # The code is the main module, as in a script of its own: dataclasses and type hints look names up there.
        self.main = sys.modules["__main__"] = types.ModuleType("__main__")

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
            answer = {"error": self.told(error)}
        if printed.getvalue():
            answer["printed"] = printed.getvalue()[:PRINTED]
        self.send(answer)

    def told(self, error: BaseException) -> list[Any]:
        """An error as it travels: the names of Python's own that it goes by, its class, and what is in it."""
        names = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
        with contextlib.suppress(Exception):
            kind = None if type(error).__module__ == "builtins" else self.encode(type(error))
            inside = {name: self.encode(value) for name, value in vars(error).items() if name[:2] != "__"}
            return [names, kind, [self.encode(a) for a in error.args], inside, str(error)]
        return [names, None, [], {}, ""]

    def do(self, message: dict[str, Any]) -> dict[str, Any]:
        what, sent = message["ask"], dict(enumerate(message["args"])) | message["kwargs"]
        given = {key: self.decode(value) for key, value in sent.items()}
        args = [value for key, value in given.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        if what == "load":
            exec(compile(args[0], "<completion>", "exec", dont_inherit=True), vars(self.main))
            result = None
        elif what == "name":
            result = vars(self.main)[args[0]]
        else:
            result = ASKED[what](*args, **kwargs)
        answer: dict[str, Any] = {"value": None}
        changed = {
            key: new
            for key, value in given.items()
            if changes(value) and (new := self.encode(value)) != sent[key]
        }
        if changed:
            answer["changed"] = changed
        same = [k for k, v in given.items() if v is result and changes(v)]
        if same:
            answer["same"] = str(same[0])
        else:
            answer["value"] = self.encode(result)
        return answer

    def refer(self, value: Any) -> list[Any]:
        if isinstance(value, Callback):
            return ["yours", value.number]
        if isinstance(value, types.ModuleType) and known_module(value.__name__):
            return ["module", value.__name__]
        if isinstance(value, types.CoroutineType):
            return ["coroutine", self.number(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            if known_module(value.__module__):
                return ["known", value.__module__, value.__qualname__]
            bases = [self.encode(base) for base in value.__bases__ if issubclass(base, BaseException)]
            return ["exception", self.number(value), value.__name__, bases]
        own = type(value).__module__ == "__main__"
        return ["mine", self.number(value), type(value).__name__, own and base_of(value) is not None]

    def follow(self, tag: str, rest: list[Any]) -> Any:
        if tag == "yours":
            return self.given[rest[0]]
        if tag == "lazy":
            return Lazy(self, rest[0])
        if tag == "error":
            return builtin_error(rest[0], [self.decode(part) for part in rest[1]])
        return Callback(self, rest[0])

    def error(self, told: Any) -> BaseException:
        return builtin_error(told[0])


class Callback:
    """A function of a test's, as the completion sees it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.worker.ask("__call__", self, *args, **kwargs)


class Lazy(Callback):
    """An iterator of a test's: what it gives is asked for one by one, since it may have no end."""

    def __iter__(self) -> Lazy:
        return self

    def __next__(self) -> Any:
        return self.worker.ask("__next__", self)
