"""Errors that the program itself raises about a tensor's shape: which tensor, which dimension, who decided its size.

The condition that raised is read from the source (an `if` around a `raise`, an `assert`, `b, c = x.shape`), whatever
words the error uses; the tensor is taken from the failing frame, and where the size of its dimension was decided from
its origin. Computes nothing but comparisons of whole numbers, and runs none of the program's code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place, TensorNote
from trimtab.diagnose.raised_common import frames_and_lines
from trimtab.diagnose.shape_reads import Read, Spot, number, reads
from trimtab.virtual import extents, origin

_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break


def explain(finding: Finding, error: BaseException, places: Sequence[Place]) -> None:
    """Add to a finding what decided the shape that the program refused; nothing where it refused something else."""
    if not places or places[0] != finding.where or (spot := _spot(error)) is None:
        return
    asked = _refused(spot)
    if asked is None:
        return
    read, wanted, dimension = asked
    tensor, shape = read.tensor, tuple(read.tensor.shape)
    born = origin.born_of(tensor)
    made = source.place(born.file, born.line) if born is not None else None
    kind = str(tensor.dtype).removeprefix("torch.")
    finding.kind = "batch-type"
    finding.tensors = [TensorNote(read.name, str(tensor.device), kind, shape, made)]
    decided = extents.decided_at(tensor, dimension) if dimension is not None else born
    what = (
        "its number of dimensions"
        if dimension is None
        else f"the {shape[dimension]} of dimension {dimension}"
    )
    refused = f"{read.name} has the shape {shape}"
    if wanted is not None:
        refused += f" where the check at line {spot.line} wants {wanted}"
    if decided is None:
        finding.cause = source.cause(spot.file, spot.line, refused)
    else:
        finding.cause = source.cause(decided.file, decided.line, f"{refused}; {what} was decided here")
    finding.fix = (
        f"make it {wanted if wanted is not None else 'what the check wants'} there, or build what checks it for "
        f"{len(shape) if dimension is None else shape[dimension]}: keep the number in one setting that both read"
    )


def _spot(error: BaseException) -> Spot | None:
    """The line that raised, with those of the program that called it; None where a library raised."""
    found: Spot | None = None
    own = False
    for frame, line in reversed(frames_and_lines(error)):
        own = source.is_user_file(frame.f_code.co_filename)
        found = Spot(frame.f_code.co_filename, line, frame, found) if own else found
    return found if own else None


def _refused(spot: Spot) -> tuple[Read, Any, int | None] | None:
    """The reading of a shape that made a line raise, what was wanted instead, and the dimension that differs."""
    for condition, truth in _conditions(spot):
        found = {node: read for node in ast.walk(condition) for read in reads(node, spot)}
        for compare in [n for n in ast.walk(condition) if isinstance(n, ast.Compare)]:
            broken = _broken(compare, truth, found, spot)
            if broken is not None:
                return broken
        # Not computed here: the shape is to blame where no other part of the condition can be.
        alone = isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.Or) is truth
        parts = condition.values if isinstance(condition, ast.BoolOp) and alone else [condition]
        if all(any(node in found for node in ast.walk(part)) for part in parts):
            read = next(iter(found.values()))
            return read, None, read.dimensions[0] if len(read.dimensions) == 1 else None
    return None


def _conditions(spot: Spot) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions on which a line raises, nearest first, each with the truth value that makes it raise."""
    node = source.statement(spot.file, spot.line)
    if isinstance(node, ast.Assert):
        yield node.test, False
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple | ast.List):
        parts = node.targets[0].elts
        if not any(isinstance(part, ast.Starred) for part in parts):
            count = ast.Call(ast.Name("len", ast.Load()), [node.value], [])
            yield ast.Compare(count, [ast.NotEq()], [ast.Constant(len(parts))]), True
    elif isinstance(node, ast.Raise):
        yield from _choices(spot, node)


def _choices(spot: Spot, raising: ast.stmt) -> Iterator[tuple[ast.expr, bool]]:
    """The `if` around a `raise`, with those before it whose `elif` or `else` it is; without any, those just before it
    that leave the function."""
    scope: ast.AST | None = source.function_at(spot.file, spot.line) or source.tree(spot.file)
    holder = _holder(scope, raising)
    if isinstance(holder, ast.If):
        yield holder.test, raising in holder.body
        inner: ast.stmt = raising
        while isinstance(holder, ast.If) and inner in holder.orelse:
            inner, holder = holder, _holder(scope, holder)
            if isinstance(holder, ast.If) and inner in holder.orelse:
                yield holder.test, False
        return
    block = _block(holder, raising) if holder is not None else []
    for before in reversed(block[: block.index(raising)] if block else []):
        if isinstance(before, ast.If) and isinstance(before.body[-1], _LEAVES) and not before.orelse:
            yield before.test, False


def _holder(scope: ast.AST | None, inner: ast.stmt) -> ast.AST | None:
    """The compound statement in which another stands."""
    return next((n for n in ast.walk(scope) if inner in _block(n, inner)), None) if scope else None


def _block(holder: ast.AST, inner: ast.stmt) -> list[ast.stmt]:
    """The list of statements of a compound statement in which another stands."""
    blocks = [getattr(holder, name, None) for name in ("body", "orelse", "finalbody")]
    return next((block for block in blocks if isinstance(block, list) and inner in block), [])


def _broken(
    compare: ast.Compare, truth: bool, found: dict[ast.AST, Read], spot: Spot
) -> tuple[Read, Any, int | None] | None:
    """A comparison of a shape that came out as the raising condition needs it."""
    sides = [compare.left, *compare.comparators]
    values = [found[side].value if side in found else number(side, spot) for side in sides]
    given = [side for side in sides if side in found]
    # Of a weight and what meets it, the weight is as the program built it.
    asked = min(given, key=lambda side: isinstance(found[side].tensor, nn.Parameter), default=None)
    if asked is None or len(sides) != 2 or _holds(compare.ops[0], *values) is not truth:
        return None
    read = found[asked]
    wanted = values[1 - sides.index(asked)]
    if wanted is None:
        wanted = ast.unparse(sides[1 - sides.index(asked)])
    if len(read.dimensions) == 1:
        return read, wanted, read.dimensions[0]
    if isinstance(wanted, tuple) and len(wanted) == len(read.dimensions):
        differ = [d for d, size in zip(read.dimensions, wanted, strict=True) if read.tensor.shape[d] != size]
        if differ:
            return read, wanted, differ[0]
    return read, wanted, None


def _holds(operator: ast.cmpop, left: Any, right: Any) -> bool | None:
    """What a comparison gives; None where a side is not known."""
    match operator:
        case ast.In() | ast.NotIn() if isinstance(right, tuple):
            return (left in right) is isinstance(operator, ast.In)
        case _ if left is None or right is None or isinstance(left, tuple) is not isinstance(right, tuple):
            return None
        case ast.Eq() | ast.NotEq():
            return (left == right) is isinstance(operator, ast.Eq)
        case ast.Lt() | ast.GtE():
            return (left < right) is isinstance(operator, ast.Lt)
        case ast.Gt() | ast.LtE():
            return (left > right) is isinstance(operator, ast.Gt)
    return None
