"""How two ranks answer a condition: computed from the plain values that each had in its names when it stood still.

Reads source and recorded values; calls nothing of the program. Where a value is not known there is no answer.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.diagnose import source

Known = Mapping[str, Any]
"""By the code that names it: a plain value as it is, of anything else its kind (and length, or single number)."""
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_COMPUTE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}


_Side = tuple[int, Sequence[Any]]


class _Unknown(Exception):
    """A value that was not written down."""


@dataclass(frozen=True)
class Sides:
    """Two ranks, with what each had in the names of its running functions (file, first line)."""

    ranks: tuple[int, int]
    known: tuple[Mapping[tuple[str, int], Known], Mapping[tuple[str, int], Known]]
    at_once: bool = True
    """Whether both stood at the same collective then; else only what does not change tells anything."""

    def of(self, file: str, line: int) -> tuple[Known, Known] | None:
        """What both had in the function around a line, where both were in it."""
        for key in (scope_key(file, line), class_key(file, line)):
            one, other = (side.get(key) for side in self.known) if key is not None else (None, None)
            if one is not None and other is not None:
                return one, other
        return None

    def parted(self, file: str, node: ast.If | ast.While) -> bool | None:
        """Whether they answer a condition differently; None where that cannot be told."""
        both = self.of(file, node.lineno)
        if both is None or self.differing(file, node.test) & _counters(file, node.lineno):
            return None  # a counter has gone on since
        if isinstance(node, ast.If) and source.names_in(node.test) & {
            n for s in node.body for n in source.bound(s)
        }:
            return None  # who went in has set it anew
        try:
            one, other = (bool(_value(node.test, known)) for known in both)
        except (_Unknown, TypeError, ZeroDivisionError):
            return None
        if self.at_once or (
            one != other and (self.by_rank(file, node.test) or self.objects(file, node.test))
        ):
            return one != other
        return None

    def differing(self, file: str, node: ast.expr) -> set[str]:
        """The code in an expression that stands for something else on each side."""
        both = self.of(file, node.lineno)
        one, other = both or ({}, {})
        names = {ast.unparse(n) for n in asked(node)} & one.keys() & other.keys()
        return {name for name in names if one[name] != other[name]}

    def by_rank(self, file: str, node: ast.expr) -> bool:
        """Whether what differs is the number of the rank itself, under whatever name."""
        both, names = self.of(file, node.lineno), self.differing(file, node)
        return bool(names) and both is not None and all((both[0][n], both[1][n]) == self.ranks for n in names)

    def objects(self, file: str, node: ast.expr) -> set[str]:
        """The code for what one of them has and the other has not."""
        both = self.of(file, node.lineno)
        return {n for n in self.differing(file, node) if both and None in (both[0][n], both[1][n])}

    def in_one_round(self, way: Iterable[tuple[str, int]]) -> bool:
        """Whether both are in the same rounds of the loops around these lines, as far as that is known."""
        known = [(both, _counters(file, line)) for file, line in way if (both := self.of(file, line))]
        return all(one.get(name) == other.get(name) for (one, other), names in known for name in names)

    def said(self, file: str, node: ast.expr) -> str:
        """`n` is 3 on rank 0 and 5 on rank 1: what decided, for a sentence; empty where nothing is known."""
        both = self.of(file, node.lineno)
        shown = [
            f"`{name}` is {_shown(both[0][name])} on rank {self.ranks[0]} and {_shown(both[1][name])} on rank "
            f"{self.ranks[1]}"
            for name in sorted(self.differing(file, node) - _counters(file, node.lineno))
            if both is not None
        ]
        return ", ".join(shown[:2])


def scope_key(file: str, line: int) -> tuple[str, int]:
    """The function around a line, by its file and first line; 0 for the module's own code."""
    function = source.function_at(file, line)
    return file, function.lineno if function is not None else 0


def class_key(file: str, line: int) -> tuple[str, int] | None:
    """The class around a line: what its methods read from `self` they have in common."""
    owner = source.class_at(file, line)
    return (file, -owner.lineno) if owner is not None else None


def sides(one: _Side, other: _Side, at_once: bool = True) -> Sides:
    """Two ranks, each with what it wrote down of its functions, innermost first."""
    known = tuple({tuple(part["at"]): part["known"] for part in reversed(parts)} for _, parts in (one, other))
    return Sides((one[0], other[0]), (known[0], known[1]), at_once)


def asked(node: ast.AST) -> list[ast.expr]:
    """The names, attributes, entries and lengths that an expression reads, the longest chains only."""
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Load):
        plain = all(
            isinstance(n, ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.expr_context)
            for n in ast.walk(node)
        )
        if plain:
            return [node]
    if isinstance(node, ast.Call):
        inside = [*node.args, *(k.value for k in node.keywords)]
        inside += [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [found for part in inside for found in asked(part)]
    return [found for child in ast.iter_child_nodes(node) for found in asked(child)]


def _value(node: ast.expr, known: Known) -> Any:
    text = ast.unparse(node)
    if text in known:
        value = known[text]
        if isinstance(value, dict) and "number" in value:
            return value["number"]
        return value
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(part, known) for part in node.elts]
    if isinstance(node, ast.Call) and source.called_name(node) in ("len", "item") and not node.keywords:
        given = node.args[0] if node.args else getattr(node.func, "value", None)
        held = known.get(ast.unparse(given)) if given is not None else None
        if isinstance(held, dict) and (size := held.get("len" if node.args else "number")) is not None:
            return size
    if isinstance(node, ast.UnaryOp):
        value = _plain(node.operand, known)
        return (
            not value if isinstance(node.op, ast.Not) else -value if isinstance(node.op, ast.USub) else +value
        )
    if isinstance(node, ast.BoolOp):
        return _junction(node, known)
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTE:
        return _COMPUTE[type(node.op)](_plain(node.left, known), _plain(node.right, known))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right, how = node.left, node.comparators[0], node.ops[0]
        if isinstance(how, ast.Is | ast.IsNot) and source.is_constant(right, None):
            return (_value(left, known) is None) == isinstance(how, ast.Is)
        if type(how) in _COMPARE:
            return _COMPARE[type(how)](_plain(left, known), _plain(right, known))
    raise _Unknown


def _plain(node: ast.expr, known: Known) -> Any:
    """A value that can be computed with: of an object only its kind is known, and whether it is empty."""
    value = _value(node, known)
    if isinstance(value, dict):
        if "len" in value:
            return value["len"]
        raise _Unknown
    return value


def _junction(node: ast.BoolOp, known: Known) -> bool:
    decides = isinstance(node.op, ast.Or)
    unknown = False
    for part in node.values:
        try:
            if bool(_value(part, known)) == decides:
                return decides
        except _Unknown:
            unknown = True
    if unknown:
        raise _Unknown
    return not decides


def _counters(file: str, line: int) -> set[str]:
    """What the loops around a line count: the targets of `for`, and what is added to."""
    found: set[str] = set()
    node = source.statement(file, line)
    for loop in (n for n in source.above(file, node) if isinstance(n, ast.For | ast.While)) if node else ():
        found |= source.names_in(loop.target) if isinstance(loop, ast.For) else set()
        found |= {ast.unparse(n.target) for n in ast.walk(loop) if isinstance(n, ast.AugAssign)}
    return found


def _shown(value: Any) -> str:
    number = value.get("number") if isinstance(value, dict) else value
    if isinstance(number, float):
        return f"{number:.4g}"
    if not isinstance(value, dict):
        return repr(value)
    size = (
        f" of {value['len']}" if "len" in value else f" of shape {value['shape']}" if "shape" in value else ""
    )
    return f"a {value['kind']}{size}"
