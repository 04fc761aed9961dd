"""Imports libraries without the parts that they import for somebody else: these come when they are asked for.

Half a second of the three that a step's libraries take is spent on what no step of a language model reaches. It is for
a process of our own (trial_server.py) that imports them first. No module stands in another's place, here or in what
is imported later: a name that a library would have had from such a part fetches the real one when it is used. A
library that is not built as it is known here is imported as it imports itself.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


@contextmanager
def places_only() -> Iterator[None]:
    """Meanwhile torch, which notes of every operator where it was registered, reads no source for that, and the module
    of a frame is the one whose names it sees, where Python looks through all there are."""
    module_of, told = inspect.getmodule, inspect.getframeinfo

    def getmodule(thing: Any, *filename: Any) -> ModuleType | None:
        if isinstance(thing, FrameType):
            own = sys.modules.get(thing.f_globals.get("__name__", ""))
            if own is not None and vars(own) is thing.f_globals:
                return own
        return module_of(thing, *filename)

    def getframeinfo(frame: Any, context: int = 1) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__")
        return told(frame, 0 if asks == "torch._library.utils" else context)

    with _instead(inspect, "getmodule", getmodule), _instead(inspect, "getframeinfo", getframeinfo):
        yield


@contextmanager
def methods_later() -> Iterator[None]:
    """Meanwhile of a dataclass only `__init__` is compiled: how it is shown, compared and kept from changes when that
    comes up, which of most of some fifteen hundred it never does."""
    real = getattr(dataclasses, "_create_fn", None)

    def create(name: str, arguments: Any, body: Any, **names: Any) -> Any:
        assert real is not None
        if name not in _SELDOM:
            return real(name, arguments, body, **names)
        return _later(name, lambda: real(name, arguments, body, **names))

    with _instead(dataclasses, "_create_fn", create):
        yield


_SELDOM = frozenset(
    f"__{name}__" for name in ("repr", "eq", "lt", "le", "gt", "ge", "hash", "setattr", "delattr")
)


def _later(name: str, make: Callable[[], Any]) -> Any:
    """A method that is made when it is called, and then stands in its own place."""
    made: Any = None

    def method(self: Any, *arguments: Any) -> Any:
        nonlocal made
        if made is None:
            made = make()
            made.__qualname__, made.__doc__ = method.__qualname__, method.__doc__
            for owner in type(self).__mro__:
                if vars(owner).get(name) is method:
                    type.__setattr__(owner, name, made)
        return made(self, *arguments)

    method.__name__ = name
    return method


def import_accelerate() -> None:
    """Without boto3, which only the questions of `accelerate config` about SageMaker need."""
    with _not_found("boto3"):
        import accelerate
    del accelerate


def import_transformers() -> None:
    """With its trainer; without datasets and pandas, which know rows that nobody has made, and scipy, which assigns
    boxes to objects; and its thousands of files are read for the names in them once, not twice, and from their end."""
    with _set_in("transformers.utils.import_utils", _names_from_the_end):
        import transformers
    from transformers import utils

    _know_models(Path(transformers.__file__).parent / "models")
    with _answering(utils, "is_scipy_available", lambda: False) as changed:
        from transformers.loss import loss_utils
    for module in changed:
        module.linear_sum_assignment = _linear_sum_assignment
    with _answering(utils, "is_datasets_available", _datasets_in_use) as changed:
        from transformers import trainer
    if trainer in changed:
        # Its questions are whether rows are a dataset of theirs, and there is none before they are imported.
        trainer.is_datasets_available, trainer.datasets = _datasets_in_use, _Datasets()
    del loss_utils


def import_inductor() -> None:
    """Without reading its templates of kernels: those are read that are filled in."""
    from torch._inductor.codegen.common import KernelTemplate

    real = getattr(KernelTemplate, "_template_from_string", None)
    with _instead(KernelTemplate, "_template_from_string", staticmethod(lambda text: _Template(real, text))):
        import torch._inductor.compile_fx
    del torch


@contextmanager
def _instead(owner: Any, name: str, other: Any) -> Iterator[None]:
    """Where there is something of this name."""
    if name not in vars(owner):
        yield
        return
    real = vars(owner)[name]
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, real)


class _Setting(importlib.abc.MetaPathFinder):
    """Sets something in a module when it has been imported."""

    def __init__(self, module: str, setting: Callable[[Any], None]) -> None:
        self._module, self._setting = module, setting

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._setting(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _set_in(module: str, setting: Callable[[Any], None]) -> Iterator[None]:
    """Where it is imported meanwhile."""
    finder = _Setting(module, setting)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _names_from_the_end(import_utils: Any) -> None:
    """The last line that begins with `__all__` tells a file's names: what stands before it is not cut into lines."""
    real = getattr(import_utils, "fetch__all__", None)
    if real is not None:
        import_utils.fetch__all__ = lambda text: real(text[text.rfind("\n__all__") + 1 :])


@contextmanager
def _not_found(package: str) -> Iterator[None]:
    """As if it were not installed, where it is not imported yet."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def _answering(utils: Any, name: str, answer: Callable[[], bool]) -> Iterator[list[Any]]:
    """What is imported now hears this answer to whether a package is there, and afterwards the real one.

    Gives back the modules that heard it, if that was another than they would have heard.
    """
    real, changed = getattr(utils, name, answer), list[Any]()
    if real() == answer():
        yield changed
        return
    try:
        with _instead(utils, name, answer):
            yield changed
    finally:
        heard = [
            module for module in sys.modules.values() if getattr(module, "__dict__", {}).get(name) is answer
        ]
        for module in heard:
            setattr(module, name, real)
        changed += heard


def _know_models(folder: Path) -> None:
    """Import `transformers.models` with the names that `transformers` itself has found in the same files."""
    from transformers.utils import import_utils

    real: Any = getattr(import_utils, "define_import_structure", None)
    here = "models."

    def known(path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != folder / "__init__.py":
            return real(path, prefix)
        found = real(folder, prefix="models")  # kept there from before
        below = {
            needs: {
                name[len(here) :]: copy.copy(names) for name, names in of.items() if name.startswith(here)
            }
            for needs, of in found.items()
        }
        return {needs: of for needs, of in below.items() if of} or real(path)

    with _instead(import_utils, "define_import_structure", known):
        import transformers.models
    del transformers


def _linear_sum_assignment(*arguments: Any, **options: Any) -> Any:
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(*arguments, **options)


def _datasets_in_use() -> bool:
    return "datasets" in sys.modules


class _Datasets:
    """The package, for who asks it for something."""

    def __getattr__(self, name: str) -> Any:
        import datasets

        return getattr(datasets, name)


class _Template:
    """A template of jinja2, read when it is used."""

    def __init__(self, read: Any, source: str) -> None:
        self._read, self._source = read, source

    @cached_property
    def _whole(self) -> Any:
        return self._read(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)
