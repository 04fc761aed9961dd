"""What to write where the result of a collective comes to nothing. Reads source, runs nothing; changes no file."""

from __future__ import annotations

import ast

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.mends_ranks import Fix


def kept(place: Place, call: ast.Call, given: ast.expr) -> Fix:
    """A name for the tensor that is handed over, and its figures read back where they came from names."""
    node = source.statement(place.file, place.line)
    changed = ast.unparse(call).replace(ast.unparse(given), "reduced", 1)
    code = [f"reduced = {ast.unparse(given)}", changed]
    figures = given.args[0] if isinstance(given, ast.Call) and given.args else None
    names = figures.elts if isinstance(figures, ast.List | ast.Tuple) else [figures]
    if node is None or not all(isinstance(name, ast.Name | ast.Attribute) for name in names):
        return Fix(f"Keep the tensor and read the result from it: `{'`, `'.join(code)}`.", place)
    targets = ", ".join(ast.unparse(name) for name in names if name is not None)
    code.append(
        f"{targets} = reduced.{'tolist()' if isinstance(figures, ast.List | ast.Tuple) else 'item()'}"
    )
    edits = [rewrite.lines_for(place.file, node, "\n".join(code))]
    return Fix(f"Keep the tensor and read the result from it: `{'`, `'.join(code)}`.", place, edits)


def several(place: Place, call: ast.Call) -> Fix:
    """`[tensor] * n`, made anew for each place in the list."""
    fix = "Give every part a tensor of its own"
    given = call.args[0] if source.called_name(call) == "all_gather" and call.args else None
    given = given or (call.args[1] if len(call.args) > 1 else None)
    at, value = place, given
    if isinstance(given, ast.Name):
        made = source.last_assignment(place.file, place.line, given.id)
        value = source.value_for(made, given.id) if made is not None else None
        at = source.place(place.file, made.lineno) if made is not None else place
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        lists, counts = (
            [s for s in (value.left, value.right) if isinstance(s, ast.List)],
            [value.left, value.right],
        )
        if len(lists) == 1 and len(lists[0].elts) == 1:
            count = next(ast.unparse(side) for side in counts if side is not lists[0])
            code = f"[{ast.unparse(lists[0].elts[0])} for _ in range({count})]"
            return Fix(f"{fix}: {code}.", at, [rewrite.in_place_of(place.file, value, code)])
    return Fix(f"{fix}: [torch.empty_like(part) for part in …] in place of one tensor that is repeated.", at)


def summed_once(place: Place, call: ast.Call, added: Place) -> Fix:
    """What is added summed over the ranks, in place of the total to which it is added."""
    total = ast.unparse(call.args[0]) if call.args else "the total"
    fix = f"Add up on each rank alone, and sum `{total}` over the ranks once, where it is read"
    node, step = source.statement(added.file, added.line), source.statement(place.file, place.line)
    simple = (
        isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and ast.unparse(node.target) == total
    )
    if (
        not simple
        or not isinstance(step, ast.Expr)
        or added.file != place.file
        or not isinstance(node, ast.AugAssign)
    ):
        return Fix(f"{fix}: take `{ast.unparse(call)}` out of here.", place)
    part = f"part = torch.as_tensor({ast.unparse(node.value)}, device={total}.device).clone()"
    reduce = ast.unparse(call).replace(total, "part", 1)
    code = [part, reduce, f"{total} += part"]
    edits = [rewrite.lines_for(added.file, node, "\n".join(code)), rewrite.without(place.file, step)]
    said = (
        f"{fix}; or sum what is added, in place of line {added.line} and of this one: `{'`, `'.join(code)}`."
    )
    return Fix(said, place, edits)


def with_own_part(place: Place) -> Fix:
    """This rank's own tensor put back among those that were gathered: it alone has a graph."""
    call = next(
        (c for c in source.call_on(place.file, place.line) if source.called_name(c) == "all_gather"), None
    )
    node, names = source.statement(place.file, place.line), call.args if call is not None else []
    if call is None or not isinstance(node, ast.Expr) or len(names) < 2:
        return Fix(
            "Gather with torch.distributed.nn.functional.all_gather, which has a gradient, or put this rank's own "
            "tensor back into its place among the parts.",
            place,
        )
    module = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else "torch.distributed"
    code = f"{ast.unparse(names[0])}[{module}.get_rank()] = {ast.unparse(names[1])}"
    return Fix(
        f"Put the own part, which has a graph, back after it: `{code}` (or gather with "
        "torch.distributed.nn.functional.all_gather, whose gradient reaches the other ranks too).",
        place,
        [rewrite.after(place.file, node, code)],
    )
