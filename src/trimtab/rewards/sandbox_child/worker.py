"""The completion's side: runs its code and answers for its names. Is never told a test or a verdict."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import types
from collections import deque
from typing import Any

from .asking import ASKED
from .wire import Gone, Side, builtin_error, known_module, plain_type


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
            if isinstance(value, list | dict | set | deque | bytearray)
            and plain_type(value) is type(value)
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
        if isinstance(value, types.ModuleType) and known_module(value.__name__):
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
        return builtin_error(told[0])


class Callback:
    """A function of a test's, as the completion sees it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.number = worker, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.worker.ask("__call__", self, *args, **kwargs)
