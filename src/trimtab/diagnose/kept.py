"""Who keeps a tensor with its graph from step to step: a variable, list or attribute, and the line that puts it there.

Looks at live frames and at what refers to the tensor; reads source. Changes nothing, runs none of the program's code.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from trimtab.diagnose import holders, rewrite, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.virtual import origin

Found = tuple[Place, str, list[Edit]]
"""The line that keeps, the fix in words, and as edits."""
_PUTS = frozenset(("append", "extend", "insert", "appendleft", "add", "put"))
_DEPTH = 4


def carried(reaches: Callable[[object], bool], frames: list[FrameType]) -> Found | None:
    """A variable that a loop computes from its own last value: `out, hidden = model(x, hidden)`."""
    for frame in frames:
        file, here = frame.f_code.co_filename, frame.f_lineno
        for name, value in list(frame.f_locals.items()):
            several = isinstance(value, tuple | list) and any(map(reaches, value))
            if not several and not reaches(value):
                continue
            made = source.assignments(file, here, name)
            again = [n for n in made if isinstance(n, ast.Assign) and name in source.names_in(n.value)]
            if not again or isinstance(again[-1].value, ast.BinOp):
                continue
            code = f"tuple(h.detach() for h in {name})" if several else f"{name}.detach()"
            cut = f"{name} = {code}"
            said = f"Cut it from the last step before it is used again: {cut}."
            return source.place(file, again[-1].lineno), said, [rewrite.before(file, again[-1], cut)]
    return None


def built(place: Place) -> Found | None:
    """A running value that is built from a tensor with its graph: what is added, or the new value, let go of it."""
    node = source.statement(place.file, place.line)
    if not isinstance(node, ast.AugAssign | ast.Assign):
        return None
    inside = {ast.unparse(n) for n in ast.walk(node.value) if isinstance(n, ast.expr)}
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) not in inside:
        return None
    code = f"{rewrite.operand(node.value)}.detach()"
    said = f"Keep the value without its graph: {code} (or .item() for a number)."
    return place, said, [rewrite.in_place_of(place.file, node.value, code)]


def handed_over(marked: Callable[[object], bool], frames: list[FrameType]) -> Found | None:
    """A tensor with its graph that one of the running functions gives to an object which keeps such tensors."""
    for frame in frames:
        file = frame.f_code.co_filename
        for name, owner in list(frame.f_locals.items()):
            if isinstance(owner, torch.nn.Module | torch.Tensor) or not hasattr(owner, "__dict__"):
                continue
            kept = [item for value in list(vars(owner).values()) for item in _items(value) if marked(item)]
            if name == "self" or len(kept) < 2:
                continue
            lines = {origin.born_of(item) for item in kept if isinstance(item, torch.Tensor)} - {None}
            # This round's own value is not kept yet, but it was made at the same line as those that are.
            graphs = {
                own
                for own, value in frame.f_locals.items()
                if isinstance(value, torch.Tensor) and origin.born_of(value) in lines
            }
            for call in source.calls(file):
                given = [*call.args, *(k.value for k in call.keywords)]
                named = [a for a in given if isinstance(a, ast.Name) and a.id in graphs]
                if source.root(call.func) == name and named:
                    codes = ", ".join(f"{a.id}.detach()" for a in named)
                    edits = [rewrite.in_place_of(file, a, f"{a.id}.detach()") for a in named]
                    said = f"Hand over the value without its graph: {codes} (or .item() for a number)."
                    return source.place(file, call.lineno), said, edits
    return None


def stored(tensor: torch.Tensor, frames: list[FrameType]) -> Found | None:
    """The line that puts a tensor where it is kept: into a list or dict, or under an attribute."""
    for file, name in _names(tensor, frames):
        for node, value in _stores(file, name):
            code = f"{rewrite.operand(value)}.detach()"
            parts = [value]
            if isinstance(value, ast.Tuple | ast.Dict | ast.List):
                parts = _graphs_in(value, tensor)
                code = ", ".join(f"{rewrite.operand(part)}.detach()" for part in parts)
            if not parts or "detach" in ast.unparse(value):
                continue
            edits = [rewrite.in_place_of(file, p, f"{rewrite.operand(p)}.detach()") for p in parts]
            said = f"Keep the value without its graph: {code} (or .item() for a number)."
            return source.place(file, node.lineno), said, edits
    return None


def _graphs_in(value: ast.Tuple | ast.Dict | ast.List, tensor: torch.Tensor) -> list[ast.expr]:
    """The parts of a tuple or dict in the source that stand where the kept one holds tensors with a graph."""
    for holder in gc.get_referrers(tensor):
        if isinstance(value, ast.Dict) and isinstance(holder, dict):
            graphs = [isinstance(v, torch.Tensor) and v.grad_fn is not None for v in holder.values()]
            parts = list(value.values)
        elif isinstance(holder, tuple | list) and not isinstance(value, ast.Dict):
            graphs = [isinstance(v, torch.Tensor) and v.grad_fn is not None for v in holder]
            parts = list(value.elts)
        else:
            continue
        if len(graphs) == len(parts):
            return [part for part, graph in zip(parts, graphs, strict=True) if graph]
    return []


def _names(tensor: torch.Tensor, frames: list[FrameType]) -> Iterator[tuple[str, str]]:
    """The files and names under which a tensor is kept: attributes of the program's objects, its variables."""
    level: list[Any] = [tensor]
    ours = {id(level)}
    for _ in range(_DEPTH):
        following: list[Any] = []
        ours.add(id(following))
        for thing in level:
            for frame in frames:
                for name, value in list(frame.f_locals.items()):
                    if value is thing:
                        yield frame.f_code.co_filename, name
            for holder in gc.get_referrers(thing):
                if id(holder) in ours or isinstance(holder, FrameType | ModuleType):
                    continue
                if isinstance(holder, list | tuple | deque | set):
                    following.append(holder)
                elif isinstance(holder, dict):
                    keys = [key for key, value in list(holder.items()) if value is thing]
                    if isinstance(file := holder.get("__file__"), str) and source.is_user_file(file):
                        yield from ((file, str(key)) for key in keys)
                    elif (owned := _owner_file(holder)) is not None:
                        yield from ((owned, str(key)) for key in keys)
                    else:
                        following.append(holder)
                elif (named := holders.source_of(holder)) is not None and source.is_user_file(named[0]):
                    attributes = vars(holder) if hasattr(holder, "__dict__") else {}
                    yield from ((named[0], key) for key, value in attributes.items() if value is thing)
        level = following[:64]
        ours.add(id(level))


def _owner_file(table: dict[Any, Any]) -> str | None:
    """The file of the class of the program's own whose object has this dict for its attributes, or that has itself."""
    for owner in gc.get_referrers(table):
        if isinstance(owner, type) and all(owner.__dict__.get(key) is value for key, value in table.items()):
            codes = (getattr(member, "__code__", None) for member in table.values())
            file = next((code.co_filename for code in codes if code is not None), None)
            file = file or getattr(sys.modules.get(owner.__module__), "__file__", None)
            return file if isinstance(file, str) and source.is_user_file(file) else None
        if getattr(owner, "__dict__", None) is table:
            named = holders.source_of(owner)
            return named[0] if named is not None and source.is_user_file(named[0]) else None
    return None


def _stores(file: str, name: str) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr]]:
    """The statements that put something under a name, or into what has this name, and what they put there."""
    for node in source.walk(file):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in _PUTS and _named(node.func.value) == name:
                yield node, node.args[-1]
        elif isinstance(node, ast.AugAssign) and _named(node.target) == name:
            yield node, node.value
        elif isinstance(node, ast.Assign):
            for target, value in source.pairs(node):
                inside = isinstance(target, ast.Subscript)
                builds = name in {source.last_name(n) for n in ast.walk(value)}
                if _named(target) == name and (inside or builds):
                    yield node, value


def _named(node: ast.expr) -> str:
    """The last name of what is written to: `values` for `self.values[key]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if (
        isinstance(node, ast.Call)
        and source.called_name(node) == "setdefault"
        and isinstance(node.func, ast.Attribute)
    ):
        return _named(node.func.value)
    return source.last_name(node)


def _items(value: object) -> Iterator[object]:
    """What a container keeps, and what the containers in it do."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | deque) else ()
    for item in list(inside)[:256]:
        if isinstance(item, tuple | list | deque):
            yield from item
        elif isinstance(item, dict):
            yield from item.values()
        else:
            yield item
