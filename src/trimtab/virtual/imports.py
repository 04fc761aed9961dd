"""What is set in a library that a program may import, at once or when it does. Imports no such library itself."""

from __future__ import annotations

import functools
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

    def ended(self, name: str, setting: Setting) -> None:
        """The import of a module that had begun before has ended."""
        if name not in sys.modules:
            self._settings[name] = setting  # it failed; somebody may try again
        elif self in sys.meta_path:
            setting(self._machine.undo)

    def _found_by_the_next(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """What another one that waits for the same module finds, if there is one."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ():
            if isinstance(finder, _Waiting) and (spec := finder.find_spec(name, path, target)) is not None:
                return spec
        return importlib.machinery.PathFinder.find_spec(name, path, target)


class _UnderWay(importlib.machinery.ModuleSpec):
    """The spec of a module whose import has begun and not ended, as of a library that was itself the first to import
    torch: calls what is to be done when it ends."""

    then: list[Callable[[], None]]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            for call in self.__dict__.pop("then"):
                call()


def _under_way(module: ModuleType) -> importlib.machinery.ModuleSpec | None:
    """The module's spec, where its import has not ended."""
    spec = getattr(module, "__spec__", None)
    return spec if spec is not None and getattr(spec, "_initializing", False) else None


def call_by_name(real: object, new: object) -> None:
    """Whoever has imported `real` by name before now has `new` by that name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        for name in [name for name, value in list(names.items()) if value is real]:
            names[name] = new


def when_imported(machine: Machine, undo: ExitStack, settings: Mapping[str, Setting]) -> None:
    """Call each setting with the stack on which to undo it, now or when its module has been imported."""
    waiting: dict[str, Setting] = {}
    finder = _Waiting(machine, waiting)
    for name, setting in settings.items():
        module = sys.modules.get(name)
        if module is None:
            waiting[name] = setting
        elif (spec := _under_way(module)) is not None:
            if not isinstance(spec, _UnderWay):
                spec.then = []  # type: ignore[attr-defined]
                spec.__class__ = _UnderWay
            spec.then.append(functools.partial(finder.ended, name, setting))  # type: ignore[attr-defined]
        else:
            setting(undo)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
