"""One definition of a package, taken out of its source with what it needs: importing torch for a parser takes seconds.

What is taken is the package's own code, unchanged. Where a part cannot be taken out so, the package is imported.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
from pathlib import Path
from typing import Any


class _CannotBeTaken(Exception):
    """A definition that does not stand in its module, or needs what is no definition."""


def definition(module: str, name: str) -> Any:
    """The function or class of that name, as importing its module would give it."""
    package = module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    try:
        return _taken(Path(folders[0]).parent, module, name, {}) if folders else _imported(module, name)
    except (_CannotBeTaken, OSError, SyntaxError, NameError):
        return _imported(module, name)


def _imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _taken(root: Path, module: str, name: str, known: dict[tuple[str, str], Any]) -> Any:
    if (module, name) in known:
        return known[module, name]
    path = root.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    body = ast.parse(file.read_text(encoding="utf-8"), str(file)).body
    wanted = next((node for node in body if getattr(node, "name", None) == name), None)
    if not isinstance(wanted, ast.FunctionDef | ast.ClassDef):
        raise _CannotBeTaken(f"{module}.{name}")
    inside = {node.id for node in ast.walk(wanted) if isinstance(node, ast.Name)} - {name}
    inside -= _bound(wanted)
    space: dict[str, Any] = {"__name__": module}
    for needed in sorted(inside - set(vars(builtins))):
        space[needed] = _needed(root, module, needed, body, known)
    # Annotations are not worked out: what stands in them is not needed.
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, wanted], []), str(file), "exec"), space)
    known[module, name] = space[name]
    return space[name]


def _bound(node: ast.AST) -> set[str]:
    """Names that the definition gives itself."""
    arguments = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    stored = {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    inner = {
        part.name
        for part in ast.walk(node)
        if isinstance(part, ast.FunctionDef | ast.ClassDef) and part is not node
    }
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for part in ast.walk(node)
        if isinstance(part, ast.Import | ast.ImportFrom)
        for alias in part.names
    }
    return arguments | stored | inner | imported


def _needed(root: Path, module: str, name: str, body: list[ast.stmt], known: dict[Any, Any]) -> Any:
    """What a name of a module stands for, by the module's own imports and definitions."""
    package = module.partition(".")[0]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if node.module.partition(".")[0] == package:
                        return _taken(root, node.module, alias.name, known)
                    return _imported(node.module, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) == name and alias.name != package:
                    return importlib.import_module(alias.name)
    return _taken(root, module, name, known)
