"""What a rank had in the names that the conditions and loops of its running functions ask for: written down with each
collective, so that two ranks can be compared when they part (see `diagnose.answers`). Reads frames; runs nothing."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from trimtab.diagnose import answers, holders, source
from trimtab.rehearse import places
from trimtab.virtual.tensor import payload_of
from trimtab.virtual.unknown import is_unknown

_DEEPEST = 8
_MOST = 40
_Scope = tuple[tuple[str, int], dict[str, ast.expr]]
_asked: dict[CodeType, list[_Scope]] = {}


def now() -> list[dict[str, Any]]:
    """The values of each function of the program on the stack, innermost first."""
    found: list[dict[str, Any]] = []
    for frame in itertools.islice(places.frames(), _DEEPEST):
        found += _of(frame)
        places.forget(frame)
    return found


def _of(frame: FrameType) -> Iterator[dict[str, Any]]:
    code = frame.f_code
    if code not in _asked:
        _asked[code] = list(_scopes(code.co_filename, frame.f_lineno))
    for key, names in _asked[code]:
        known: dict[str, Any] = {}
        for text, node in names.items():
            value = holders.value_of(node, frame)
            if value is not None or _is_none(node, frame):
                known[text] = _plain(value)
        if key[1] > 0:
            plain = [
                (n, v) for n, v in itertools.islice(frame.f_locals.items(), _MOST) if isinstance(v, str | int)
            ]
            known |= {name: _plain(value) for name, value in plain}
        yield {"at": key, "known": known}


def _scopes(file: str, line: int) -> Iterator[_Scope]:
    """The function around a line, and its class for what all methods ask of `self`."""
    scope = source.function_at(file, line) or source.tree(file)
    if scope is not None:
        yield answers.scope_key(file, line), _names(source.own_statements(scope))
    owner, key = source.class_at(file, line), answers.class_key(file, line)
    if owner is not None and key is not None:
        inside = [n for n in ast.walk(owner) if isinstance(n, ast.stmt)]
        own = {text: n for text, n in _names(inside).items() if text.startswith("self.")}
        yield key, own


def _names(statements: list[ast.stmt]) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in statements:
        heads = [node.test] if isinstance(node, ast.If | ast.While) else []
        heads += [node.iter, _read(node.target)] if isinstance(node, ast.For) else []
        for head in heads:
            found |= {ast.unparse(n): n for n in answers.asked(head)}
    return dict(list(found.items())[:_MOST])


def _read(target: ast.expr) -> ast.expr:
    """A loop's target as an expression that is read."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _is_none(node: ast.expr, frame: FrameType) -> bool:
    """Whether it is there and None, and not merely unknown."""
    if isinstance(node, ast.Name):
        return node.id in frame.f_locals or node.id in frame.f_globals
    if isinstance(node, ast.Attribute):
        owner = holders.value_of(node.value, frame)
        return node.attr in getattr(owner, "__dict__", {})
    return False


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:80]
    found: dict[str, Any] = {"kind": type(value).__name__.removeprefix("Virtual")}
    if isinstance(value, torch.Tensor):
        found["shape"] = list(value.shape)
        held = payload_of(value.detach())
        if value.numel() == 1 and type(held) is torch.Tensor and not (held.is_meta or is_unknown(value)):
            found["number"] = float(held.item()) if not held.is_complex() else 0.0
    elif isinstance(value, list | tuple | dict | set | frozenset | range):
        found["len"] = len(value)
    return found
