"""Why one rank makes a collective that another does not: the branch that only one of them took. Reads source only.

Each rank's way is given as the lines of the program on its stack, innermost first. A branch on the rank is told from
unequal numbers of steps by where the other rank stood: under the condition, behind it, or out of the loop.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trimtab.diagnose import mends_ranks, own_figures, rewrite, source
from trimtab.diagnose.answers import Sides
from trimtab.diagnose.finding import Cause, Edit, Finding, Place
from trimtab.diagnose.own_figures import RANK

Way = Sequence[tuple[str, int]]
Divides = ast.If | ast.While | ast.For


@dataclass
class Said:
    """What is found: the line, why, and what to write. (Imports no torch: the parent of a rehearsal asks too.)"""

    cause: Cause | None
    fix: str
    edits: list[Edit] = field(default_factory=list)

    def as_fix(self) -> mends_ranks.Fix:
        """The same as a fix, for a sentence of its own on why."""
        return mends_ranks.Fix(self.fix, self.cause, self.edits)

    def finding(self, message: str, where: Place | None, op: str) -> Finding:
        """What is told of ranks that this parts."""
        return Finding("ranks-disagree", "fault", message, where, self.cause, self.fix, op, edits=self.edits)


def guard(mine: Way, theirs: Way, sides: Sides) -> Said | None:
    """The condition, on the rank or on its own figures, under which one rank alone stands at a collective."""
    for one, two, who in ((mine, theirs, sides.ranks[0]), (theirs, mine, sides.ranks[1])):
        for (file, line), beside in levels(one, two):
            for node in conditions(file, line):
                if beside is not None and side(node, beside) == side(node, line):
                    continue
                alone = _asks_rank(file, node) or own_figures.decided_alone(file, node)
                if alone and sides.parted(file, node) is not False:
                    return guarded(file, node, line, beside, who, sides)
    return None


def left_function(mine: Way, theirs: Way, other: int) -> Said | None:
    """The function in which one rank stands and which the other has left before, by what it alone decided."""
    for depth, ((file, line), beside) in enumerate(levels(mine, theirs), 1):
        inside = mine[-depth - 1] if depth < len(mine) else None
        if beside is None or inside is None or not (beside > line or _in_one_loop(file, line, beside)):
            continue
        function = source.function_at(*inside)
        for node in ast.walk(function) if function is not None else ():
            leaves = isinstance(node, ast.If) and any(
                isinstance(n, ast.Return) for s in node.body for n in ast.walk(s)
            )
            if not leaves or not isinstance(node, ast.If) or node.lineno >= inside[1]:
                continue
            if own_figures.decided_alone(inside[0], node):
                why = f"each rank decides this for itself: rank {other} returns, and never comes to line {inside[1]}"
                cause = source.cause(inside[0], node.lineno, why)
                if (kept := _goes_on(inside[0], node, inside[1])) is not None:
                    return Said(cause, *kept)
                told = mends_ranks.decided_together(inside[0], node)
                return Said(cause, told.text, told.edits)
    return None


def _goes_on(file: str, node: ast.If, line: int) -> tuple[str, list[Edit]] | None:
    """A return of all ranks but one, before a line at which all have to meet: only what is between is for that one."""
    turned, block = _turned(node.test), _block(file, node)
    meets = next((n for n in block if n.lineno <= line <= (n.end_lineno or 0)), None)
    leaves = node.body[0] if len(node.body) == 1 and not node.orelse else None
    if turned is None or meets is None or not isinstance(leaves, ast.Return) or leaves.value is not None:
        return None
    between = block[block.index(node) + 1 : block.index(meets)]
    if not between:
        return None
    head = f"if {turned}:"
    text = "\n".join(textwrap.indent(rewrite.written(file, one), "    ") for one in between)
    whole = textwrap.indent(f"{head}\n{text}", " " * node.col_offset)
    edit = Edit(file, (node.lineno, 0), ((between[-1].end_lineno or between[-1].lineno) + 1, 0), f"{whole}\n")
    fix = f"Let every rank go on to line {line}, and put what only one does under `{head}` in place of the return."
    return fix, [edit]


def _block(file: str, node: ast.stmt) -> list[ast.stmt]:
    """The statements among which one stands."""
    above = next(iter(source.above(file, node)), None)
    blocks = [getattr(above, name, []) for name in ("body", "orelse", "finalbody")]
    return next((list(one) for one in blocks if node in one), [])


def _in_one_loop(file: str, line: int, other: int) -> bool:
    """Whether two different lines stand in one loop: who is at the earlier one may be a round ahead."""
    return line != other and any(side(n, other) for n in around(file, line) if not isinstance(n, ast.If))


def only_here(way: Way) -> Said | None:
    """The condition on the rank around a way that only some ranks went, and how all would."""
    for file, line in way:
        node = next((n for n in conditions(file, line) if _asks_rank(file, n)), None)
        if node is not None:
            statement = source.statement(file, line)
            what = ast.unparse(statement).splitlines()[0] if statement is not None else "it"
            fix = f"Let every rank do it: put `{what}` outside of `if {ast.unparse(node.test)}`."
            cause = source.cause(file, node.lineno, "only some ranks come here")
            if (code := _without_rank(node)) is not None:
                edits = [rewrite.in_place_of(file, node.test, code)]
                return Said(cause, f"Let every rank do it: `if {code}:`.", edits)
            out = taken_out(file, node, statement, set())
            return Said(cause, fix, out.edits if out is not None else [])
    return None


def levels(one: Way, two: Way) -> Iterator[tuple[tuple[str, int], int | None]]:
    """The lines of one way from the outermost in, each with the other's line in the same function if it was there."""
    same = True
    for depth, (file, line) in enumerate(reversed(one), 1):
        partner = two[-depth] if depth <= len(two) else None
        together = (
            same
            and partner is not None
            and partner[0] == file
            and function_around(*partner) is function_around(file, line)
        )
        yield (file, line), partner[1] if together and partner is not None else None
        same = together and partner is not None and partner[1] == line


def function_around(file: str, line: int) -> ast.AST | None:
    """The function that holds a line, else its module."""
    return source.function_at(file, line) or source.tree(file)


def around(file: str, line: int) -> list[Divides]:
    """The conditions and loops of the same function around a line, innermost first."""
    scope = function_around(file, line)
    nodes = [n for n in ast.walk(scope) if isinstance(n, Divides)] if scope is not None else []
    return sorted((n for n in nodes if side(n, line)), key=lambda n: -n.lineno)


def conditions(file: str, line: int) -> list[ast.If]:
    """The `if` statements of the same function around a line, innermost first; `__name__` is the same everywhere."""
    found = [n for n in around(file, line) if isinstance(n, ast.If)]
    return [n for n in found if "__name__" not in source.names_in(n.test)]


def rank_conditions_before(file: str, line: int) -> list[ast.If]:
    """The conditions on the rank, without another branch, that end before a line of the same function; last first."""
    scope = function_around(file, line)
    nodes = [n for n in source.own_statements(scope) if isinstance(n, ast.If)] if scope is not None else []
    ended = [n for n in nodes if (n.end_lineno or 0) < line and not n.orelse and _asks_rank(file, n)]
    return sorted(ended, key=lambda n: -n.lineno)


def logged_by_some(file: str) -> Said | None:
    """What Lightning's `self.log(…, sync_dist=True)` is told by some ranks only. It is exchanged later, where the epoch
    ends: no rank stands at that line then, and the others have nothing of that name to give."""
    for node in source.walk(file):
        if not isinstance(node, ast.If) or not _asks_rank(file, node):
            continue
        for call in (n for statement in node.body for n in ast.walk(statement) if isinstance(n, ast.Call)):
            synced = source.keyword(call, "sync_dist")
            if (
                source.called_name(call) not in ("log", "log_dict")
                or getattr(synced, "value", False) is not True
            ):
                continue
            why = "only the ranks that this is true of log what is under it, and sync_dist=True exchanges it among all"
            said = ast.unparse(call)
            fix = (
                f"Log it on every rank, outside of this condition: `{said}`; or leave sync_dist=True out and log it "
                "with rank_zero_only=True, which exchanges nothing."
            )
            return Said(source.cause(file, node.lineno, why), fix)
    return None


def side(node: Divides, line: int) -> str:
    """Which part of a condition or loop holds a line; empty for none."""
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


def guarded(file: str, node: ast.If, line: int, beside: int | None, who: int, sides: Sides) -> Said:
    """What to say of a condition under which one rank alone makes a collective."""
    test, decided = ast.unparse(node.test), sides.said(file, node.test)
    if (turns := mends_ranks.as_many_turns(file, node)) is not None:
        why = f"{mends_ranks.IN_TURN}: only rank {who} has this one, and waits there for the others"
        return Said(source.cause(file, node.lineno, why), turns.text, turns.edits)
    why = f"only rank {who} runs what is under this, and it waits there for the others"
    cause = source.cause(file, node.lineno, why + (f": {decided}" if decided else ""))
    if beside is not None and side(node, beside):
        why = "the ranks take different branches here, and each makes other collectives"
        fix = "Make the same collective calls in the same order on every rank: put them outside of this condition."
        return Said(source.cause(file, node.lineno, why), fix)
    statement = source.statement(file, line)
    what = ast.unparse(statement).splitlines()[0] if statement is not None else "it"
    if (apart := _called_apart(file, node, statement)) is not None:
        fix = (
            f"Every rank has to call it, and only one to print or write: `{'`, `'.join(apart.splitlines())}`."
        )
        # In the place of an `elif` the lines would stand behind the branches before it, and run in any case.
        is_elif = linecache.getline(file, node.lineno).lstrip().startswith("elif")
        return Said(cause, fix, [] if is_elif else [rewrite.lines_for(file, node, apart)])
    if (waiting := _others_wait(file, node)) is not None:
        return Said(cause, *waiting)
    if (code := _without_rank(node)) is not None:
        fix = f"Every rank has to call it: `if {code}:`, and the rank asked only round what prints or writes."
        return Said(cause, fix, edits=[rewrite.in_place_of(file, node.test, code)])
    absent = sides.objects(file, node.test)
    own = not (_asks_rank(file, node) or absent or sides.by_rank(file, node.test))
    if own and own_figures.decided_alone(file, node):
        told = mends_ranks.decided_together(file, node)
        return Said(cause, told.text, told.edits)
    if (out := taken_out(file, node, statement, absent)) is not None:
        fix = f"Every rank has to call it: put `{out.shown}` {out.side} `if {test}:`, and only what prints or writes "
        return Said(cause, f"{fix}under it.", out.edits)
    if not RANK.search(test) and not sides.by_rank(file, node.test):
        told = mends_ranks.decided_together(file, node)
        return Said(cause, told.text, told.edits)
    fix = f"Every rank has to call it: put `{what}` outside of `if {test}`, and only what prints or writes under it."
    return Said(cause, fix)


def _called_apart(file: str, node: ast.If, statement: ast.stmt | None) -> str | None:
    """A function of the program that is called inside what prints or writes, called before it by every rank."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    own = {n.name for n in source.walk(file) if isinstance(n, source.Function)}
    if (
        not isinstance(call, ast.Call)
        or node.body != [statement]
        or node.orelse
        or source.called_name(call) in own
    ):
        return None
    inside = [n for n in ast.walk(call) if isinstance(n, ast.Call) and source.called_name(n) in own]
    written = rewrite.written(file, node.body[0])
    if len(inside) != 1 or (asked := ast.unparse(inside[0])) not in written or "\n" in written:
        return None
    first = f"result = {asked}"
    rest, code = _without_rank(node), written.replace(asked, "result", 1)
    if rest is None:
        return f"{first}\nif {ast.unparse(node.test)}:\n    {code}"
    assert isinstance(node.test, ast.BoolOp)
    ranked = " and ".join(ast.unparse(part) for part in node.test.values if RANK.search(ast.unparse(part)))
    return f"if {rest}:\n    {first}\n    if {ranked}:\n        {code}"


def _others_wait(file: str, node: ast.If) -> tuple[str, list[Edit]] | None:
    """A barrier for all but the first rank, which never comes to one: after what it is to do before them."""
    only = node.body[0] if len(node.body) == 1 else None
    call = only.value if isinstance(only, ast.Expr) else None
    turned = _turned(node.test)
    waits = isinstance(call, ast.Call) and source.called_name(call) in ("barrier", "wait_for_everyone")
    block = _block(file, node)
    work = block[block.index(node) + 1] if node in block[:-1] else None
    if only is None or not waits or turned is None or work is None or node.orelse:
        return None
    code = f"if {turned}:\n    {rewrite.written(file, only)}"
    said = f"Let the one that they wait for come to it too, after `{ast.unparse(work).splitlines()[0]}`: "
    return f"{said}`{code.replace(chr(10) + '    ', ' ')}`.", [rewrite.after(file, work, code)]


def _turned(test: ast.expr) -> str | None:
    """What holds for the first rank alone, of a condition that holds for all others."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq | ast.Gt):
        return f"{ast.unparse(test.left)} == 0" if source.is_constant(test.comparators[0], 0) else None
    return None


def _without_rank(node: ast.If) -> str | None:
    """What a condition asks beside the rank: `step == 3` in `step == 3 and rank == 0`."""
    if not (isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)):
        return None
    rest = [part for part in node.test.values if not RANK.search(ast.unparse(part))]
    if not 0 < len(rest) < len(node.test.values):
        return None
    return " and ".join(rewrite.operand(p) if isinstance(p, ast.BoolOp) else ast.unparse(p) for p in rest)


@dataclass
class TakenOut:
    """What is put outside of a condition, on which side of it, and the edits that do it."""

    shown: str
    side: str
    edits: list[Edit]


def taken_out(file: str, node: ast.If, statement: ast.stmt | None, absent: set[str]) -> TakenOut | None:
    """A statement under a condition put behind it, else before it with what it needs; None where it cannot stand there.

    `absent` is what not every rank has.
    """
    other = any(isinstance(n, ast.If) and n.orelse == [node] for n in source.walk(file))
    if statement is None or node.orelse or statement not in node.body or other:
        return None
    moved, needed, bound = [statement], source.names_in(statement), set[str]()
    for one in reversed(node.body[: node.body.index(statement)]):
        call = one.value if isinstance(one, ast.Expr) else None
        written = {source.root(call.func)} if isinstance(call, ast.Call) else source.bound(one)
        if written & needed:
            moved.insert(0, one)
            needed |= source.names_in(one)
            bound |= source.bound(one)
    texts = {ast.unparse(n) for one in moved for n in ast.walk(one) if isinstance(n, ast.expr)}
    plain = all(isinstance(one, ast.Assign | ast.Expr | ast.AugAssign) for one in moved)
    if absent & texts or not (plain or len(node.body) == 1):
        return None
    text = "\n".join(rewrite.written(file, one) for one in moved)
    if len(node.body) == 1:
        return TakenOut(text, "outside of", [rewrite.lines_for(file, node, text)])
    before = all(source.last_assignment(file, node.lineno, name) is not None for name in bound)
    if len(moved) > 1 and statement is node.body[-1] and before:
        # What one rank alone is to give stays with it.
        text = rewrite.written(file, statement)
        return TakenOut(text, "behind", [rewrite.after(file, node, text), rewrite.without(file, statement)])
    if len(moved) == len(node.body):
        return TakenOut("`, `".join(text.splitlines()), "in place of", [rewrite.lines_for(file, node, text)])
    if moved == [statement] and statement is node.body[-1] and not source.bound(statement):
        return TakenOut(text, "behind", [rewrite.after(file, node, text), rewrite.without(file, statement)])
    edits = [rewrite.before(file, node, text), *(rewrite.without(file, one) for one in moved)]
    return TakenOut("`, `".join(text.splitlines()), "before", edits)
