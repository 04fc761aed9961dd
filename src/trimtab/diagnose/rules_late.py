"""The rule about what was put into a model after the model had moved: a layer, a buffer, loaded weights."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

from trimtab.diagnose import devices, holders, mend, owners, rewrite, source
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_modules import bindings
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import deeds, origin
from trimtab.virtual.deeds import Placement
from trimtab.virtual.origin import Origin


def placed_late(scene: Scene, stray: Suspect) -> Verdict | None:
    """A parameter, buffer or layer that was put into its model after the model had moved."""
    owner = stray.registered
    if owner is None or stray.moved is not None or stray.device != "cpu":
        return None
    home = mend.wanted(scene, stray)
    late = [p for p in _placements(owner, scene) if p.beside is not None and str(p.beside) == home]
    if not late:
        return None
    placement = max(late, key=lambda p: p.when)
    line = origin.resolve(placement.line)
    if line is None:
        return None
    why = "this is put into the model after the model was moved, so it stays on the CPU"
    root = owners.outermost(owner.module, scene.modules)
    fix = _moved_in_place(line, placement) or _not_assigned(line) or _whole_moved(scene, stray, root, line)
    fix = fix or _move_again(scene, stray, root, line)
    return fix.blames(line.file, line.line, why)


def made_in_forward(scene: Scene, stray: Suspect) -> Verdict | None:
    """A layer that is made anew in every call of a model, on the CPU: made once, in the model's constructor."""
    file, made = stray.made_by or ("", None)
    if stray.registered is None or stray.moved is not None or made is None:
        return None
    frame = devices.frame_of(scene.frames, file, made.lineno)
    owner = source.class_at(file, made.lineno)
    model = frame.f_locals.get("self") if frame is not None else None
    layer = type(stray.registered.module).__name__
    calls = [c for c in source.call_on(file, made.lineno) if source.called_name(c) == layer]
    if frame is None or owner is None or not isinstance(model, nn.Module) or len(calls) != 1:
        return None
    statement, call = source.statement(file, made.lineno), calls[0]
    # A layer that the model keeps is made in the first call alone, on purpose.
    kept_by = any(not isinstance(t, ast.Name | ast.Tuple) for t in getattr(statement, "targets", ()))
    if frame.f_code.co_name == "__init__" or kept_by or stray.registered.module in set(model.modules()):
        return None
    kept = source.bound(statement) if getattr(statement, "value", None) is call else set()
    name = next(iter(kept), layer.rstrip("d0123456789").lower())
    name = f"{name}_made" if hasattr(model, name) else name
    sizes = {n: str(size) for n in ast.walk(call) if isinstance(size := _size(n, frame), int)}
    text = ast.unparse(call)
    for node, number in sizes.items():
        text = text.replace(ast.unparse(node), number)
    known = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} & frame.f_locals.keys()
    inits = [n for n in owner.body if isinstance(n, source.Function) and n.name == "__init__"]
    edits = []
    if inits and known <= {"self"}:
        edits = [rewrite.after(file, inits[0].body[-1], f"self.{name} = {text}")]
        edits.append(rewrite.in_place_of(file, call, f"self.{name}"))
    why = "this makes a new layer in every call, on the CPU, and no optimizer will ever train it"
    fix = f"Make it once, in __init__ of {owner.name}: self.{name} = {text}; and use self.{name} here."
    return Verdict(source.cause(file, call.lineno, why), fix, edits=edits)


def _size(node: ast.AST, frame: FrameType) -> int | None:
    """What `x.size(1)` or `x.shape[1]` of a running function's tensor is."""
    match node:
        case ast.Call(func=ast.Attribute(value=of, attr="size"), args=[ast.Constant(value=int(at))]):
            pass
        case ast.Subscript(value=ast.Attribute(value=of, attr="shape"), slice=ast.Constant(value=int(at))):
            pass
        case _:
            return None
    tensor = holders.value_of(of, frame)
    return int(tensor.shape[at]) if isinstance(tensor, torch.Tensor) and at < tensor.dim() else None


def _placements(attribute: owners.Attribute, scene: Scene) -> Iterator[Placement]:
    """Who put a tensor into its module, that module into the one above, and so on."""
    if found := deeds.placement(attribute.module, attribute.name):
        yield found
    module = attribute.module
    for holder in owners.climb(module, scene.modules):
        if found := deeds.placement(holder.module, holder.name):
            yield found


def _moved_in_place(line: Origin, placement: Placement) -> mend.Mend | None:
    """`model.head = Linear(…)`, `setattr(model, name, …)`, `register_buffer(name, …)`, brought to the model there."""
    statement = source.statement(line.file, line.line)
    span = origin.span(placement.line)
    node = source.node_at(*span) if span is not None else None
    value: ast.expr | None = None
    owner = ""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Attribute | ast.Subscript):
            owner = ast.unparse(target.value)
            if isinstance(value, ast.Call) and source.called_name(value) == "Parameter" and value.args:
                value = value.args[0]
    elif isinstance(node, ast.Call):
        called = source.called_name(node)
        if called == "setattr" and len(node.args) == 3:
            owner, value = ast.unparse(node.args[0]), node.args[2]
        elif (
            called in ("register_buffer", "register_parameter", "add_module", "register_module")
            and len(node.args) > 1
        ):
            value = node.args[1]
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if value is None or not owner or hasattr(statement, "body"):
        return None
    if owner == "self" and _in_constructor(line):
        return None
    device = f"next({_with_parameters(line, owner)}.parameters()).device"
    if placement.replaced and isinstance(statement, ast.Assign):
        device = f"{ast.unparse(statement.targets[0])}.device"
    return mend.brought("bring it to the model", line.file, value, device)


def _with_parameters(line: Origin, owner: str) -> str:
    """The whole module where a part of it takes something in: the part may hold nothing yet."""
    around = source.class_at(line.file, line.line)
    whole = around is not None and any("Module" in ast.unparse(base) for base in around.bases)
    return "self" if whole and owner.startswith("self.") else owner


def _whole_moved(scene: Scene, stray: Suspect, root: nn.Module, line: Origin) -> mend.Mend | None:
    """What a constructor adds to a model that it was given: the new whole is moved where it is made."""
    made = next(bindings(scene, root), None) if _in_constructor(line) else None
    return mend.module_moved(scene, stray, *made) if made is not None else None


def _not_assigned(line: Origin) -> mend.Mend | None:
    """`load_state_dict(…, assign=True)` puts the loaded tensors in; without it the values are copied."""
    for call in source.call_on(line.file, line.line):
        given = source.keyword(call, "assign") if source.called_name(call) == "load_state_dict" else None
        if given is not None and source.is_constant(given, True):
            copied = rewrite.in_place_of(line.file, given, "False")
            return mend.Mend.by("copy the values to where the model is", copied)
    return None


def _in_constructor(line: Origin) -> bool:
    function = source.function_at(line.file, line.line)
    return function is not None and function.name == "__init__"


def _move_again(scene: Scene, stray: Suspect, root: nn.Module, line: Origin) -> mend.Mend:
    """The model is moved once more, after the line that changed it."""
    statement = source.statement(line.file, line.line)
    after = mend.line_after(line.file, statement) if statement is not None else line.line
    device = mend.device_at(scene, stray, line.file, after)
    name = _name_at(scene, root, line.file, line.line)
    if statement is not None and not hasattr(statement, "body") and name and device:
        text = f"{name}.to({device})"
        return mend.Mend(
            f"move the model after this line: {text}", [rewrite.after(line.file, statement, text)]
        )
    device = device or f'"{mend.wanted(scene, stray)}"'
    return mend.Mend(f"move the model after this line: {name or 'model'}.to({device})", [])


def _name_at(scene: Scene, module: nn.Module, file: str, line: int) -> str | None:
    """How the function that holds a line names a module, if it still runs."""
    if (frame := devices.frame_of(scene.frames, file, line)) is not None:
        return holders.expression_for(module, frame)
    # The model that a line itself works on: `model.load_state_dict(…)`.
    for call in source.call_on(file, line):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("load_state_dict", "load_adapter"):
            return ast.unparse(call.func.value)
    return None
