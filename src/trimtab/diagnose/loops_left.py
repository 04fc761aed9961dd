"""Why a rank may have left, or skipped a round of, a loop in which another still stands: by what it alone decided, by
an error that it swallowed, or by rows that are fewer. Reads source only; `branches` tells the branches on the rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from trimtab.diagnose import mends_ranks, own_figures, rewrite, source
from trimtab.diagnose.answers import Sides
from trimtab.diagnose.branches import Said, Way, around
from trimtab.diagnose.finding import Edit

_NUMBER = re.compile(r"\brank\b|_rank\b|\brank_|\bget_rank\(")


def way_out(mine: Way, other: int, sides: Sides) -> Said | None:
    """Why a rank may have left, or skipped a round of, the loops in which another stands: by what it alone decided."""
    for file, line in mine:
        for loop in _loops(file, line):
            for node in _exits(loop, line):
                if _own_decision(file, node, sides) or _by_its_rows(file, node, loop, sides):
                    return decided_alone(file, node, line, other, sides)
            if isinstance(loop, ast.While) and own_figures.decided_alone(file, loop):
                return goes_on_alone(file, loop, line, other)
            if isinstance(loop, ast.For) and (decided := rows_of_rank(file, loop)) is not None:
                return decided
    return None


def _loops(file: str, line: int) -> list[ast.For | ast.While]:
    """The loops of the same function around a line, innermost first."""
    return [n for n in around(file, line) if not isinstance(n, ast.If)]


def exits_before(file: str, line: int) -> Iterator[ast.If | ast.ExceptHandler]:
    """What may leave the loops around a line, or skip their rest before it."""
    for loop in _loops(file, line):
        yield from _exits(loop, line)


def _exits(loop: ast.For | ast.While, line: int) -> Iterator[ast.If | ast.ExceptHandler]:
    """The conditions and handlers of a loop that leave it, or skip the rest of a round before a line."""
    for node in ast.walk(loop):
        # An error that is swallowed leaves out the rest of what was tried.
        if isinstance(node, ast.Try) and node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0):
            yield from (h for h in node.handlers if not any(isinstance(n, ast.Raise) for n in ast.walk(h)))
        if not isinstance(node, ast.If | ast.ExceptHandler):
            continue
        for inner in (i for statement in node.body for i in ast.walk(statement)):
            if isinstance(inner, ast.Break | ast.Return) or (
                isinstance(inner, ast.Continue) and inner.lineno < line
            ):
                yield node
                break


def _own_decision(file: str, node: ast.If | ast.ExceptHandler, sides: Sides) -> bool:
    """Whether ranks may decide differently: by what a call gives, not by counters and settings."""
    if isinstance(node, ast.ExceptHandler):
        return True
    return sides.parted(file, node) is not False and own_figures.decided_alone(file, node)


def _by_its_rows(
    file: str, node: ast.If | ast.ExceptHandler, loop: ast.For | ast.While, sides: Sides
) -> bool:
    """Whether a condition asks what the loop has just taken, which is each rank's own; not how many it has taken."""
    if not isinstance(node, ast.If) or not isinstance(loop, ast.For) or sides.parted(file, node) is False:
        return False
    asks = source.names_in(node.test) & _rows_named(loop.target, loop.iter)
    return bool(asks) and (_from_loader(file, loop) or rows_of_rank(file, loop) is not None)


def _from_loader(file: str, loop: ast.For) -> bool:
    """Whether a loop runs over batches: parameters and settings are the same on every rank."""
    values = (value for _, _, value in followed_back(file, loop.lineno, loop.iter) if value is not None)
    return any("loader" in ast.unparse(one).lower() for one in (loop.iter, *values))


def _rows_named(target: ast.expr, given: ast.expr) -> set[str]:
    """The names under which a loop has its rows: what counts rounds, and what goes through settings, is left out."""
    called = source.called_name(given) if isinstance(given, ast.Call) else ""
    if isinstance(given, ast.Constant | ast.List | ast.Tuple | ast.Set) or called in ("range", "count"):
        return set()
    if called in ("enumerate", "zip") and isinstance(given, ast.Call) and isinstance(target, ast.Tuple):
        parts = target.elts[1:] if called == "enumerate" else target.elts
        return set().union(*map(_rows_named, parts, given.args), set())
    return source.names_in(target)


def decided_alone(file: str, node: ast.If | ast.ExceptHandler, line: int, other: int, sides: Sides) -> Said:
    """What to say of an exit that one rank takes alone."""
    if isinstance(node, ast.ExceptHandler):
        why = f"a rank that comes here skips the collective of line {line}, which the others wait in"
        last = node.body[-1]
        swallowed = isinstance(last, ast.Continue | ast.Pass)
        raised = [rewrite.in_place_of(file, last, "raise")] if swallowed else []
        fix = "Let the error end the run (`raise`), or let the ranks tell each other (all_reduce of a flag) and skip "
        return Said(source.cause(file, node.lineno, why), fix + "together.", raised)
    if (told := mends_ranks.as_many_turns(file, node)) is not None:
        why = f"{mends_ranks.IN_TURN}: rank {other} has no further one, and the others wait at line {line}"
        return Said(source.cause(file, node.lineno, why), told.text, told.edits)
    why = f"each rank decides this for itself: rank {other} leaves here, and the others wait at line {line}"
    why += f" ({said})" if sides.parted(file, node) and (said := sides.said(file, node.test)) else ""
    told = mends_ranks.decided_together(file, node)
    if told.place is not None:
        why = f"only one rank has the result of this, by which line {node.lineno} decides on every rank"
    return Said(
        source.cause(file, told.place.line if told.place else node.lineno, why), told.text, told.edits
    )


def goes_on_alone(file: str, loop: ast.While, line: int, other: int) -> Said:
    """A loop whose condition each rank answers for itself: asked of all of them, as the first thing in every round."""
    why = (
        f"each rank decides this for itself: rank {other} leaves the loop, and the others wait at line {line}"
    )
    device, module = mends_ranks.device_at(file, loop.lineno), mends_ranks.distributed(file)
    code = [
        f"flag = torch.tensor(float({ast.unparse(loop.test)}), device={device or 'torch.cuda.current_device()'})",
        f"{module}.all_reduce(flag, op={module}.ReduceOp.MIN)",
        "if not flag.item():",
        "    break",
    ]
    share = "`, `".join(code[:2])
    fix = f"Go on together: `while True:`, and first in it `{share}`, `if not flag.item(): break`; or make as many "
    fix += "rounds on every rank."
    edits: list[Edit] = []
    if device is not None and mends_ranks.imports_torch(file) and not loop.orelse:
        first = loop.body[0]
        edits = [rewrite.in_place_of(file, loop.test, "True"), rewrite.before(file, first, "\n".join(code))]
    return Said(source.cause(file, loop.lineno, why), fix, edits)


def followed_back(
    file: str, line: int, node: ast.AST
) -> Iterator[tuple[str, ast.stmt | None, ast.expr | None]]:
    """The names behind an expression, nearest first, each with the statement that made it and what it was given."""
    queue, seen = [(name, line) for name in sorted(source.names_in(node))], set[str]()
    while queue and len(seen) < 16:
        name, before = queue.pop(0)
        if name in seen:
            continue
        seen.add(name)
        made = source.last_assignment(file, before, name)
        value = source.value_for(made, name) if made is not None else None
        yield name, made, value
        if made is not None and value is not None:
            queue += [(read, made.lineno) for read in sorted(source.names_in(value) - seen)]


def rows_of_rank(file: str, loop: ast.For) -> Said | None:
    """What a loop runs over, followed back to a line that takes this rank's part: parts that may differ in length."""
    made = ((value, name) for name, _, value in followed_back(file, loop.lineno, loop.iter))
    for value, name in [(loop.iter, ""), *made]:
        for one in [value] if value is not None else _in_class(file, name):
            part = part_of_rank(file, one) if "Sampler" not in ast.unparse(one) else None
            if part is not None:
                why = "every rank takes its own part here, and the parts are of different length"
                fix, edits = _even(file, part)
                return Said(source.cause(file, part.lineno, why), fix, edits)
    return None


def _in_class(file: str, name: str) -> list[ast.expr]:
    """What the methods of a class of this file compute that hand out its rows."""
    methods = ("__init__", "__iter__", "__getitem__", "__len__")
    found: list[ast.expr] = []
    for owner in (n for n in source.walk(file) if isinstance(n, ast.ClassDef) and n.name == name):
        if any(_packs(file, n) for n in ast.walk(owner) if isinstance(n, ast.Yield)):
            continue  # how many it gives hangs on what is in the rows
        for method in (m for m in owner.body if isinstance(m, source.Function) and m.name in methods):
            found += [n for n in ast.walk(method) if isinstance(n, ast.Call | ast.Subscript)]
    return found


def _packs(file: str, given: ast.Yield) -> bool:
    """Whether something is given under more than the one loop over the rows."""
    return len(around(file, given.lineno)) > 1


def part_of_rank(file: str, node: ast.expr) -> ast.expr | None:
    """The slice, range or islice in an expression that depends on the rank."""
    for inner in ast.walk(node):
        takes = isinstance(inner, ast.Subscript) or (
            isinstance(inner, ast.Call) and source.called_name(inner) in ("range", "Subset", "islice")
        )
        if takes:
            assert isinstance(inner, ast.expr)
            if own_figures.of_rank(file, inner.lineno, inner, _NUMBER):
                return inner
    return None


def _even(file: str, part: ast.expr) -> tuple[str, list[Edit]]:
    """A part of the rows that is as long on every rank: `rows[rank::world]` without the rest."""
    fix = "Give every rank as many rows: a DistributedSampler, or cut the rest off before sharing out"
    if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice):
        low, high, step = part.slice.lower, part.slice.upper, part.slice.step
        if high is None and low is not None and step is not None:
            rows, size = ast.unparse(part.value), rewrite.operand(step)
            code = f"{rows}[{ast.unparse(low)}:len({rows}) // {size} * {size}:{ast.unparse(step)}]"
            return f"{fix}: {code}.", [rewrite.in_place_of(file, part, code)]
    if isinstance(part, ast.Call) and source.called_name(part) == "islice" and len(part.args) == 4:
        rows, size = ast.unparse(part.args[0]), rewrite.operand(part.args[3])
        code = f"len({rows}) // {size} * {size}"
        if source.is_constant(part.args[2], None) and not isinstance(part.args[0], ast.Call):
            shown = ", ".join([rows, ast.unparse(part.args[1]), code, ast.unparse(part.args[3])])
            said = f"{fix}: {ast.unparse(part.func)}({shown})."
            return said, [rewrite.in_place_of(file, part.args[2], code)]
    return f"{fix}.", []
