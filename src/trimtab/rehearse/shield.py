"""Keeps what the rehearsal listens with out of the program's way: an error of a check is ours, and told as ours.

A check that fails is switched off; the program's own call goes on, made exactly once, and its own errors pass
unchanged. What ends a script on purpose (StopRehearsal, an interrupt) is no Exception and passes too. With
TRIMTAB_DEBUG set the traceback of a failed check is printed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.rehearse.checks.base import BaseCheck
    from trimtab.rehearse.process import Process

DEBUG = "TRIMTAB_DEBUG"
_BEYOND = "_trimtab_beyond"
"""Of a function in another's place that only looks at the outermost call: what stands behind all of its kind."""
_broken: set[str] = set()
_process: Process | None = None
_paused = False
_owner = ""
"""The check that is being put in: what it registers is its own."""


def watch_over(process: Process) -> None:
    """From now on, what fails is written into the records of this process."""
    global _process
    _process = process


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """What is called inside is no doing of the program: nobody looks at it."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What is called inside is no doing of the program and on no GPU: torch is for it as it is without a rehearsal."""
    from trimtab.virtual import functions
    from trimtab.virtual.held_modes import taken_away

    with paused(), functions.switched_off(), taken_away():
        yield


def is_paused() -> bool:
    """Whether what is called now is no doing of the program."""
    return _paused


def failed(name: str, error: Exception) -> None:
    """Switch a check off and say so, once."""
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    if name in _broken:
        return
    _broken.add(name)
    if _process is None:
        raise error  # no rehearsal is there to tell it
    said = (str(error).strip().splitlines() or [""])[0]
    text = f"the check {name} of Trimtab failed ({type(error).__name__}: {said}): what it looks for was not checked"
    _process.recorder.write(t="unproven", text=text)


def call(name: str, function: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
    """What a part of a check answers; where it is off, or fails, something else."""
    if name in _broken:
        return otherwise
    try:
        return function(*args)
    except Exception as error:
        if getattr(error, "_trimtab_recorded", False):
            raise  # a finding that stops the rank on purpose
        failed(name, error)
        return otherwise


def shielded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A listener that cannot raise."""

    @functools.wraps(function)
    def listener(*args: Any) -> Any:
        return call(name, function, *args)

    return listener


class _Passed:
    """A real function on its way through a check: what came of it, so that it need not be called again.

    Whatever it raises goes on unchanged, an interrupt and the end of a rehearsal too: it is only noted which it was.
    """

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self.called = False
        self.error: BaseException | None = None
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        try:
            self.result = self._real(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        return self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def around(
    owner: Any, name: str, call: Callable[..., Any], *, whose: str = "", outermost: bool = False
) -> None:
    """Let `call` stand in a function's place, keeping its name and signature; it is given the real one first.

    With `outermost`, what the real function calls again itself (a module asks each of its parts for its state) goes
    past it: a model has thousands of parts, and who asked for the whole is known.
    """
    real = getattr(owner, name)
    whose = whose or owner_of(call)
    again = inspect.unwrap(real).__code__ if outermost else None
    beyond = getattr(real, _BEYOND, real)

    @functools.wraps(real)
    def instead(*args: Any, **kwargs: Any) -> Any:
        if again is not None and sys._getframe(1).f_code is again:
            return beyond(*args, **kwargs)
        if whose in _broken or _paused:
            return real(*args, **kwargs)
        passed = _Passed(real)
        try:
            try:
                return call(passed, *args, **kwargs)
            except Exception as error:
                if error is passed.error or getattr(error, "_trimtab_recorded", False):
                    raise
                failed(whose, error)
            if passed.error is not None:
                raise passed.error
            return passed.result if passed.called else real(*args, **kwargs)
        finally:
            # An error holds its frames, and they this one: a program that lives through it (out of memory, a smaller
            # batch next) would keep the tensors of the failed call until Python looks for circles.
            passed.error = None

    if outermost:
        setattr(instead, _BEYOND, beyond)
    else:
        vars(instead).pop(_BEYOND, None)  # what it was given with the real one's other attributes
    setattr(owner, name, instead)


def owner_of(listener: Any) -> str:
    """The check that a listener belongs to: the one that is being put in, else what the listener is a part of."""
    mine = getattr(listener, "__self__", None)
    module = str(getattr(listener, "__module__", type(mine).__module__))
    return _owner or (type(mine).__name__ if mine is not None else module.rpartition(".")[2])


def install(check: BaseCheck) -> None:
    """Put a check in; whatever it hangs into torch is shielded."""
    global _owner
    from trimtab.virtual import functions

    name = type(check).__name__
    before = {id(hooks): set(hooks) for hooks in _hooks()}
    told = list(functions.AFTER)
    _owner = name
    try:
        call(name, check.install)
    finally:
        _owner = ""
    for hooks in _hooks():
        for key in set(hooks) - before[id(hooks)]:
            hooks[key] = shielded(name, hooks[key])
    _listening.update({listener: name for listener in functions.AFTER if listener not in told})
    functions.listener_failed = _stop_listening


_listening: dict[Any, str] = {}
"""Whose each listener to torch functions is. They are called where speed counts: with nothing in between."""


def _stop_listening(listener: Any, error: Exception) -> None:
    from trimtab.virtual import functions

    functions.AFTER.remove(listener)
    failed(_listening.get(listener) or owner_of(listener), error)


def _hooks() -> Iterator[dict[Any, Any]]:
    """The global hooks of modules and optimizers."""
    module, optimizer = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    for name, value in (*vars(module).items(), *vars(optimizer).items()):
        if name.startswith("_global_") and name.endswith("_hooks") and isinstance(value, dict):
            yield value
