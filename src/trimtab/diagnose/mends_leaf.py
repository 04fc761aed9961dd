"""A value without a graph that is told to require a gradient afterwards: the flag that hides where the graph was cut.

Reads source, runs nothing; which line cut the graph is for the caller to know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trimtab.diagnose import flow, mends_graph, rewrite, shared_graph, source
from trimtab.diagnose.finding import Place


def flagged_later(born: Place) -> bool:
    """Whether the line that computed a leaf did not make it one: no torch.tensor there, no requires_grad=True."""
    node = source.statement(born.file, born.line)
    calls = [n for n in source.header(node) if isinstance(n, ast.Call)] if node is not None else []
    makes = any(
        source.called_name(call) in mends_graph.MAKERS or source.keyword(call, "requires_grad")
        for call in calls
    )
    return node is not None and not makes


def mend(cut: Place, born: Place, backward: Place | None) -> mends_graph.Mend | None:
    """The fix for the line that cuts, and the flag left out with it."""
    mended = mends_graph.of_cut(cut)
    if mended is None:
        return None
    fix, edits = mended
    for flag in _flags(born, backward):
        gone = rewrite.without(flag[0], flag[1])
        said = f"line {flag[1].lineno}: {rewrite.text_of(*flag)}"
        return f"{fix} Leave the flag out too, which only hides the cut ({said}).", [
            *edits,
            gone,
        ] if edits else []
    return fix, edits


def _flags(born: Place, backward: Place | None) -> Iterator[tuple[str, ast.stmt]]:
    """Statements of their own, `loss.requires_grad_()` or `loss.requires_grad = True`, on the value or the loss."""
    places = [(born, source.bound(source.statement(born.file, born.line)))]
    if backward is not None:
        places.append((backward, {shared_graph.loss_name(backward.file, backward.line)}))
    for place, names in places:
        scope = source.function_at(place.file, place.line) or source.tree(place.file)
        for node in source.own_statements(scope) if scope is not None else ():
            if _flagged(node) in names and _has_company(place.file, node):
                yield place.file, node


def _flagged(node: ast.stmt) -> str | None:
    """What a statement tells to require a gradient."""
    value = getattr(node, "value", None)
    if isinstance(node, ast.Expr) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        on = not value.args or source.is_constant(value.args[0], True)
        return ast.unparse(value.func.value) if value.func.attr == "requires_grad_" and on else None
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if (
        isinstance(target, ast.Attribute)
        and target.attr == "requires_grad"
        and source.is_constant(value, True)
    ):
        return ast.unparse(target.value)
    return None


def _has_company(file: str, node: ast.stmt) -> bool:
    """Whether a block is not left empty, nor a line cut in two, when this statement goes."""
    block = flow.block_of(file, node)
    alone = not any(n.lineno <= node.lineno <= (n.end_lineno or 0) for n in block if n is not node)
    return len(block) > 1 and alone
