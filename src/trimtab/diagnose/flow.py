"""Questions about the way through a program: which loop holds a line and why it ends, which condition decides.

Reads source through `source`; runs nothing.
"""

from __future__ import annotations

import ast

from trimtab.diagnose import source, trace
from trimtab.diagnose.finding import Place
from trimtab.diagnose.source import place

_SWITCHES = {"no_grad", "inference_mode"}
_OF_A_MODEL = {
    *("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules", "children"),
    "state_dict",
}
_WRITERS = {"masked_fill", "fill", "where", "full", "full_like", "new_full", "index_fill", "pad"}


def loop_at(at: Place) -> ast.For | ast.While | None:
    """The innermost loop statement that holds a line beneath its header."""
    loops = [n for n in source.walk(at.file) if isinstance(n, ast.For | ast.While)]
    around = [n for n in loops if n.body[0].lineno <= at.line <= (n.end_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def is_same_everywhere(loop: ast.For | ast.While) -> bool:
    """Whether a loop makes as many rounds on every rank, by what it runs over: a model's parameters or layers."""
    header = loop.iter if isinstance(loop, ast.For) else None
    calls = [source.called_name(n) for n in ast.walk(header) if isinstance(n, ast.Call)] if header else []
    return bool(_OF_A_MODEL.intersection(calls))


def block_of(file: str, node: ast.stmt | None) -> list[ast.stmt]:
    """The statements among which a statement stands."""
    parent = next(source.above(file, node), None) if node is not None else None
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return next((block for block in blocks if isinstance(block, list) and node in block), [])


def round_start(at: Place) -> Place | None:
    """The first line of the body of the loop around a line: where a call that belongs once into every round stands."""
    loop = loop_at(at)
    return place(at.file, loop.body[0].lineno) if loop else None


def way_out(at: Place) -> Place | None:
    """Why a loop around a line may end earlier on one rank: a condition that leaves it, a count that depends on the
    rank, else its header."""
    if (loop := loop_at(at)) is None:
        return None
    header = loop.iter if isinstance(loop, ast.For) else loop.test
    if "rank" in ast.unparse(header):
        return place(at.file, loop.lineno)
    names = source.names_in(header)
    for node in ast.walk(header):
        # What the caller gives: `fit(DataLoader(shard(rows, rank)))`.
        if isinstance(node, ast.Name | ast.Attribute):
            decided, value = trace.decided(at.file, loop.lineno, node)
            if value is not node and "rank" in ast.unparse(value):
                return decided
    counts = [n for n in source.walk(at.file) if isinstance(n, ast.Assign) and names & source.bound(n)]
    for count in counts:
        if count.lineno <= loop.lineno and "rank" in ast.unparse(count.value):
            return place(at.file, count.lineno)
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Break | ast.Return) for inner in node.body):
            return place(at.file, node.lineno)
    return place(at.file, loop.lineno)


def idle_context(at: Place) -> Place | None:
    """Where the `nullcontext()` of a `with` statement around a line is made, if there is one."""
    for opened in source.contexts_around(at.file, at.line):
        made = source.last_assignment(at.file, opened.lineno, getattr(opened, "id", ""))
        for node in (opened, getattr(made, "value", None)):
            if isinstance(node, ast.Call) and source.called_name(node) == "nullcontext":
                return place(at.file, node.lineno)
    return None


def switch_around(file: str, line: int) -> Place | None:
    """The `with torch.no_grad():` (or the decorator) of the same function that holds a line."""
    function = source.function_at(file, line)
    decorators = function.decorator_list if function is not None else []
    for opened in (*source.contexts_around(file, line), *decorators):
        if switches_off(opened):
            return place(file, opened.lineno)
    return None


def switches_off(node: ast.expr) -> bool:
    """Whether a context or decorator switches gradients off."""
    name = source.last_name(node.func if isinstance(node, ast.Call) else node)
    if name == "set_grad_enabled" and isinstance(node, ast.Call):
        return not source.is_constant(node.args[0] if node.args else None, True)
    return name in _SWITCHES


def return_line(function: object, constructs: str) -> Place | None:
    """The `return` of a function that builds an object of the named class, else its last `return`."""
    if (code := getattr(function, "__code__", None)) is None:
        return None
    node = source.function_at(code.co_filename, code.co_firstlineno)
    lines = [
        (constructs in {source.last_name(n) for n in ast.walk(inner.value)}, inner.lineno)
        for inner in (ast.walk(node) if node is not None else ())
        if isinstance(inner, ast.Return) and inner.value is not None
    ]
    return place(code.co_filename, max(lines)[1]) if lines else None


def writing_line(file: str, line: int, value: int) -> Place | None:
    """The one line of the function around a line that writes this number into a tensor; None for none or several."""
    lines = set()
    for node in ast.walk(source.function_at(file, line) or source.tree(file) or ast.Pass()):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Subscript) for t in node.targets):
            given = [node.value]
        elif isinstance(node, ast.Call) and source.called_name(node).rstrip("_") in _WRITERS:
            given = [*node.args, *(k.value for k in node.keywords)]
        else:
            continue
        if any(_is_number(n, value) for n in given):
            lines.add(node.lineno)
    return place(file, lines.pop()) if len(lines) == 1 else None


def _is_number(node: ast.expr, value: int) -> bool:
    try:
        return bool(ast.literal_eval(node) == value)
    except ValueError:
        return False


def choice_of(file: str, line: int, attribute: str) -> Place | None:
    """The condition inside the function at a line on which `self.attribute` is used."""
    function = source.function_at(file, line)
    if function is None:
        return None
    loops = [n for n in ast.walk(function) if isinstance(n, ast.For) and _reads(n.iter, attribute, set())]
    names = {name for loop in loops for name in source.bound(loop)}
    for node in ast.walk(function):
        if not isinstance(node, ast.If | ast.IfExp):
            continue
        branches = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]
        if any(_reads(branch, attribute, names) for branch in branches):
            return place(file, node.lineno)
        # A round of a loop over the layers that is left out, or a return before they are used.
        uses = [
            n.lineno for n in ast.walk(function) if isinstance(n, ast.expr) and _reads(n, attribute, names)
        ]
        leaves = [n for branch in branches for n in ast.walk(branch)]
        skips = any(isinstance(n, ast.Continue | ast.Break) for n in leaves) and any(
            node in ast.walk(n) for n in loops
        )
        returns = any(isinstance(n, ast.Return) for n in leaves) and bool(uses) and min(uses) > node.lineno
        if isinstance(node, ast.If) and (skips or returns):
            return place(file, node.lineno)
    return None


def _reads(node: ast.AST, attribute: str, names: set[str]) -> bool:
    """Whether something reads an attribute, or one of these names."""
    return any(
        (isinstance(n, ast.Attribute) and n.attr == attribute) or (isinstance(n, ast.Name) and n.id in names)
        for n in ast.walk(node)
    )


def condition_of_call(at: Place, names: tuple[str, ...]) -> Place | None:
    """The `if` of the function around a line under which a call of one of these names stands, and the line does not."""
    function = source.function_at(at.file, at.line) or source.tree(at.file)
    for node in ast.walk(function) if function is not None else ():
        if not isinstance(node, ast.If) or node.lineno <= at.line <= (node.end_lineno or 0):
            continue
        calls = [n for statement in node.body for n in ast.walk(statement) if isinstance(n, ast.Call)]
        if any(source.called_name(call) in names for call in calls):
            return place(at.file, node.lineno)
    return None
