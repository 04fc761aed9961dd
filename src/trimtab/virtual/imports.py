"""What is set in a library that a program may import, at once or when it does. Imports no such library itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType

from trimtab.virtual.state import Machine

Setting = Callable[[ExitStack], None]


class _Waiting(importlib.abc.MetaPathFinder):
    """Waits for the import of modules, and calls what is to be done when each is there."""

    def __init__(self, machine: Machine, settings: dict[str, Setting]) -> None:
        self._machine = machine
        self._settings = settings

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._settings:
            return None
        spec = self._found_by_the_next(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            # A program that only asks whether the module is there gets a spec, too: the first import counts.
            setting = self._settings.pop(name, None)
            if setting is not None and self in sys.meta_path:
                setting(self._machine.undo)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _found_by_the_next(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """What another one that waits for the same module finds, if there is one."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            if isinstance(finder, _Waiting) and (spec := finder.find_spec(name, path, target)) is not None:
                return spec
        return importlib.machinery.PathFinder.find_spec(name, path, target)


def when_imported(machine: Machine, undo: ExitStack, settings: Mapping[str, Setting]) -> None:
    """Call each setting with the stack on which to undo it, now or when its module has been imported."""
    waiting: dict[str, Setting] = {}
    for name, setting in settings.items():
        if name in sys.modules:
            setting(undo)
        else:
            waiting[name] = setting
    finder = _Waiting(machine, waiting)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
