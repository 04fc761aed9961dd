"""Why one rank makes a collective that another does not: the branch that only one of them took. Reads source only.

Each rank's way is given as the lines of the program on its stack, innermost first. A branch on the rank is told from
unequal numbers of steps by where the other rank stood: under the condition, behind it, or out of the loop.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trimtab.diagnose import mends_ranks, own_figures, rewrite, source
from trimtab.diagnose.finding import Cause, Edit
from trimtab.diagnose.own_figures import RANK

Way = Sequence[tuple[str, int]]


@dataclass
class Said:
    """What is found: the line, why, and what to write. (Imports no torch: the parent of a rehearsal asks too.)"""

    cause: Cause
    fix: str
    edits: list[Edit] = field(default_factory=list)


def guard(mine: Way, theirs: Way, rank: int, other: int) -> Said | None:
    """The condition on the rank under which one rank stands at a collective and the other does not."""
    for one, two, who in ((mine, theirs, rank), (theirs, mine, other)):
        for (file, line), beside in _levels(one, two):
            for node in _conditions(file, line):
                if beside is not None and _side(node, beside) == _side(node, line):
                    continue
                if _asks_rank(file, node):
                    return _guarded(file, node, line, beside, who)
    return None


def only_here(way: Way) -> Said | None:
    """The condition on the rank around a way that only some ranks went, and how all would."""
    for file, line in way:
        node = next((n for n in _conditions(file, line) if _asks_rank(file, n)), None)
        if node is not None:
            statement = source.statement(file, line)
            what = ast.unparse(statement).splitlines()[0] if statement is not None else "it"
            fix = f"Let every rank do it: put `{what}` outside of `if {ast.unparse(node.test)}`."
            cause = source.cause(file, node.lineno, "only some ranks come here")
            return Said(cause, fix, _taken_out(file, node, statement))
    return None


def _levels(one: Way, two: Way) -> Iterator[tuple[tuple[str, int], int | None]]:
    """The lines of one way from the outermost in, each with the other's line in the same function if it was there."""
    same = True
    for depth, (file, line) in enumerate(reversed(one), 1):
        partner = two[-depth] if depth <= len(two) else None
        together = (
            same
            and partner is not None
            and partner[0] == file
            and _function(*partner) is _function(file, line)
        )
        yield (file, line), partner[1] if together and partner is not None else None
        same = together and partner is not None and partner[1] == line


def _function(file: str, line: int) -> ast.AST | None:
    return source.function_at(file, line) or source.tree(file)


def _conditions(file: str, line: int) -> list[ast.If]:
    """The `if` statements of the same function around a line, innermost first."""
    scope = _function(file, line)
    nodes = [n for n in ast.walk(scope) if isinstance(n, ast.If)] if scope is not None else []
    return sorted((n for n in nodes if _side(n, line)), key=lambda n: -n.lineno)


def rank_conditions_before(file: str, line: int) -> list[ast.If]:
    """The conditions on the rank, without another branch, that end before a line of the same function; last first."""
    scope = _function(file, line)
    nodes = [n for n in source.own_statements(scope) if isinstance(n, ast.If)] if scope is not None else []
    ended = [n for n in nodes if (n.end_lineno or 0) < line and not n.orelse and _asks_rank(file, n)]
    return sorted(ended, key=lambda n: -n.lineno)


def _side(node: ast.If, line: int) -> str:
    """Which branch of a condition holds a line; empty for none."""
    for name, block in (("body", node.body), ("orelse", node.orelse)):
        if block and block[0].lineno <= line <= (block[-1].end_lineno or 0):
            return name
    return ""


def _asks_rank(file: str, node: ast.If) -> bool:
    """Whether a condition depends on the rank, by its own words or by what its names were set to."""
    said = ast.unparse(node.test)
    if "__name__" in said:
        return False
    if RANK.search(said):
        return True
    made = [source.last_assignment(file, node.lineno, name) for name in source.names_in(node.test)]
    return any(isinstance(m, ast.Assign) and RANK.search(ast.unparse(m.value)) for m in made)


def _guarded(file: str, node: ast.If, line: int, beside: int | None, who: int) -> Said:
    test = ast.unparse(node.test)
    cause = source.cause(
        file, node.lineno, f"only rank {who} runs what is under this, and it waits there for the others"
    )
    if beside is not None and _side(node, beside):
        why = "the ranks take different branches here, and each makes other collectives"
        fix = "Make the same collective calls in the same order on every rank: put them outside of this condition."
        return Said(source.cause(file, node.lineno, why), fix)
    statement = source.statement(file, line)
    what = ast.unparse(statement).splitlines()[0] if statement is not None else "it"
    if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
        rest = [part for part in node.test.values if not RANK.search(ast.unparse(part))]
        if 0 < len(rest) < len(node.test.values):
            code = " and ".join(
                rewrite.operand(p) if isinstance(p, ast.BoolOp) else ast.unparse(p) for p in rest
            )
            fix = f"Every rank has to call it: `if {code}:`, and the rank asked only round what prints or writes."
            return Said(cause, fix, edits=[rewrite.in_place_of(file, node.test, code)])
    fix = f"Every rank has to call it: put `{what}` outside of `if {test}`, and only what prints or writes under it."
    return Said(cause, fix, edits=_taken_out(file, node, statement))


def _taken_out(file: str, node: ast.If, statement: ast.stmt | None) -> list[Edit]:
    """The statement put before the condition, where it is the first under it."""
    if statement is None or node.orelse or not node.body or node.body[0] is not statement:
        return []
    if len(node.body) == 1:
        return [rewrite.in_place_of(file, node, rewrite.written(file, statement))]
    if isinstance(statement, ast.Assign | ast.Expr | ast.AugAssign):
        gone = Edit(file, (statement.lineno, 0), ((statement.end_lineno or statement.lineno) + 1, 0), "")
        return [rewrite.before(file, node, rewrite.written(file, statement)), gone]
    return []


def way_out(mine: Way, other: int) -> Said | None:
    """Why a rank may have left, or skipped a round of, the loops in which another stands: by what it alone decided."""
    for file, line in mine:
        scope = _function(file, line)
        loops = (
            [n for n in ast.walk(scope) if isinstance(n, ast.For | ast.While)] if scope is not None else []
        )
        around = [n for n in loops if n.body[0].lineno <= line <= (n.end_lineno or 0)]
        for loop in sorted(around, key=lambda n: -n.lineno):
            for node in _exits(loop, line):
                if _own_decision(file, node):
                    return _decided_alone(file, node, line, other)
            if isinstance(loop, ast.While) and own_figures.decided_alone(file, loop):
                return _goes_on_alone(file, loop, line, other)
            if isinstance(loop, ast.For) and (decided := _rows_of_rank(file, loop)) is not None:
                return decided
    return None


def _exits(loop: ast.For | ast.While, line: int) -> Iterator[ast.If | ast.ExceptHandler]:
    """The conditions and handlers of a loop that leave it, or skip the rest of a round before a line."""
    for node in ast.walk(loop):
        if not isinstance(node, ast.If | ast.ExceptHandler):
            continue
        for inner in (i for statement in node.body for i in ast.walk(statement)):
            if isinstance(inner, ast.Break | ast.Return) or (
                isinstance(inner, ast.Continue) and inner.lineno < line
            ):
                yield node
                break


def _own_decision(file: str, node: ast.If | ast.ExceptHandler) -> bool:
    """Whether ranks may decide differently: by what a call gives, not by counters and settings."""
    return isinstance(node, ast.ExceptHandler) or own_figures.decided_alone(file, node)


def _decided_alone(file: str, node: ast.If | ast.ExceptHandler, line: int, other: int) -> Said:
    if isinstance(node, ast.ExceptHandler):
        why = f"a rank that comes here skips the collective of line {line}, which the others wait in"
        fix = "Let the error end the run, or let the ranks tell each other (all_reduce of a flag) and skip together."
        return Said(source.cause(file, node.lineno, why), fix)
    test = ast.unparse(node.test)
    why = f"each rank decides this for itself: rank {other} leaves here, and the others wait at line {line}"
    device = mends_ranks.device_at(file, node.lineno)
    flag = f"torch.tensor(float({test}), device={device or 'device'})"
    module = mends_ranks.distributed(file)
    share = f"{module}.all_reduce(flag, op={module}.ReduceOp.MAX)"
    fix = f"Decide together: `flag = {flag}`, `{share}`, then `if flag.item():`."
    edits: list[Edit] = []
    if device is not None and "torch" in _imported(file) and not _is_elif(file, node):
        edits = [
            rewrite.before(file, node, f"flag = {flag}\n{share}"),
            rewrite.in_place_of(file, node.test, "flag.item()"),
        ]
    return Said(source.cause(file, node.lineno, why), fix, edits=edits)


def _is_elif(file: str, node: ast.If) -> bool:
    return any(isinstance(n, ast.If) and n.orelse == [node] for n in source.walk(file))


def _imported(file: str) -> set[str]:
    nodes = [n for n in source.walk(file) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in node.names}


def _goes_on_alone(file: str, loop: ast.While, line: int, other: int) -> Said:
    """A loop whose condition each rank answers for itself: asked of all of them, as the first thing in every round."""
    why = (
        f"each rank decides this for itself: rank {other} leaves the loop, and the others wait at line {line}"
    )
    device, module = mends_ranks.device_at(file, loop.lineno), mends_ranks.distributed(file)
    code = [
        f"flag = torch.tensor(float({ast.unparse(loop.test)}), device={device or 'device'})",
        f"{module}.all_reduce(flag, op={module}.ReduceOp.MIN)",
        "if not flag.item():",
        "    break",
    ]
    share = "`, `".join(code[:2])
    fix = f"Go on together: `while True:`, and first in it `{share}`, `if not flag.item(): break`; or make as many "
    fix += "rounds on every rank."
    edits: list[Edit] = []
    if device is not None and "torch" in _imported(file) and not loop.orelse:
        first = loop.body[0]
        edits = [rewrite.in_place_of(file, loop.test, "True"), rewrite.before(file, first, "\n".join(code))]
    return Said(source.cause(file, loop.lineno, why), fix, edits)


def _rows_of_rank(file: str, loop: ast.For) -> Said | None:
    """What a loop runs over, followed back to a line that takes this rank's part: parts that may differ in length."""
    queue, seen = sorted(source.names_in(loop.iter)), set[str]()
    line = loop.lineno
    while queue and len(seen) < 16:
        name = queue.pop(0)
        if name in seen:
            continue
        seen.add(name)
        made = source.last_assignment(file, line, name)
        value = source.value_for(made, name) if made is not None else None
        values = [value] if value is not None else _in_class(file, name)
        for one in values:
            part = _part(one) if "Sampler" not in ast.unparse(one) else None
            if part is not None:
                why = "every rank takes its own part here, and the parts are of different length"
                fix, edits = _even(file, part)
                return Said(source.cause(file, part.lineno, why), fix, edits)
            queue += sorted(source.names_in(one) - seen) if value is not None else []
    return None


def _in_class(file: str, name: str) -> list[ast.expr]:
    """What the methods of a class of this file compute that hand out its rows."""
    methods = ("__init__", "__iter__", "__getitem__", "__len__")
    found: list[ast.expr] = []
    for owner in (n for n in source.walk(file) if isinstance(n, ast.ClassDef) and n.name == name):
        for method in (m for m in owner.body if isinstance(m, source.Function) and m.name in methods):
            found += [n for n in ast.walk(method) if isinstance(n, ast.Call | ast.Subscript)]
    return found


def _part(node: ast.expr) -> ast.expr | None:
    """The slice, range or islice in an expression that depends on the rank."""
    for inner in ast.walk(node):
        takes = isinstance(inner, ast.Subscript) or (
            isinstance(inner, ast.Call) and source.called_name(inner) in ("range", "Subset", "islice")
        )
        if takes and re.search(r"\brank\b|_rank\b|\brank_|\bget_rank\(", ast.unparse(inner)):
            assert isinstance(inner, ast.expr)
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
