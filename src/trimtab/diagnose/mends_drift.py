"""What to write where the ranks of one model come to hold different weights: share the weights, or the figure that a
learning rate hangs on, or wrap again what was unfrozen. Reads source, runs nothing; changes no file."""

from __future__ import annotations

import ast

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.mends_ranks import WRAPPERS, Fix, device_at, distributed


def share_weights(place: Place | None, model: str | None = None) -> Fix:
    """Rank 0's weights for all, after a line that gives each rank its own."""
    node = source.statement(place.file, place.line) if place is not None else None
    name = model or (_owner_of_call(node) if node is not None else None)
    if place is None or node is None or name is None:
        fix = "Do this before DistributedDataParallel takes the model: it gives every rank rank 0's weights."
        return Fix(fix, place)
    over = f"for parameter in {name}.parameters():"
    share = f"{distributed(place.file)}.broadcast(parameter.data, src=0)"
    edit = rewrite.after(place.file, node, f"{over}\n    {share}")
    return Fix(f"Give all ranks rank 0's weights after this line: `{over} {share}`.", place, [edit])


def _owner_of_call(node: ast.stmt) -> str | None:
    """`model` in `model.apply(…)`, or in a call of a function of the program's own that is given it alone."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func.value)
    given = [a for a in call.args if isinstance(a, ast.Name | ast.Attribute)]
    return ast.unparse(given[0]) if len(given) == 1 else None


def share_written(place: Place) -> Fix:
    """Rank 0's values for all, after a line that writes values of each rank's own into a tensor."""
    node, target = source.statement(place.file, place.line), _written_on(place)
    fix = "Let every rank write the same: draw from a generator that is seeded alike on all ranks"
    if node is None or target is None:
        return Fix(f"{fix}.", place)
    code = f"{distributed(place.file)}.broadcast({target}, src=0)"
    edits = [rewrite.after(place.file, node, code)]
    return Fix(f"{fix}, or share rank 0's after this line: {code}.", place, edits)


def averaged(places: list[Place]) -> Fix:
    """What each rank writes into a tensor of its own, averaged over the ranks after each line that writes."""
    fix, edits = "Bring the ranks together after each line that writes", list[Edit]()
    for place in places:
        node, target = source.statement(place.file, place.line), _written_on(place)
        if node is None or target is None:
            return Fix(f"{fix}: all_reduce it, and divide by the number of ranks.", places[0])
        module = distributed(place.file)
        code = [f"{module}.all_reduce({target})", f"{target} /= {module}.get_world_size()"]
        edits.append(rewrite.after(place.file, node, "\n".join(code)))
        fix += f"{',' if len(edits) > 1 else ':'} `{'; '.join(code)}` (line {place.line})"
    return Fix(f"{fix}.", places[0], edits)


def _written_on(place: Place) -> str | None:
    """The tensor into which a line writes in place, as it names it."""
    node = source.statement(place.file, place.line)
    target: ast.expr | None = node.target if isinstance(node, ast.AugAssign) else None
    if isinstance(node, ast.Expr):
        target = node.value
        while isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            target = target.func.value if target.func.attr.endswith("_") else None
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0].value
    elif isinstance(node, ast.Assign) and source.last_name(node.targets[0]) == "data":
        target = node.targets[0]
    nodes = [n for n in source.walk(place.file) if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {(alias.asname or alias.name).partition(".")[0] for n in nodes for alias in n.names}
    plain = isinstance(target, ast.Name | ast.Attribute) and source.root(target) not in modules
    return ast.unparse(target) if target is not None and plain else None


def same_rate(place: Place | None) -> Fix:
    """The figure that a scheduler is told, averaged over the ranks first."""
    fix = "Set it from what is the same on every rank (the number of steps), or all_reduce the figure first."
    node = source.statement(place.file, place.line) if place is not None else None
    if place is None or not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return Fix(fix, place)
    call = node.value
    told = call.args[0] if call.args else source.keyword(call, "metrics")
    device = device_at(place.file, place.line)
    if told is None or device is None or source.called_name(call) != "step":
        return Fix(fix, place)
    module = distributed(place.file)
    code = [
        f"figure = torch.as_tensor({ast.unparse(told)}, dtype=torch.float32, device={device})",
        f"{module}.all_reduce(figure)",
    ]
    mean = f"figure.item() / {module}.get_world_size()"
    edits = [
        rewrite.before(place.file, node, "\n".join(code)),
        rewrite.in_place_of(place.file, told, mean),
    ]
    shown = ast.unparse(call).replace(ast.unparse(told), mean, 1)
    return Fix(f"Let every rank decide by the mean over the ranks: {'; '.join(code)}; {shown}.", place, edits)


def wrap_again(unfrozen: Place, at: Place | None) -> Fix:
    """A model of which something was unfrozen after DDP took it: wrapped once more after that line."""
    fix = "Make it trainable before DistributedDataParallel(...) takes the model, or wrap it again after this line"
    place = _in_function_of(unfrozen, at) if at is not None else unfrozen
    node, wrap = source.statement(place.file, place.line), source.statement(at.file, at.line) if at else None
    if at is None or node is None or not isinstance(wrap, ast.Assign) or place.file != at.file:
        return Fix(fix + ".", place)
    call = next((c for c in source.call_on(at.file, at.line) if source.called_name(c) in WRAPPERS), None)
    if (
        call is None
        or not call.args
        or source.function_at(at.file, at.line) is not source.function_at(place.file, place.line)
    ):
        return Fix(fix + ".", place)
    target, given = ast.unparse(wrap.targets[0]), ast.unparse(call.args[0])
    inner = (
        f"{target}.module"
        if not isinstance(call.args[0], ast.Name | ast.Attribute) or target == given
        else given
    )
    rest = rewrite.text_of(at.file, call)[len(ast.unparse(call.func)) + 1 :]
    written = (
        f"{target} = {ast.unparse(call.func)}({inner}{rest[len(rewrite.text_of(at.file, call.args[0])) :]}"
    )
    edits: list[Edit] = [rewrite.after(place.file, node, written)]
    return Fix(f"{fix}: {written}.", place, edits)


def called_beside(place: Place, at: Place) -> Place:
    """The one call, in the function around another line, of the function that holds a place; else the place itself."""
    function = source.function_at(place.file, place.line)
    around = source.function_at(at.file, at.line)
    calls = source.calls(at.file, function.name) if function is not None and function is not around else []
    beside = [c for c in calls if source.function_at(at.file, c.lineno) is around]
    return source.place(at.file, beside[0].lineno) if len(beside) == 1 else place


def _in_function_of(place: Place, at: Place) -> Place:
    """The one call of the function that holds a place, behind the line that wrapped; else the place itself."""
    function = source.function_at(place.file, place.line)
    if function is None or function is source.function_at(at.file, at.line):
        return place
    calls = [c for c in source.calls(at.file, function.name) if c.lineno > at.line]
    return source.place(at.file, calls[0].lineno) if len(calls) == 1 else place


def synced(opened: Place) -> Fix:
    """no_sync() for all but the last backward pass before a step."""
    fix = "Leave no_sync() for the last backward pass before each optimizer.step()"
    node = source.statement(opened.file, opened.line)
    for choice in source.header(node) if node is not None else ():
        if isinstance(choice, ast.IfExp) and "no_sync" in ast.unparse(choice.body):
            turned = (
                f"{ast.unparse(choice.orelse)} if {ast.unparse(choice.test)} else {ast.unparse(choice.body)}"
            )
            edit = rewrite.in_place_of(opened.file, choice, turned)
            return Fix(f"{fix}: the condition is the wrong way round. {turned}.", opened, [edit])
    return Fix(f"{fix}.", opened)


def through_ddp(past: Place) -> Fix:
    """The call of the module inside, made a call of DDP itself where that is how it is written."""
    fix = "put the loss into forward() if need be."
    for call in source.call_on(past.file, past.line):
        inner = call.func
        if isinstance(inner, ast.Attribute) and inner.attr == "module":
            outer = ast.unparse(inner.value)
            edit = rewrite.in_place_of(past.file, inner, outer)
            said = f"{outer}({', '.join(ast.unparse(a) for a in (*call.args, *call.keywords))})"
            return Fix(f"Call the DDP object itself: {said}; {fix}", past, [edit])
    for node in source.walk(past.file):
        if isinstance(node, ast.Assign) and _unwraps(node):
            fix = (
                f"Train with the wrapped model, and unwrap it only to save: leave out `{ast.unparse(node)}`."
            )
            return Fix(fix, source.place(past.file, node.lineno), [rewrite.without(past.file, node)])
    return Fix(f"Call the DDP object, not the module inside it; {fix}", past)


def _unwraps(node: ast.Assign) -> bool:
    """`model = accelerator.unwrap_model(model)`, `model = model.module`: the wrapped one is gone."""
    target, value = ast.unparse(node.targets[0]), node.value
    if isinstance(value, ast.Attribute):
        return value.attr == "module" and ast.unparse(value.value) == target
    return (
        isinstance(value, ast.Call)
        and source.called_name(value) in ("unwrap_model", "unwrap", "extract_model_from_parallel")
        and [ast.unparse(a) for a in value.args] == [target]
    )
