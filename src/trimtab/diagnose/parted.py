"""The branch or loop that parted two ranks, from where each stands and what decided there. Reads source and recorded
values; `branches` and `loops_left` say what to write."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace

from trimtab.diagnose import branches, flow, loops_left, mends_ranks, rewrite, source, trace
from trimtab.diagnose.answers import Known, Sides
from trimtab.diagnose.branches import Said, Way
from trimtab.diagnose.finding import cause_at
from trimtab.diagnose.own_figures import RANK, TOGETHER

_DRAWS = frozenset(("choice", "choices", "randint", "randrange", "random", "sample", "uniform", "integers"))


def by_values(mine: Way, theirs: Way, sides: Sides) -> Said | None:
    """The innermost condition or loop around one rank, and not the other, on which both are known to differ."""
    for one, two, at in ((mine, theirs, 0), (theirs, mine, 1)):
        who, other = sides.ranks[at], sides.ranks[1 - at]
        for (file, line), beside in reversed(list(branches.levels(one, two))):
            for node in branches.around(file, line):
                if beside is not None and branches.side(node, line) == branches.side(node, beside):
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
            loops = [n for n in branches.around(file, line) if isinstance(n, ast.For)]
            for loop in (n for n in loops if beside is None or not branches.side(n, beside)):
                if not flow.is_same_everywhere(loop) and _may_differ(file, loop):
                    why = f"rank {other} has left this loop, in which the other still is: unequal numbers of rounds"
                    fix, edits = _same_rounds(file, loop)
                    return Said(source.cause(file, loop.lineno, why), fix, edits)
    return None


def at_one_line(way: Way, sides: Sides) -> Said | None:
    """Why two ranks give other sizes at one line: they are in other rounds of its loop, or each drew for itself."""
    file, line = way[0]
    loops = [n for n in branches.around(file, line) if isinstance(n, ast.For)]
    if loops and (said := other_order(file, line, sides)) is not None:
        return said
    if loops and sides.differing(file, _read(loops[0].target)):
        around = [
            n for n in branches.around(file, line) if isinstance(n, ast.If) and n.lineno > loops[0].lineno
        ]
        skips = [n for n in loops_left.exits_before(file, line) if isinstance(n, ast.If)]
        target = source.names_in(loops[0].target)
        for node in (n for n in (*around, *skips) if target & source.names_in(n.test)):
            return _skipped(file, node, loops[0])
    return _chosen(file, line, sides)


def _read(target: ast.expr) -> ast.expr:
    """A loop's target as an expression that is read, where it stands."""
    read = ast.parse(ast.unparse(target), mode="eval").body
    return ast.copy_location(read, target)


def other_order(file: str, line: int, sides: Sides) -> Said | None:
    """A loop over names that come in another order on each rank."""
    loop = next((n for n in branches.around(file, line) if isinstance(n, ast.For)), None)
    both = sides.of(file, line)
    if loop is None or both is None or not _is_set(loop.iter, both[0]):
        return None
    for name in sides.differing(file, _read(loop.target)):
        if not all(isinstance(known[name], str) for known in both):
            continue
        why = f"the ranks go through this in different orders: {_names(both, name, sides)}"
        items = ast.unparse(loop.iter)
        code = f"for {ast.unparse(loop.target)} in sorted({items}):"
        edits = [rewrite.in_place_of(file, loop.iter, f"sorted({rewrite.text_of(file, loop.iter)})")]
        return Said(
            source.cause(file, loop.lineno, why), f"Go through it in one order on every rank: {code}", edits
        )
    return None


def _names(both: tuple[Known, Known], name: str, sides: Sides) -> str:
    return " and ".join(
        f"{known[name]!r} on rank {rank}" for known, rank in zip(both, sides.ranks, strict=True)
    )


def _is_set(node: ast.expr, known: Known) -> bool:
    """Whether something comes in an order that is each process's own."""
    for inner in ast.walk(node):
        makes = isinstance(inner, ast.Call) and source.called_name(inner) in ("set", "frozenset")
        held = known.get(ast.unparse(inner)) if isinstance(inner, ast.Name | ast.Attribute) else None
        if makes or isinstance(inner, ast.Set | ast.SetComp):
            return source.called_name(node) != "sorted" if isinstance(node, ast.Call) else True
        if isinstance(held, dict) and held.get("kind") in ("set", "frozenset"):
            return True
    return False


def _skipped(file: str, node: ast.If, loop: ast.For) -> Said:
    """Rounds that one rank leaves out: of a gradient that is not there, zeros in its place."""
    why = f"a rank skips rounds by this, and the ranks are in other rounds of the loop of line {loop.lineno}"
    cause = source.cause(file, node.lineno, why)
    asked = next((n for n in ast.walk(node.test) if isinstance(n, ast.Attribute) and n.attr == "grad"), None)
    if asked is None:
        told = mends_ranks.decided_together(file, node)
        return Said(cause, told.text, told.edits)
    gradient, owner = ast.unparse(asked), ast.unparse(asked.value)
    fill = f"{gradient} = torch.zeros_like({owner})"
    leaves = node.body[-1] if isinstance(node.body[-1], ast.Continue) else None
    if leaves is not None and len(node.body) == 1:
        return Said(
            cause, f"Give it zeros in place of `continue`: {fill}.", [rewrite.in_place_of(file, leaves, fill)]
        )
    edits = [rewrite.before(file, node, f"if {gradient} is None:\n    {fill}")]
    return Said(
        cause, f"Give every rank the same rounds, before this line: `if {gradient} is None: {fill}`.", edits
    )


def _chosen(file: str, line: int, sides: Sides) -> Said | None:
    """What the size of something hangs on, followed back to a name that each rank has set for itself."""
    node = source.statement(file, line)
    for name, made, value in loops_left.followed_back(file, line, node) if node is not None else ():
        read = ast.Name(name, ast.Load(), lineno=line, col_offset=0)
        if made is None or value is None or name not in sides.differing(file, read):
            continue
        if any(source.called_name(n) in _DRAWS for n in ast.walk(value) if isinstance(n, ast.Call)):
            told = mends_ranks.shared_choice(file, made, name)
            why = f"every rank chooses for itself here: {sides.said(file, read)}"
            return Said(source.cause(file, made.lineno, why), told.text, told.edits)
    return None


def _may_differ(file: str, loop: ast.For) -> bool:
    """Whether a loop runs over something that was computed: not over so many rounds as the program says in figures."""
    if isinstance(loop.iter, ast.Call) and source.called_name(loop.iter) in ("range", "trange"):
        given = [trace.decided(file, loop.lineno, argument)[1] for argument in loop.iter.args]
        return not all(isinstance(value, ast.Constant) for value in given)
    return True


def _uneven(file: str, loop: ast.For, sides: Sides) -> Said | None:
    """A loop over something that is longer on one rank."""
    names = sides.differing(file, loop.iter) if sides.at_once else set[str]()
    if not names or sides.by_rank(file, loop.iter):
        return None  # that each has a number of its own tells nothing of the rounds
    decided = sides.said(file, loop.iter)
    for node in (n for n in ast.walk(loop.iter) if isinstance(n, ast.expr) and ast.unparse(n) in names):
        filled = _filled_by_rank(file, node)
        said = branches.only_here([(file, filled.lineno)]) if filled is not None else None
        if said is not None:
            why = f"only some ranks come here, and so {decided} in the loop of line {loop.lineno}"
            return replace(said, cause=cause_at(said.cause, why))
    if (rows := loops_left.rows_of_rank(file, loop)) is not None:
        why = f"every rank takes its own part here, and so {decided} in the loop of line {loop.lineno}"
        return replace(rows, cause=cause_at(rows.cause, why))
    why = f"every rank makes another number of rounds: {decided}"
    fix, edits = _same_rounds(file, loop, names)
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


def _same_rounds(file: str, loop: ast.For, names: set[str] | None = None) -> tuple[str, list[rewrite.Edit]]:
    """As many rounds on every rank as the one with the fewest makes, where the loop counts them."""
    ranged = [
        n
        for n in ast.walk(loop.iter)
        if isinstance(n, ast.Call) and source.called_name(n) in ("range", "trange") and n.args
    ]
    ends = ranged[0].args[1 if len(ranged[0].args) > 1 else 0] if len(ranged) == 1 else None
    if ends is not None and names is not None and not names & {ast.unparse(n) for n in ast.walk(ends)}:
        ends = None
    device, module = mends_ranks.device_at(file, loop.lineno), mends_ranks.distributed(file)
    model = mends_ranks.wrapped_at(file, loop.lineno)
    exchanges = any(source.called_name(n) in TOGETHER for n in ast.walk(loop) if isinstance(n, ast.Call))
    if ends is None and model is not None and not exchanges and not loop.orelse:
        code = f"with {model}.join():\n{textwrap.indent(rewrite.written(file, loop), '    ')}"
        fix = f"Let the ranks that are done first go along with the others: put the loop into `with {model}.join():`; "
        fix += "or give every rank as many rounds."
        return fix, [rewrite.lines_for(file, loop, code)]
    if ends is None or device is None or not mends_ranks.imports_torch(file):
        even = "Give every rank the same number of rounds: a DistributedSampler, drop_last=True, or the fewest of all "
        return even + f"ranks (all_reduce of the number, op={module}.ReduceOp.MIN).", []
    codes = [
        f"rounds = torch.tensor({ast.unparse(ends)}, device={device})",
        f"{module}.all_reduce(rounds, op={module}.ReduceOp.MIN)",
    ]
    edits = [
        rewrite.before(file, loop, "\n".join(codes)),
        rewrite.in_place_of(file, ends, "rounds.item()"),
    ]
    shown = ast.unparse(loop.iter).replace(ast.unparse(ends), "rounds.item()")
    head = f"for {ast.unparse(loop.target)} in {shown}:"
    return (
        f"Make as many rounds as the rank with the fewest: `{codes[0]}`, `{codes[1]}`, then `{head}`.",
        edits,
    )
