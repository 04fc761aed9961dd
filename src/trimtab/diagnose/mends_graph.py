"""How a graph that ends too early is mended: what to write on the line that cuts it. Reads source, runs nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from types import FrameType

from trimtab.diagnose import holders, rewrite, scope, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.flow import switches_off

_WRAPS = frozenset(("float", "int"))
_TAKES_OUT = frozenset(("detach", "item", "tolist", "numpy", "cpu"))
MAKERS = frozenset(("tensor", "as_tensor", "Tensor", "Variable", "FloatTensor"))
_REPLACE = ("FSDP", "FullyShardedDataParallel", "fully_shard", "deepcopy", "prepare", "parallelize_module")
"""Calls that give back a model with other parameters than it was given, or put others in their place."""
_REPLACE_IN_PLACE = ("fully_shard", "parallelize_module")
_ARGS = frozenset(("argmax", "argmin"))

Mend = tuple[str, list[Edit]]


def of_cut(place: Place | None) -> Mend | None:
    """The fix for a line that takes values out of a graph, with the code that keeps them in it."""
    node = source.statement(place.file, place.line) if place is not None else None
    if place is None or node is None:
        return None
    if (opened := next((n for n in _contexts(node) if switches_off(n)), None)) is not None:
        return _switch(place.file, node, opened)
    inner = list(source.header(node))
    for call in (n for n in inner if isinstance(n, ast.Call) and source.called_name(n) == "numpy"):
        tensor = ast.unparse(_bare(call.func.value)) if isinstance(call.func, ast.Attribute) else ""
        if tensor and (mend := _through_numpy(call, tensor, inner)) is not None:
            return mend
    mends = [mend for n in inner if isinstance(n, ast.Call) and (mend := _call(place.file, n)) is not None]
    # A value that was rebuilt from numbers is often told to require a gradient afterwards.
    rebuilt = [n for n in inner if isinstance(n, ast.Call) and source.called_name(n) in MAKERS and n.args]
    if len(rebuilt) == 1:
        return _rebuilt(place.file, rebuilt[0], rebuilt[0].args[0])
    if mends:
        # Which of several is the one that cuts cannot be read.
        return mends[0] if len(mends) == 1 else (mends[0][0], [])
    asked = [n for n in inner if isinstance(n, ast.Call) and _of_comparison(n) is not None]
    if len(asked) == 1 and (soft := _of_comparison(asked[0])) is not None:
        edits = [rewrite.in_place_of(place.file, asked[0], ast.unparse(soft))]
        return f"Compute with the values themselves, which have a gradient: {rewrite.shown(edits)}.", edits
    for read in [n for n in inner if isinstance(n, ast.Attribute) and n.attr == "data"]:
        if isinstance(read.ctx, ast.Load):
            text = ast.unparse(read.value)
            return f"Use the tensor itself, which keeps its graph: {text}.", [
                rewrite.in_place_of(place.file, read, text)
            ]
    return None


def _of_comparison(call: ast.Call) -> ast.expr | None:
    """What is compared in `(scores > 0.5).float()`."""
    value = call.func.value if isinstance(call.func, ast.Attribute) and not call.args else None
    return value.left if isinstance(value, ast.Compare) and source.called_name(call) == "float" else None


def _contexts(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.With):
        return [item.context_expr for item in node.items]
    return list(node.decorator_list) if isinstance(node, source.Function) else []


def _switch(file: str, node: ast.stmt, opened: ast.expr) -> Mend:
    name = ast.unparse(opened)
    if isinstance(node, source.Function):
        last = opened.end_lineno or opened.lineno
        gone = Edit(file, (opened.lineno, 0), (last + 1, 0), "")
        return f"Leave @{name} away: what this computes is trained through.", [gone]
    fix = f"Take this out of `with {name}`: what is computed inside has no graph"
    root = ast.unparse(opened.func).rpartition(".")[0] if isinstance(opened, ast.Call) else ""
    if root:
        code = f"{root}.enable_grad()"
        return f"{fix} (or write `with {code}`).", [rewrite.in_place_of(file, opened, code)]
    return f"{fix}.", []


def _call(file: str, call: ast.Call) -> Mend | None:
    name = source.called_name(call)
    if name in MAKERS and call.args:
        return _rebuilt(file, call, call.args[0])
    if isinstance(call.func, ast.Attribute):
        value = call.func.value
        if name == "detach":
            text = ast.unparse(value)
            return f"Leave .detach() away: {text}.", [rewrite.in_place_of(file, call, text)]
        if name in ("item", "tolist", "numpy"):
            text = ast.unparse(_bare(value))
            return f"Keep the tensor, not its number: {text}.", [rewrite.in_place_of(file, call, text)]
        if name == "requires_grad_":
            return (
                "Build the loss from the model's outputs with torch's own operations; .requires_grad_() on a finished "
                "value only hides that it has no graph.",
                [],
            )
    if name in _ARGS:
        return (
            f"{name} has no gradient: compute the loss from the scores themselves (cross_entropy, softmax, "
            "torch.nn.functional.gumbel_softmax).",
            [],
        )
    if name in _WRAPS and isinstance(call.func, ast.Name) and call.args:
        text = ast.unparse(call.args[0])
        return f"Keep the tensor, not its number: {text}.", [rewrite.in_place_of(file, call, text)]
    return None


def _through_numpy(call: ast.Call, tensor: str, inner: list[ast.AST]) -> Mend | None:
    """A value that numpy goes on computing with: the names that torch has for the same."""
    roots = [
        n
        for n in inner
        if isinstance(n, ast.Call) and source.root(n.func) in ("np", "numpy") and call in ast.walk(n)
    ]
    if not roots:
        return None
    names = [ast.unparse(n.func).partition(".")[2] for n in roots[::-1]]
    same = [f"torch.{name}" for name in names if _torch_has(name)]
    by = f" ({', '.join(same)})" if same else ""
    return f"Compute it with torch's own operations{by} on {tensor}: what numpy computes has no graph.", []


def _torch_has(name: str) -> bool:
    import torch

    thing: object = torch
    for part in name.split("."):
        thing = getattr(thing, part, None)
    return callable(thing)


def _bare(node: ast.expr) -> ast.expr:
    """Without the detach() and cpu() on the way to a number."""
    while (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES_OUT
    ):
        node = node.func.value
    return node


def _rebuilt(file: str, call: ast.Call, given: ast.expr) -> Mend:
    """A loss made anew from numbers: torch.tensor copies values and knows no graph."""
    if isinstance(given, ast.List | ast.ListComp):
        inside: ast.expr = (
            ast.List([_tensor_in(item) for item in given.elts]) if isinstance(given, ast.List) else given
        )
        if isinstance(given, ast.ListComp):
            inside = ast.ListComp(_tensor_in(given.elt), given.generators)
        code = f"torch.stack({ast.unparse(inside)})"
        parts = given.elts if isinstance(given, ast.List) else [given.elt]
        tensors = bool(parts) and not any(isinstance(part, ast.Constant) for part in parts)
        edits = [rewrite.in_place_of(file, call, code)] if tensors else []
        return f"Stack the tensors themselves, which keeps their graphs: {code}.", edits
    if isinstance(given, ast.Name | ast.Attribute):
        text = ast.unparse(given)
        numbers = _appended_number(file, text.rpartition(".")[2])
        if numbers is not None:
            line, item = numbers
            kept = f"Keep tensors in {text} (line {line.lineno}: append {ast.unparse(item)})"
            fix = f"{kept} and stack them: torch.stack({text})."
            edits = [
                rewrite.in_place_of(file, line, ast.unparse(item)),
                rewrite.in_place_of(file, call, f"torch.stack({text})"),
            ]
            return fix, edits
        if _appends(file, text.rpartition(".")[2]):
            code = f"torch.stack({text})"
            return f"Stack the tensors themselves, which keeps their graphs: {code}.", [
                rewrite.in_place_of(file, call, code)
            ]
        return f"Use {text} itself: torch.tensor copies its values and drops its graph.", [
            rewrite.in_place_of(file, call, text)
        ]
    text = ast.unparse(_bare(given))
    return f"Use the tensor itself ({text}): torch.tensor copies values and drops the graph.", []


def _appends(file: str, name: str) -> list[ast.expr]:
    """What is appended to a list of this name."""
    calls = (c for c in source.calls(file, "append") if isinstance(c.func, ast.Attribute) and c.args)
    return [
        c.args[0]
        for c in calls
        if isinstance(c.func, ast.Attribute) and source.last_name(c.func.value) == name
    ]


def _appended_number(file: str, name: str) -> tuple[ast.expr, ast.expr] | None:
    """What is appended to a list as a number: the expression, and the tensor inside it."""
    for item in _appends(file, name):
        if (inner := _tensor_in(item)) is not item:
            return item, inner
    return None


def _tensor_in(item: ast.expr) -> ast.expr:
    """The tensor of which an expression takes the number: `loss` in `float(loss)` and `loss.item()`."""
    if (
        isinstance(item, ast.Call)
        and isinstance(item.func, ast.Name)
        and item.func.id in _WRAPS
        and item.args
    ):
        return item.args[0]
    return _bare(item)


def move_behind(file: str, moved: Place, behind: Place) -> list[Edit]:
    """A statement put behind a later one of the same block; nothing where that would not surely run."""
    one, other = source.statement(file, moved.line), source.statement(file, behind.line)
    if one is None or other is None or moved.file != behind.file or one.lineno >= other.lineno:
        return []
    for node in source.walk(file):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list) and one in block and other in block:
                between = block[block.index(one) + 1 : block.index(other) + 1]
                names = source.bound(one)
                # What stands between, outside of functions, must not need it yet.
                if any(
                    names & source.names_in(n)
                    for n in between
                    if not isinstance(n, source.Function | ast.ClassDef)
                ):
                    return []
                return rewrite.moved(file, one, other)
    return []


def bound_again(made: Place | None) -> Place | None:
    """Where the model whose parameters a line takes is bound to something else afterwards, in the same scope."""
    node = source.statement(made.file, made.line) if made is not None else None
    if made is None or node is None:
        return None
    calls = [
        n for n in source.header(node) if isinstance(n, ast.Call) and source.called_name(n) == "parameters"
    ]
    owners = [call.func.value for call in calls if isinstance(call.func, ast.Attribute)]
    for text in dict.fromkeys(ast.unparse(owner) for owner in owners if isinstance(owner, ast.Attribute)):
        scope = source.function_at(made.file, made.line)
        sets = [n for n in source.walk(made.file) if isinstance(n, ast.Assign) and n.lineno > node.lineno]
        again = [n.lineno for n in sets for target, _ in source.pairs(n) if ast.unparse(target) == text]
        again = [line for line in again if source.function_at(made.file, line) is scope]
        if again:
            return source.place(made.file, max(again))
    for name in dict.fromkeys(source.root(call.func) for call in calls):
        end = node.end_lineno or 0
        later = [n.lineno for n in source.assignments(made.file, made.line, name) if n.lineno > end]
        scope = source.function_at(made.file, made.line)
        for call in source.calls(made.file, *_REPLACE, *_replacing(made.file)):
            given = any(isinstance(a, ast.Name) and a.id == name for a in call.args)
            if given and call.lineno > end and source.function_at(made.file, call.lineno) is scope:
                later.append(call.lineno)
        if name and later:
            return source.place(made.file, max(later))
    return None


def _replacing(file: str) -> list[str]:
    """The program's own functions that put other parameters into the model that they are given."""
    functions = [n for n in source.walk(file) if isinstance(n, source.Function)]
    calls = {
        f.name: {source.called_name(n) for n in ast.walk(f) if isinstance(n, ast.Call)} for f in functions
    }
    return [name for name, called in calls.items() if called.intersection(_REPLACE_IN_PLACE)]


def of_evaluation(frames: Iterable[FrameType]) -> Mend:
    """A model that is evaluated with gradients on: the function that runs it, without them."""
    frame = holders.outside(frames)
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
    function = source.function_at(file, line) if file else None
    if function is None or not scope.is_bound(file, function.lineno, "torch"):
        return (
            "Evaluate inside `with torch.no_grad():`, or keep what is needed of the results with .detach().",
            [],
        )
    if "backward" in {source.called_name(n) for n in ast.walk(function) if isinstance(n, ast.Call)}:
        return f"Evaluate inside `with torch.no_grad():` (line {line}), which {function.name} does not.", []
    first = min((function, *function.decorator_list), key=lambda node: node.lineno)
    edits = [
        Edit(file, (first.lineno, 0), (first.lineno, 0), f"{' ' * function.col_offset}@torch.no_grad()\n")
    ]
    return (
        f"Switch gradients off where the model is evaluated: @torch.no_grad() above def {function.name}.",
        edits,
    )
