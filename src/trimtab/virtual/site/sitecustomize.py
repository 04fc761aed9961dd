"""Put first on a child's path by trimtab.virtual.bootstrap: gives it its virtual GPUs as soon as it imports torch.

Then the sitecustomize that this file hides has its turn. Never imports torch itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Waits for `import torch`, installs the virtual machine when it is done, and steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        # Also asked by programs that only want to know whether torch is there: stay until it is really imported.
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            from trimtab.start_up import collector_held

            with collector_held():
                run(module)
                from trimtab.virtual.context import install_from_environment

                install_from_environment()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _next_sitecustomize() -> None:
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if _start := os.environ.get("TRIMTAB_START"):
    _module, _, _name = _start.partition(":")
    getattr(importlib.import_module(_module), _name)()
if os.environ.get("TRIMTAB_VIRTUAL"):
    sys.meta_path.insert(0, _AfterTorch())
_next_sitecustomize()
