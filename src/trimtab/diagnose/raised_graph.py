"""The line to change for raised errors about gradients: graphs that are cut, frozen, carried over or hidden."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import is_false, is_true, values_named


def reentrant(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A checkpoint call that is re-entrant, by word or by default; else the return of an opaque output."""
    calls = [n for n in source.walk(file) if isinstance(n, ast.Call)]
    for call in calls:
        if is_true(source.keyword(call, "use_reentrant")):
            return call.lineno
        if is_true(_entry(source.keyword(call, "gradient_checkpointing_kwargs"), "use_reentrant")):
            return call.lineno
    for call in calls:
        if source.called_name(call) in ("checkpoint", "checkpoint_sequential") and not source.keyword(
            call, "use_reentrant"
        ):
            return call.lineno
        if (
            source.called_name(call) == "gradient_checkpointing_enable"
            and not call.args
            and not call.keywords
        ):
            return call.lineno
    return opaque_return(file)


def _entry(node: ast.expr | None, key: str) -> ast.expr | None:
    if not isinstance(node, ast.Dict):
        return None
    pairs = zip(node.keys, node.values, strict=True)
    return next((v for k, v in pairs if isinstance(k, ast.Constant) and k.value == key), None)


def opaque_return(file: str) -> int | None:
    """A `return` of forward that builds an object of a plain class of this file: DDP cannot look into it."""
    plain = {
        node.name
        for node in source.walk(file)
        if isinstance(node, ast.ClassDef) and not node.bases and not node.decorator_list
    }
    for node in source.walk(file):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            for inner in ast.walk(node):
                value = inner.value if isinstance(inner, ast.Return) else None
                if isinstance(value, ast.Call) and source.called_name(value) in plain:
                    return value.lineno
    return None


def unused_branch(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A layer that __init__ makes and no other method uses: where it is unfrozen, else where it is made."""
    if opaque := opaque_return(file):
        return opaque
    for node in source.walk(file):
        if not isinstance(node, ast.ClassDef):
            continue
        for attribute, line in _unused_layers(node):
            return _unfrozen(file, node, attribute) or line
    lines = [p.line for p in own if p.file == file]
    return next((found for line in lines if (found := _unused_output(file, line))), None)


def _unused_output(file: str, line: int) -> int | None:
    """The model returned several outputs and the loss reads only some: the line that makes the loss."""
    node = source.statement(file, line)
    bound = source.bound(node)
    if not bound:
        return None
    scope = source.function_at(file, line) or source.tree(file)
    read = (
        [n for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        if scope
        else []
    )
    if len(bound) > 1 and bound <= {n.id for n in read}:
        return None
    return min((n.lineno for n in read if n.id in bound and n.lineno > line), default=None)


def carried_state(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A variable that a loop computes from its own last value, with the graph of the last round."""
    line = own[0].line
    for node in source.walk(file):
        if not isinstance(node, ast.For | ast.While) or not node.lineno < line <= (node.end_lineno or 0):
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call | ast.BinOp):
                again = source.bound(inner) & source.names_in(inner.value)
                if again and "detach" not in ast.unparse(inner.value) and not source.has_move(inner.value):
                    return inner.lineno
    return None


def _unused_layers(owner: ast.ClassDef) -> Iterator[tuple[str, int]]:
    methods = [m for m in owner.body if isinstance(m, source.Function)]
    if not any(m.name == "forward" for m in methods):
        return
    used = {
        inner.attr
        for method in methods
        if method.name != "__init__"
        for inner in ast.walk(method)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }
    for method in (m for m in methods if m.name == "__init__"):
        for inner in ast.walk(method):
            if isinstance(inner, ast.Assign):
                for target, value in _pairs(inner):
                    if (
                        target not in used
                        and isinstance(value, ast.Call)
                        and source.called_name(value)[:1].isupper()
                    ):
                        yield target, inner.lineno


def _pairs(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            sides = list(zip(target.elts, node.value.elts, strict=False))
        else:
            sides = [(target, node.value)]
        for left, right in sides:
            if isinstance(left, ast.Attribute):
                yield left.attr, right


def _unfrozen(file: str, owner: ast.ClassDef, attribute: str) -> int | None:
    for node in source.walk(file):
        if isinstance(node, ast.Call) and source.called_name(node) == "requires_grad_":
            inside = owner.lineno <= node.lineno <= (owner.end_lineno or 0)
            if not inside and re.search(rf"\.{attribute}\b", ast.unparse(node.func)):
                return node.lineno
    return None


def half_cast(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The line that makes or casts weights in half precision, outside of autocast."""
    for node in source.walk(file):
        if not isinstance(node, ast.Call) or source.called_name(node) in ("autocast", "autocast_mode"):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "half":
            return node.lineno
        given = (*node.args, *(k.value for k in node.keywords))
        if any(isinstance(v, ast.Attribute) and v.attr in ("float16", "half") for v in given):
            return node.lineno
        if any(isinstance(v, ast.Constant) and v.value in ("float16", "fp16", "half") for v in given):
            return node.lineno
    return None


def _rebuilt_loss(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A loss that is made anew as a leaf: torch.tensor(…, requires_grad=True), or .requires_grad_() on it."""
    calls = [n for n in source.walk(file) if isinstance(n, ast.Call)]
    for call in calls:
        made = source.called_name(call) in ("tensor", "as_tensor", "Tensor", "Variable")
        if made and is_true(source.keyword(call, "requires_grad")):
            return call.lineno
    for call in calls:
        cut = isinstance(call.func, ast.Attribute) and call.func.attr in ("requires_grad_", "detach", "item")
        if cut and "loss" in ast.unparse(call.func):
            return call.lineno
    return None


def frozen(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """All parameters of the optimizer are frozen: the line that freezes; else a loss that was rebuilt."""
    optimizers = [v for v in values_named(error, "optimizer") if hasattr(v, "param_groups")]
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if parameters and not any(p.requires_grad for p in parameters) and (line := freezing_line(file)):
        return line
    return _rebuilt_loss(file, own, error)


def _loaded_frozen(call: ast.Call) -> bool:
    """PEFT loads adapters for inference unless it is told otherwise."""
    loads = ast.unparse(call.func) == "PeftModel.from_pretrained"
    return loads and not is_true(source.keyword(call, "is_trainable"))


def freezing_line(file: str) -> int | None:
    """The line that makes parameters untrainable: requires_grad_(False), p.requires_grad = False, an adapter that is
    loaded for inference."""
    found: list[tuple[int, int]] = []
    for node in source.walk(file):
        if isinstance(node, ast.Call):
            if source.called_name(node) == "requires_grad_" and is_false(node.args):
                found.append((0, node.lineno))
            elif is_true(source.keyword(node, "inference_mode")) or _loaded_frozen(node):
                found.append((1, node.lineno))
        elif isinstance(node, ast.Assign) and is_false([node.value]) and "requires_grad" in ast.unparse(node):
            found.append((0, node.lineno))
    return min(found)[1] if found else None


def without_grad(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The loss was computed under no_grad: the line that switches gradients off; else a loss that was rebuilt."""
    where = own[0]
    for name in (
        sorted(source.names_in(node)) if (node := source.statement(file, where.line)) is not None else ()
    ):
        made = source.last_assignment(file, where.line, name)
        for block in source.withs_around(file, made.lineno) if made is not None else ():
            opened = " ".join(ast.unparse(item.context_expr) for item in block.items)
            if "no_grad" in opened or "inference_mode" in opened:
                return block.lineno
    return _rebuilt_loss(file, own, error)
