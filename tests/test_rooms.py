"""The rooms of docs/design.md: an import points to its own room or to one that stands above it in the table.

The graph is drawn from the source, imports inside functions and those for type checkers included. A name that only a
string tells would hide an edge, so `import_module` and the like may name nothing of ours, but for a room that looks up
its own modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent
SOURCE = HOUSE / "src" / "trimtab"
# The package's own door names its rooms by strings, so that importing it imports nothing.
DOORS = {"trimtab", "trimtab.__main__"}


def rooms_in_order() -> list[str]:
    """The rooms as the table of docs/design.md lists them, first to last."""
    page = (HOUSE / "docs" / "design.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)/` \|", page, flags=re.MULTILINE)


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"), path


def room_of(module: str) -> str:
    """`trimtab.bench.glue` is of bench, `trimtab.files` of no room: a leaf that all may use."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


def imported(tree: ast.AST, module: str, path: Path) -> Iterator[str]:
    """All modules of ours that a file names in an import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "trimtab")
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                home = module if path.name == "__init__.py" else module.rpartition(".")[0]
                kept = home.split(".")[: len(home.split(".")) - node.level + 1]
                start = ".".join([*kept, *([start] if start else [])])
            if start.split(".")[0] == "trimtab":
                # `from trimtab import bench` names a room, `from trimtab.bench import plots` one of its modules.
                yield from (f"{start}.{alias.name}" for alias in node.names)


def named_by_a_string(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that import what a string names: where, and the string as far as the source tells it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__", "run_module", "reload"):
            yield node.lineno, ast.unparse(node.args[0])


def edges() -> dict[tuple[str, str], list[str]]:
    """From room to room, with the files and modules that make the edge."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name in imported(tree, module, path):
            pair = room_of(module), room_of(name)
            if pair[0] != pair[1] and "" not in pair:
                found.setdefault(pair, []).append(f"{path.relative_to(SOURCE)} imports {name}")
    return found


def test_every_room_stands_in_the_table() -> None:
    there = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert there == set(rooms_in_order())


def test_imports_point_back_along_the_walk() -> None:
    place = {room: number for number, room in enumerate(rooms_in_order())}
    against = {pair: why for pair, why in edges().items() if place[pair[1]] > place[pair[0]]}
    assert not against, "\n".join(f"{a} -> {b}: {line}" for (a, b), why in against.items() for line in why)


def test_the_leaves_need_no_room() -> None:
    """What belongs to no room (errors, files, cache, …) is for all of them, so it imports none."""
    found = [
        f"{path.name} imports {name}"
        for module, path in modules()
        if not room_of(module) and module not in DOORS
        for name in imported(ast.parse(path.read_text(encoding="utf-8")), module, path)
        if room_of(name)
    ]
    assert not found


def test_virtual_and_zeroth_need_torch_alone() -> None:
    """Beside torch they know the leaves that all rooms share (errors, GPU models), and no other room."""
    found = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for module, path in modules()
        if room_of(module) in ("virtual", "zeroth")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")), module, path)
        if room_of(name) not in ("", room_of(module))
    ]
    assert not found


def test_no_string_hides_an_import() -> None:
    hidden: dict[str, list[str]] = {}
    for module, path in modules():
        own = f"trimtab.{room_of(module)}."
        for line, name in named_by_a_string(ast.parse(path.read_text(encoding="utf-8"))):
            if "trimtab" in name and own not in name and module not in DOORS:
                hidden.setdefault(path.relative_to(SOURCE).as_posix(), []).append(f"line {line}: {name}")
    assert not hidden


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from trimtab import bench", ["trimtab.bench"]),
        ("import trimtab.bench.glue as g", ["trimtab.bench.glue"]),
        ("def f():\n    from trimtab.bench.glue import run_glue", ["trimtab.bench.glue.run_glue"]),
        ("if TYPE_CHECKING:\n    from trimtab.recipes import sft", ["trimtab.recipes.sft"]),
        ("from ..bench import plots", ["trimtab.bench.plots"]),
        ("from . import settings", ["trimtab.zeroth.settings"]),
        ("import torch\nfrom torch import nn", []),
    ],
)
def test_every_kind_of_import_is_seen(text: str, names: list[str]) -> None:
    assert list(imported(ast.parse(text), "trimtab.zeroth.sweep", Path("sweep.py"))) == names


def test_strings_are_seen_too() -> None:
    text = "import_module('trimtab.bench.glue')\nimportlib.import_module(f'trimtab.{x}')\n__import__(name)"
    assert [name for _, name in named_by_a_string(ast.parse(text))] == [
        "'trimtab.bench.glue'",
        "f'trimtab.{x}'",
        "name",
    ]
