"""Imports libraries without the parts that they import for somebody else: these come when they are asked for.

Half a second of the three that a step's libraries take is spent on what no step of a language model reaches. It is for
a process of our own (trial_server.py) that imports them first. No module stands in another's place, here or in what
is imported later: a name that a library would have had from such a part fetches the real one when it is used. A
library that is not built as it is known here is imported as it imports itself.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any


@contextmanager
def places_only() -> Iterator[None]:
    """Meanwhile torch, which notes of every operator where it was registered, reads no source for that."""
    from torch._library import utils

    def place(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    with _instead(utils, "get_source", place):
        yield


def import_accelerate() -> None:
    """Without boto3, which only the questions of `accelerate config` about SageMaker need."""
    with _not_found("boto3"):
        import accelerate
    del accelerate


def import_transformers() -> None:
    """With its trainer; without datasets and pandas, which know rows that nobody has made, and scipy, which assigns
    boxes to objects; and its thousands of files are read for the names in them once, not twice."""
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
