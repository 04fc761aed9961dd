"""The room itself: its modules import each other in one direction, and nothing heavy from outside."""

from __future__ import annotations

import ast
import importlib
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import trimtab.gpu_models
import trimtab.virtual

ROOM = Path(trimtab.virtual.__file__).parent
MODULES = {file.stem: file for file in ROOM.glob("*.py") if file.stem != "__init__"}


def imported(file: Path) -> set[str]:
    """Every module that a file imports, also inside functions and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "trimtab.virtual":
            found |= {f"trimtab.virtual.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def at_the_top(file: Path) -> set[str]:
    """The modules that are imported with a file."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {n.module or "" for n in body if isinstance(n, ast.ImportFrom)} | {
        name.name for n in body if isinstance(n, ast.Import) for name in n.names
    }


def test_no_two_modules_need_each_other() -> None:
    own = {f"trimtab.virtual.{name}": name for name in MODULES}  # `torch.cuda` is not our `cuda`
    graph = {name: {own[m] for m in imported(file) if m in own} for name, file in MODULES.items()}
    assert graph["dispatch"] >= {"rules", "kernels", "tensor"}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError on a circle
    assert order.index("state") < order.index("tensor") < order.index("dispatch") < order.index("context")


TRITON = {name for name in MODULES if name.startswith("triton_")}
"""What reads Triton is imported when a program launches a kernel of it, and not before."""


def test_it_stands_on_torch_and_three_small_modules_alone() -> None:
    files = [file for name, file in MODULES.items() if name not in TRITON]
    outside = {name for file in files for name in imported(file) if not name.startswith("trimtab.virtual")}
    heavy = {name for name in outside if name.partition(".")[0] not in sys.stdlib_module_names | {"torch"}}
    tables = {"trimtab.gpu_models", "trimtab.hollow", "trimtab.launches"}
    assert heavy == {"pytest", *tables}
    assert not any(name.partition(".")[0] == "triton" for name in at_the_top(MODULES["triton_kernels"]))
    for table in tables:
        file = Path(importlib.import_module(table).__file__ or "")
        assert {name.partition(".")[0] for name in imported(file)} <= sys.stdlib_module_names
