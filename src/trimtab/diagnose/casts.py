"""Two precisions in one call: what takes the others in, which part of the expression is the odd one, and the cast.

Looks at a frame (live, or of a traceback) and at the source, and writes casts in the program's own names. Computes
nothing, and decides nothing about layers that have another precision than the rest of their model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from trimtab.diagnose import holders, rewrite, scope, source, spot
from trimtab.diagnose.finding import Edit
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin


class Taker(NamedTuple):
    """What the others have to fit: a layer's weights, the tensor that is written to, the first operand."""

    dtype: torch.dtype
    code: str
    """Its precision, as the failing line can ask for it."""


def joined(frame: FrameType, node: ast.expr, odd: torch.Tensor | None = None) -> Verdict | None:
    """The cast that makes a failing expression run: where the odd operand is made, else where it is used."""
    if (kept := _odd_buffer(frame, node)) is not None:
        return kept
    if (taker := _taker(frame, node)) is None:
        return None
    parts = list(_odd_parts(frame, node, taker, odd))
    if not parts:
        return None
    if (door := _at_the_door(frame, parts, taker)) is not None:
        return door
    file, line = frame.f_code.co_filename, node.lineno
    found = [_cast(file, line, part, taker) for part in parts]
    place, how = found[0][0], "; ".join(dict.fromkeys(said for _, said, _ in found))
    value = holders.value_of(parts[0], frame)
    seen = value if isinstance(value, torch.Tensor) else odd
    kind = _plain(seen.dtype) if seen is not None else "of another precision"
    why = f"{ast.unparse(parts[0])} is {kind} here, and meets {_plain(taker.dtype)}"
    fix = f"{how} ({taker.code} is {_plain(taker.dtype)})."
    edits = [edit for _, _, edit in found]
    return Verdict(source.cause(file, place, why), fix, edits=edits)


def _at_the_door(frame: FrameType, parts: list[ast.expr], taker: Taker) -> Verdict | None:
    """Rows in float64, as numpy makes them: cast where the program moves them to the device, with all beside them."""
    value = next((frame.f_locals.get(source.root(part)) for part in parts), None)
    if not isinstance(value, torch.Tensor) or (value.dtype, taker.dtype) != (torch.float64, torch.float32):
        return None
    moved = origin.moved_of(value)
    if moved is None or not source.is_user_file(moved.file):
        return None
    node = source.statement(moved.file, moved.line)
    function, mover = source.function_at(moved.file, moved.line), frame
    while (
        mover.f_back is not None
        and source.function_at(mover.f_code.co_filename, mover.f_lineno) is not function
    ):
        mover = mover.f_back
    given = source.pairs(node) if isinstance(node, ast.Assign) else ()
    doubles = {
        held
        for target, held in given
        if getattr(holders.value_of(target, mover), "dtype", None) is torch.float64
    }
    calls = [call for call, _ in source.methods_on(moved.file, moved.line, "to", "cuda")]
    edits = [
        rewrite.in_place_of(moved.file, call, f"{ast.unparse(call)}.float()")
        for call in calls
        if call in doubles
    ]
    if not edits or node is None:
        return None
    why = "this comes in float64, as numpy computes, and meets weights in float32"
    fix = f"Cast it where it comes in: {rewrite.shown(edits)}."
    return Verdict(source.cause(moved.file, moved.line, why), fix, edits=edits)


def _odd_buffer(frame: FrameType, node: ast.expr) -> Verdict | None:
    """A module without weights that keeps a tensor in another precision than it is given: a loss's class weights."""
    layer = holders.value_of(node.func, frame) if isinstance(node, ast.Call) else None
    if not isinstance(layer, nn.Module) or any(True for _ in layer.parameters()):
        return None
    given = next((taker for part in _operands(node) if (taker := _by_value(frame, part)) is not None), None)
    for name, kept in layer.named_buffers() if given is not None else ():
        born = origin.born_of(kept)
        if not kept.is_floating_point() or given is None or kept.dtype is given.dtype or born is None:
            continue
        why = f"{name} of {type(layer).__name__} is {_plain(kept.dtype)}, and meets {_plain(given.dtype)}"
        calls = source.call_on(born.file, born.line)
        made = [
            c for c in calls if source.called_name(c) in ("tensor", "as_tensor", "from_numpy", "FloatTensor")
        ]
        code = f"{ast.unparse(made[0])}.to({given.dtype})" if len(made) == 1 else f".to({given.dtype})"
        edits = [rewrite.in_place_of(born.file, made[0], code)] if len(made) == 1 else []
        return Verdict(
            source.cause(born.file, born.line, why), f"Make it in that precision: {code}.", edits=edits
        )
    return None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(file: str, line: int, part: ast.expr, taker: Taker) -> tuple[int, str, Edit]:
    """One operand brought to the taker's precision: the line, the code in words, the edit."""
    used = f"{rewrite.operand(part)}.to({taker.code})"
    here = line, f"Cast it: {used}", rewrite.in_place_of(file, part, used)
    name = part.id if isinstance(part, ast.Name) else ""
    made = source.last_assignment(file, line, name) if name else None
    if not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return here
    if source.function_at(file, made.lineno) is not source.function_at(file, line):
        return here
    root = taker.code.removeprefix("next(").split(".")[0].split("[")[0]
    if not scope.is_bound(file, made.lineno, root) or root == made.targets[0].id:
        return here
    if _in_autocast(file, made.lineno) and not _in_autocast(file, line):
        why = f"Move this line into the autocast block above, or cast what leaves it: {used}"
        return line, why, here[2]
    if isinstance(made.value, ast.Call) and _is_factory(made.value):
        text = rewrite.with_keyword(file, made.value, "dtype", taker.code)
        edit = rewrite.add_keyword(file, made.value, "dtype", taker.code)
        return made.lineno, f"Make it in that precision: {text}", edit
    code = f"{rewrite.operand(made.value)}.to({taker.code})"
    edit = rewrite.in_place_of(file, made.value, code)
    return made.lineno, f"Cast it where it is made: {name} = {code}", edit


def _is_factory(call: ast.Call) -> bool:
    """A call that makes a tensor from sizes, and says no precision."""
    makes = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch"
    sized = source.called_name(call) in ("zeros", "ones", "rand", "randn", "full", "empty", "linspace", "eye")
    return makes and sized and source.keyword(call, "dtype") is None


def _in_autocast(file: str, line: int) -> bool:
    calls = (c for c in source.contexts_around(file, line) if isinstance(c, ast.Call))
    return any(source.called_name(call) == "autocast" for call in calls)


def _taker(frame: FrameType, node: ast.expr) -> Taker | None:
    statement = source.statement(frame.f_code.co_filename, node.lineno)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return _by_value(frame, node.value)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0]
        if (target.lineno, target.col_offset) == (node.lineno, node.col_offset):
            return _by_value(frame, target.value)
    if isinstance(node, ast.Call):
        layer = holders.value_of(node.func, frame)
        if isinstance(layer, nn.Module):
            taker = _layer(ast.unparse(node.func), layer)
            given = (t for part in _operands(node) if (t := _by_value(frame, part)) is not None)
            return next((t for t in given if taker is not None and t.dtype is taker.dtype), taker)
        if isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
            return _by_value(frame, node.func.value)
    owner = frame.f_locals.get("self")
    own = _layer("self", owner) if isinstance(owner, nn.Module) else None
    takers = [taker for part in _operands(node) if (taker := _by_value(frame, part)) is not None]
    # What the layers around it work in, else the first operand.
    return next((t for t in takers if own is not None and t.dtype is own.dtype), next(iter(takers), None))


def _layer(code: str, layer: nn.Module) -> Taker | None:
    weight = layer._parameters.get("weight")
    if weight is not None and weight.is_floating_point():
        return Taker(weight.dtype, f"{code}.weight.dtype")
    first = next((p for p in layer.parameters() if p.is_floating_point()), None)
    return Taker(first.dtype, f"next({code}.parameters()).dtype") if first is not None else None


def _by_value(frame: FrameType, node: ast.expr) -> Taker | None:
    value = holders.value_of(node, frame)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return Taker(value.dtype, f"{ast.unparse(node)}.dtype")
    return None


def _operands(node: ast.expr) -> list[ast.expr]:
    """What an expression computes with, lists and tuples taken apart."""
    found = spot.operands(node)
    return [e for part in found for e in (part.elts if isinstance(part, ast.Tuple | ast.List) else [part])]


def _odd_parts(
    frame: FrameType, node: ast.expr, taker: Taker, odd: torch.Tensor | None
) -> Iterator[ast.expr]:
    """The operands in another precision than the taker's: by their values, else by what made the odd one."""
    parts = _operands(node)
    statement = source.statement(frame.f_code.co_filename, node.lineno)
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        parts = [statement.value]
    known = 0
    for part in parts:
        value = holders.value_of(part, frame)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not taker.dtype:
            known += 1
            yield part
    open_ = [part for part in parts if isinstance(part, ast.Call | ast.BinOp | ast.Subscript | ast.UnaryOp)]
    for part in open_ if not known else ():
        if odd is None or _made_in(part, odd, frame.f_code.co_filename):
            yield part
            return


def _made_in(part: ast.expr, tensor: torch.Tensor, file: str) -> bool:
    """Whether an operand is what made a tensor: its own expression, or the call of the function that did."""
    born, _ = origin.spans_of(tensor)
    if born is None:
        return False
    made, start, end = born
    inside = (part.lineno, part.col_offset) <= start and end <= (
        part.end_lineno or 0,
        part.end_col_offset or 0,
    )
    function = source.function_at(made, start[0])
    called = isinstance(part, ast.Call) and function is not None and source.called_name(part) == function.name
    return (made == file and inside) or called


def failing(error: BaseException) -> Verdict | None:
    """The cast for an error about two precisions."""
    frame, node = _raising(error)
    if frame is None or node is None:
        return None
    return own_function(frame) or joined(frame, node)


_CASTS = frozenset(("to", "half", "bfloat16", "float", "type", "type_as"))


def own_function(frame: FrameType) -> Verdict | None:
    """A function of the program with a backward of its own: autocast ran its forward, and nothing its backward."""
    file, line = frame.f_code.co_filename, frame.f_code.co_firstlineno
    context, owner = next(iter(frame.f_locals.values()), None), source.class_at(file, line)
    if not isinstance(context, torch.autograd.function.BackwardCFunction) or owner is None:
        return None
    methods = {m.name: m for m in owner.body if isinstance(m, ast.FunctionDef)}
    forward, backward = methods.get("forward"), methods.get("backward")
    casts = forward and _CASTS & {source.called_name(n) for n in ast.walk(forward) if isinstance(n, ast.Call)}
    if forward is None or backward is None or casts or "custom_" in ast.unparse(owner):
        return None
    saved = next((t for t in context.saved_tensors if t is not None), None)
    given = f'(device_type="{saved.device.type if saved is not None else "cuda"}")'
    first, second = f"@torch.amp.custom_fwd{given}", f"@torch.amp.custom_bwd{given}"
    edits = [rewrite.before(file, forward, first), rewrite.before(file, backward, second)]
    why = f"autocast chose the precision of {owner.name}.forward, and is off in its backward"
    fix = f"Let both run alike: {first} right above def forward, {second} right above def backward."
    bound = scope.is_bound(file, line, "torch")
    return Verdict(source.cause(file, backward.lineno, why), fix, edits=edits if bound else [])


def refused(error: BaseException) -> Verdict | None:
    """The cast for an error about an operation that 16 bits do not have."""
    frame, node = _raising(error)
    return widened(frame, node) if frame is not None and node is not None else None


def _raising(error: BaseException) -> tuple[FrameType | None, ast.expr | None]:
    """The innermost frame of the program in a traceback, and the very expression that raised there."""
    own, step = None, error.__traceback__
    while step is not None:
        own = step if source.is_user_file(step.tb_frame.f_code.co_filename) else own
        step = step.tb_next
    place = origin.span((own.tb_frame.f_code, own.tb_lasti)) if own is not None else None
    node = source.node_at(*place) if place is not None else None
    return own.tb_frame if own is not None else None, node


def under_autocast(frames: list[FrameType], device: str, dtype: str) -> tuple[str, list[Edit]]:
    """A forward pass whose weights have two precisions, put under autocast where the model is called from outside."""
    frame = holders.outside(frames)
    opened = f'with torch.autocast("{device}", dtype=torch.{dtype}):'
    if frame is None:
        return f"run the model under `{opened}`", []
    file, node = frame.f_code.co_filename, source.statement(frame.f_code.co_filename, frame.f_lineno)
    simple = isinstance(node, ast.Assign | ast.Expr | ast.AugAssign | ast.Return)
    if node is None or not simple or not scope.is_bound(file, node.lineno, "torch"):
        return f"run the model under `{opened}` (line {frame.f_lineno})", []
    indent = " " * node.col_offset
    body = rewrite.written(file, node).replace("\n", f"\n{indent}    ")
    text = f"{opened}\n{indent}    {body}"
    said = f"run the model under autocast (line {node.lineno}): {opened} {ast.unparse(node)}"
    return said, [rewrite.in_place_of(file, node, text)]


def widened(frame: FrameType, node: ast.expr) -> Verdict | None:
    """A call that has no kernel in 16 bits, made in float32: what it is given, and its result cast back."""
    parts = [
        part
        for part in _operands(node)
        if getattr(holders.value_of(part, frame), "dtype", None) in (torch.float16, torch.bfloat16)
    ]
    if not parts and isinstance(node, ast.Call):
        parts = [
            _given_to_transforms(a)
            for a in node.args[:1]
            if isinstance(a, ast.Call | ast.BinOp | ast.Subscript)
        ]
    if not parts:
        return None
    file, wide = frame.f_code.co_filename, [f"{rewrite.operand(part)}.float()" for part in parts]
    edits = [rewrite.in_place_of(file, part, code) for part, code in zip(parts, wide, strict=True)]
    fix = f"Compute it in float32: {', '.join(wide)}"
    if isinstance(parts[0], ast.Name) and _gives_such_a_tensor(file, node):
        end, back = rewrite.end_of(file, node), f".to({parts[0].id}.dtype)"
        edits.append(Edit(file, end, end, back))
        fix += f", and cast the result back: {back}"
    why = "this has no kernel for 16 bits on CUDA"
    return Verdict(source.cause(file, node.lineno, why), f"{fix}.", edits=edits)


def _given_to_transforms(node: ast.expr) -> ast.expr:
    """What a chain of Fourier transforms begins with: between them numbers are complex, and float() takes their real
    part alone."""
    while isinstance(node, ast.Call) and "fft" in ast.unparse(node.func).lower() and node.args:
        node = node.args[0]
    return node


def _gives_such_a_tensor(file: str, node: ast.expr) -> bool:
    """Whether what a call gives goes on in its input's precision: no loss, no tuple, no complex numbers."""
    statement = source.statement(file, node.lineno)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    taken = isinstance(next(source.above(file, node), None), ast.Subscript | ast.Attribute)
    name = ast.unparse(node.func).lower() if isinstance(node, ast.Call) else ""
    special = any(word in name for word in ("loss", "ctc", "criterion", "fft"))
    return not special and not taken and not any(isinstance(t, ast.Tuple) for t in targets)
