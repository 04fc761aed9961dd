"""The branch or loop that parted two ranks, from where each stands and what decided there. Reads source and recorded
values; `branches` and `loops_left` say what to write."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from trimtab.diagnose import branches, flow, loops_left, mends_ranks, rewrite, source, trace
from trimtab.diagnose.answers import Sides
from trimtab.diagnose.branches import Said, Way
from trimtab.diagnose.own_figures import RANK


def by_values(mine: Way, theirs: Way, sides: Sides) -> Said | None:
    """The innermost condition or loop around one rank, and not the other, on which both are known to differ."""
    for one, two, at in ((mine, theirs, 0), (theirs, mine, 1)):
        who, other = sides.ranks[at], sides.ranks[1 - at]
        for (file, line), beside in reversed(list(branches.levels(one, two))):
            for node in _around(file, line):
                if beside is not None and _with(node, line) == _with(node, beside):
                    continue
                if isinstance(node, ast.If) and sides.parted(file, node):
                    return branches.guarded(file, node, line, beside, who, sides)
                if isinstance(node, ast.While) and sides.parted(file, node):
                    return loops_left.goes_on_alone(file, node, line, other)
                if isinstance(node, ast.For) and (said := _uneven(file, node, sides)) is not None:
                    return said
            for left in loops_left.exits_before(file, line):
                if isinstance(left, ast.If) and sides.parted(file, left):
                    return loops_left.decided_alone(file, left, line, other, sides)
    return None


def by_place(mine: Way, theirs: Way, sides: Sides) -> Said | None:
    """The loop in which one rank stands and which the other has left, by where both stand in the function around."""
    for one, two, other in ((mine, theirs, sides.ranks[1]), (theirs, mine, sides.ranks[0])):
        for (file, line), beside in reversed(list(branches.levels(one, two))):
            loops = [n for n in _around(file, line) if isinstance(n, ast.For)]
            for loop in (n for n in loops if beside is None or not _with(n, beside)):
                if not flow.is_same_everywhere(loop) and _may_differ(file, loop):
                    why = f"rank {other} has left this loop, in which the other still is: unequal numbers of rounds"
                    fix, edits = _same_rounds(file, loop)
                    return Said(source.cause(file, loop.lineno, why), fix, edits)
    return None


def _may_differ(file: str, loop: ast.For) -> bool:
    """Whether a loop runs over something that was computed: not over so many rounds as the program says in figures."""
    if isinstance(loop.iter, ast.Call) and source.called_name(loop.iter) in ("range", "trange"):
        given = [trace.decided(file, loop.lineno, argument)[1] for argument in loop.iter.args]
        return not all(isinstance(value, ast.Constant) for value in given)
    return True


def _around(file: str, line: int) -> Iterator[ast.If | ast.While | ast.For]:
    """The conditions and loops of the same function around a line, innermost first."""
    scope = branches.function_around(file, line)
    kinds = (ast.If, ast.While, ast.For)
    nodes = [n for n in ast.walk(scope) if isinstance(n, kinds)] if scope is not None else []
    yield from sorted((n for n in nodes if _with(n, line)), key=lambda n: -n.lineno)


def _with(node: ast.If | ast.While | ast.For, line: int) -> str:
    """Which part of a statement holds a line; empty for none."""
    if isinstance(node, ast.If):
        return branches.side(node, line)
    return "body" if node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0) else ""


def _uneven(file: str, loop: ast.For, sides: Sides) -> Said | None:
    """A loop over something that is longer on one rank."""
    names = sides.differing(file, loop.iter)
    if not names:
        return None
    decided = sides.said(file, loop.iter)
    for node in (n for n in ast.walk(loop.iter) if isinstance(n, ast.expr) and ast.unparse(n) in names):
        filled = _filled_by_rank(file, node)
        said = branches.only_here([(file, filled.lineno)]) if filled is not None else None
        if said is not None:
            why = f"only some ranks come here, and so {decided} in the loop of line {loop.lineno}"
            return replace(said, cause=source.cause(file, said.cause.line, why))
    why = f"every rank makes another number of rounds: {decided}"
    fix, edits = _same_rounds(file, loop)
    return Said(source.cause(file, loop.lineno, why), fix, edits)


def _filled_by_rank(file: str, node: ast.expr) -> ast.stmt | None:
    """The statement under a condition on the rank that puts something into a list, traced back to its first name."""
    place, _ = trace.decided(file, node.lineno, node)
    made = source.statement(file, place.line)
    names = source.bound(made) if made is not None else set()
    scope = branches.function_around(file, place.line)
    for condition in (n for n in ast.walk(scope) if isinstance(n, ast.If)) if scope is not None else ():
        if not RANK.search(ast.unparse(condition.test)):
            continue
        for one in condition.body:
            call = one.value if isinstance(one, ast.Expr) else None
            fills = isinstance(call, ast.Call) and source.called_name(call) in ("append", "extend", "insert")
            owner = source.root(call.func) if fills and isinstance(call, ast.Call) else ""
            if owner in names or names & source.bound(one):
                return one
    return None


def _same_rounds(file: str, loop: ast.For) -> tuple[str, list[rewrite.Edit]]:
    """As many rounds on every rank as the one with the fewest makes, where the loop counts them."""
    ranged = [
        n
        for n in ast.walk(loop.iter)
        if isinstance(n, ast.Call) and source.called_name(n) in ("range", "trange") and len(n.args) == 1
    ]
    device, module = mends_ranks.device_at(file, loop.lineno), mends_ranks.distributed(file)
    if len(ranged) != 1 or device is None or not mends_ranks.imports_torch(file):
        even = "Give every rank the same number of rounds: a DistributedSampler, drop_last=True, or the fewest of all "
        return even + f"ranks (all_reduce of the number, op={module}.ReduceOp.MIN).", []
    count = ranged[0].args[0]
    code = [
        f"rounds = torch.tensor({ast.unparse(count)}, device={device})",
        f"{module}.all_reduce(rounds, op={module}.ReduceOp.MIN)",
    ]
    edits = [
        rewrite.before(file, loop, "\n".join(code)),
        rewrite.in_place_of(file, count, "rounds.item()"),
    ]
    shown = ast.unparse(loop.iter).replace(
        ast.unparse(ranged[0]), f"{source.called_name(ranged[0])}(rounds.item())"
    )
    head = f"for {ast.unparse(loop.target)} in {shown}:"
    return f"Make as many rounds as the rank with the fewest: `{code[0]}`, `{code[1]}`, then `{head}`.", edits
