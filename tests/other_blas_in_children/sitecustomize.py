"""In processes that a test starts under TRIMTAB_OTHER_BLAS: once torch has been imported, the other BLAS is put in.

Python reads this file at its start, since `other_blas.install` put its folder on PYTHONPATH. It imports nothing that
the program would not import, and leaves the turn to the sitecustomize that it hides.
"""

from __future__ import annotations

import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent


class _AfterTorch(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        # By way of the others: the virtual GPUs of a child wait for torch in the same manner.
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            if hasattr(module, "library"):  # a test may put a broken torch in its place
                runpy.run_path(str(HERE.parent / "other_blas.py"))["install"]()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterTorch())
hidden = PathFinder.find_spec(
    "sitecustomize", sys.path[[Path(p).resolve() for p in sys.path].index(HERE) + 1 :]
)
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(module_from_spec(hidden))
