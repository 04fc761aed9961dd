"""Who holds a tensor at the moment of a fault: which variable of the user's frame, which attribute of which module.

Looks at live frames and modules; changes nothing, computes nothing on tensors.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import source

_NESTED = (dict, list, tuple)
TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what it has registered."""


def storage_of(tensor: torch.Tensor) -> int:
    """What two tensors that share memory have in common; 0 for a tensor without memory of its own."""
    payload = getattr(tensor, "payload", tensor)
    try:
        return int(payload.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one, or views of one memory."""
    if one is other:
        return True
    if not (storage := storage_of(one)):
        return False
    return storage == storage_of(other)


def frame_at(file: str, line: int) -> FrameType | None:
    """The live frame of this thread that stands on a line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file and frame.f_lineno == line:
            return frame
        frame = frame.f_back
    return None


def variable_of(tensor: torch.Tensor, frame: FrameType) -> str | None:
    """The expression by which a frame's code reaches a tensor: `labels`, `batch["labels"]`, `self.mask`, `pair[1]`."""
    shared: str | None = None
    for name, value in list(frame.f_locals.items()):
        for expression, found in _reach(name, value):
            if found is tensor:
                return expression
            if shared is None and same(found, tensor):
                shared = expression
    if shared is not None:
        return shared
    named = expressions(frame.f_code.co_filename, frame.f_lineno, frame)
    return next((expression for expression, found in named if same(found, tensor)), None)


def _reach(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == 0:
        return
    elif isinstance(value, dict):
        for key, entry in list(value.items())[:64]:
            yield from _reach(f"{name}[{key!r}]", entry, depth - 1 if isinstance(entry, _NESTED) else 0)
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value[:64]):
            yield from _reach(f"{name}[{index}]", entry, depth - 1 if isinstance(entry, _NESTED) else 0)
    elif not isinstance(value, nn.Module | type) and hasattr(value, "__dict__"):
        for key, entry in list(vars(value).items())[:64]:
            if isinstance(entry, torch.Tensor):
                yield f"{name}.{key}", entry
            elif isinstance(entry, dict) and key == "data":
                yield from _reach(name, entry, 1)


def expressions(file: str, line: int, frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a line's statement names, with the code that names them, the longest first."""
    inside = list(source.header(source.statement(file, line)))
    # What is moved in the line itself is not where the line's own tensors come from.
    moved = {id(part) for call in inside if source.is_move(call) for part in ast.walk(call)}
    named = [
        inner
        for inner in inside
        if isinstance(inner, ast.Name | ast.Attribute | ast.Subscript) and id(inner) not in moved
    ]
    for inner in sorted(named, key=lambda n: -len(ast.unparse(n))):
        value = value_of(inner, frame)
        if isinstance(value, torch.Tensor):
            yield ast.unparse(inner), value


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """What a plain chain of names, attributes and keys stands for; None for anything that would have to be computed."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return _stored(value_of(node.value, frame), node.attr)
    if isinstance(node, ast.Subscript):
        base, key = value_of(node.value, frame), value_of(node.slice, frame)
        if isinstance(base, dict) and isinstance(key, str | int | tuple):
            return base.get(key)
        if (
            isinstance(base, list | tuple | nn.ModuleList)
            and isinstance(key, int)
            and -len(base) <= key < len(base)
        ):
            return base[key]
    return None


def _stored(owner: Any, name: str) -> Any:
    """An attribute that is simply stored: no property and no method runs for it."""
    if isinstance(owner, nn.Module):
        for table in (getattr(owner, table) for table in TABLES):
            if name in table:
                return table[name]
    if owner is None or isinstance(owner, torch.Tensor):
        return None
    for values in (getattr(owner, "__dict__", {}), *(vars(c) for c in type(owner).__mro__[:-1])):
        if name in values:
            found = values[name]
            return None if hasattr(type(found), "__get__") else found
    return None


@dataclass(frozen=True)
class Kept:
    """An attribute of an object of the program's own class that holds a tensor or module."""

    owner: Any
    name: str
    container: str = ""
    """The plain Python container in between, if any."""
    key: str = ""
    """How it is taken out of that, as code: `['teacher']`, `[0]`."""


def kept_in(wanted: Callable[[Any], bool], frames: Iterable[FrameType]) -> Iterator[Kept]:
    """The objects of the program's own classes, reached from the variables of its frames, that hold something."""
    queue = [value for frame in frames for value in list(frame.f_locals.values())]
    seen: set[int] = set()
    for depth in range(3):
        following: list[Any] = []
        for owner in queue:
            if id(owner) in seen or not is_own(owner):
                continue
            seen.add(id(owner))
            yield from (Kept(owner, *found) for found in plainly(owner, wanted))
            if depth < 2:
                following += [v for n, v in list(vars(owner).items())[:128] if n not in TABLES]
            if isinstance(owner, nn.Module):
                following += owner._modules.values()
        queue = following


def plainly(owner: Any, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, str, str]]:
    """The attributes past a module's tables that hold something: name, container, and how it is taken out of that."""
    for name, value in list(vars(owner).items())[:256]:
        kind = _container(value) if name not in TABLES else ""
        if name not in TABLES and (any(map(wanted, _entries(value))) if kind else wanted(value)):
            yield name, kind, _key(value, wanted) if kind else ""


def contained(value: Any, frame: FrameType) -> Iterator[tuple[str, str]]:
    """The plain containers among a frame's variables that hold an object, each with how it is taken out."""
    for name, held in list(frame.f_locals.items()):
        plain = isinstance(held, dict | list | tuple) and held is not frame.f_globals
        if name.isidentifier() and plain and any(one is value for one in _entries(held)):
            yield name, _key(held, lambda one: one is value)


def _key(container: Any, wanted: Callable[[Any], bool]) -> str:
    entries = container.items() if isinstance(container, dict) else enumerate(container)
    return next((f"[{key!r}]" for key, value in entries if wanted(value)), "")


def is_own(value: Any) -> bool:
    """Whether an object is of a class that the program itself defines."""
    if isinstance(value, type | torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    return (named := source_of(value)) is not None and source.is_user_file(named[0])


def expression_for(value: Any, frame: FrameType) -> str | None:
    """How a frame's code reaches an object by names and attributes: `critic`, `self.ema.module`, `model.head`."""
    for name, found in list(frame.f_locals.items()):
        if found is value and name.isidentifier():
            return name
    for name, found in list(frame.f_locals.items()):
        if name.isidentifier() and (path := _path_inside(found, value, 3)):
            return f"{name}.{path}"
    return None


def _path_inside(owner: Any, value: Any, depth: int) -> str | None:
    inside = dict(owner._modules) if isinstance(owner, nn.Module) else {}
    if isinstance(owner, nn.Module) or is_own(owner):
        inside |= {k: v for k, v in vars(owner).items() if k not in TABLES}
    for name, found in inside.items():
        if found is value:
            return f"get_submodule('{name}')" if name.isdigit() else name
    for name, found in inside.items() if depth > 1 else ():
        if name.isidentifier() and (path := _path_inside(found, value, depth - 1)):
            return f"{name}.{path}"
    return None


def outside(frames: Iterable[FrameType]) -> FrameType | None:
    """The innermost frame that is no method of a module: the one that calls the model."""
    return next((f for f in frames if not isinstance(f.f_locals.get("self"), nn.Module)), None)


def source_of(module: object) -> tuple[str, str] | None:
    """The file and name of an object's class, the first in its ancestry that is not torch's own."""
    for ancestor in type(module).__mro__:
        if ancestor.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for member in vars(ancestor).values():
            # The code knows its file even where the module (a script run by path) does not.
            if (code := getattr(member, "__code__", None)) is not None:
                return code.co_filename, ancestor.__name__
    return None


def _container(value: Any) -> str:
    return type(value).__name__ if isinstance(value, list | tuple | dict | set) and value else ""


def _entries(value: Any) -> list[Any]:
    """What a container holds, and what the plain containers in it do."""
    flat = list(value.values() if isinstance(value, dict) else value)[:256]
    inside = [one for one in flat if isinstance(one, list | tuple | dict)]
    return flat + [
        e for one in inside[:32] for e in list(one.values() if isinstance(one, dict) else one)[:64]
    ]
