"""Rules that explain a placement fault best where nothing is proved: what was moved around it, which line made it."""

from __future__ import annotations

import ast
from typing import Any

import torch

from trimtab.diagnose import mend, rewrite, source
from trimtab.diagnose.rewrite import has_factory
from trimtab.diagnose.rules_common import Verdict, birthplace, met
from trimtab.diagnose.scene import Scene, Sight, Suspect
from trimtab.virtual.origin import Origin


def misplaced_layer(scene: Scene, stray: Suspect) -> Verdict | None:
    """The activation was brought to its device on purpose, just before: then the layer is the one that is elsewhere."""
    partner, here = scene.partner(stray), scene.fault.frame
    if partner is None or here is None or not partner.is_parameter:
        return None
    if stray.moved is None or partner.moved is None:
        return None
    if stray.moved.function != here.function or stray.moved.file != here.file or stray.device == "cpu":
        return None
    why = f"this layer is put on {partner.device}, and what it gets was moved to {stray.device} for it"
    fix = mend.other_goal(scene, partner) or mend.sentence(scene, stray, here.line)
    return fix.blames(partner.moved.file, partner.moved.line, why)


def device_alias(scene: Scene, stray: Suspect) -> Verdict | None:
    """Made on a device that the function chose for several tensors at once, by a local name."""
    if (born := stray.born) is None:
        return None
    for call in source.call_on(born.file, born.line):
        device = source.keyword(call, "device")
        if not isinstance(device, ast.Name):
            continue
        made = source.assignments(born.file, born.line, device.id)
        chosen = [m for m in made if m.lineno < born.line and isinstance(m, ast.Assign)]
        if not chosen or not isinstance(chosen[-1].value, ast.Name | ast.Attribute | ast.Subscript):
            continue
        function = source.function_at(born.file, born.line)
        used = (
            [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == device.id]
            if function
            else []
        )
        if len(used) >= 3:
            why = f"the helper tensors are made on this device, and {met(scene, stray, 'they meet')}"
            there = mend.device_at(scene, stray, born.file, chosen[-1].lineno)
            edits = [rewrite.in_place_of(born.file, chosen[-1].value, there)] if there else []
            said = "take the device from the tensor that they meet"
            fix = mend.Mend.by(said, *edits) if edits else mend.sentence(scene, stray, born.line)
            return fix.blames(born.file, chosen[-1].lineno, why)
    return None


def apart(scene: Scene, stray: Suspect) -> Verdict | None:
    """Two results of a model that is split by hand meet: none was made wrongly; the line that joins them moves one."""
    partner = scene.partner(stray)
    pair = (stray, partner) if partner is not None else ()
    if len(pair) != 2 or any(s.device == "cpu" or s.is_parameter or s.tensor is None for s in pair):
        return None
    if not all(s.tensor is not None and s.tensor.grad_fn is not None for s in pair):
        return None
    early, late = sorted(pair, key=lambda s: s.born.line if s.born is not None else 0)
    here = scene.fault.frame
    fix = mend.at_use(scene, early)
    if here is None or fix is None:
        return None
    why = f"a result on {early.device} meets one on {late.device} here"
    return fix.blames(here.file, here.line, why)


def assignment(scene: Scene, stray: Suspect) -> Verdict | None:
    """The line that gave the variable its value, followed back to the line that made the tensor."""
    for sight in scene.sights(stray):
        if sight.name.startswith("self.") or sight.made is None:
            continue
        made, name = _followed(sight, sight.made, stray.device)
        born = birthplace(stray)
        around = born is not None and (born.file, born.line) == (sight.file, sight.line)
        if around and stray.device != "cpu" and (fix := mend.at_use(scene, stray)) is not None:
            why = f"{sight.name} comes from another GPU than this line wants it on"
            return fix.blames(sight.file, sight.line, why)
        elsewhere = born is not None and (born.file, born.line) != (sight.file, made.lineno)
        if elsewhere and born is not None and _made_elsewhere(made, born):
            return birth(scene, stray)
        why = f"{sight.name} is made here on {stray.device}, and {met(scene, stray)}"
        fix = _fix_at(scene, stray, sight, made, name)
        return fix.blames(sight.file, made.lineno, why)
    return None


def _made_elsewhere(made: ast.stmt, born: Origin) -> bool:
    """The variable was set from a call or taken out of something, and the tensor was made by another line."""
    if isinstance(made, ast.For | ast.AsyncFor):
        # What a loop gives out was made by a reader of data, save for a list of helpers that goes beside it.
        return False
    value = getattr(made, "value", None)
    if value is None or has_factory(value):
        return False
    if not any(isinstance(n, ast.Call) for n in ast.walk(value)):
        return source.statement(born.file, born.line) is not None
    return any(has_factory(call) for call in source.call_on(born.file, born.line))


def _followed(sight: Sight, made: ast.stmt, device: str) -> tuple[ast.stmt, str]:
    """Back over lines that only take, reshape or cast a tensor to the one that made it, and the name it had there."""
    own = sight.root
    for _ in range(5):
        value = getattr(made, "value", None)
        name = _derived_from(value) if value is not None else None
        known = sight.frame.f_locals.get(name) if name is not None else None
        if name is None or str(getattr(known, "device", device)) != device:
            break
        if known is not None and not isinstance(known, torch.Tensor | dict | list | tuple):
            break  # an object that made or gave it
        if (before := source.last_assignment(sight.file, made.lineno, name)) is None:
            break
        made, own = before, name
    return made, own


def _derived_from(node: ast.expr) -> str | None:
    """The name that an expression only reshapes or casts: `mask` in `mask.tril()[None]` and `torch.triu(mask)`."""
    if has_factory(node):
        return None
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        names = {_derived_from(part) for part in parts if not isinstance(part, ast.Constant)}
        return names.pop() if len(names) == 1 else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not source.root(node.func):
        return _derived_from(node.func.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.") and node.args:
        return _derived_from(node.args[0])
    return (
        source.root(node) if not isinstance(node, ast.Call) or isinstance(node.func, ast.Attribute) else None
    )


def birth(scene: Scene, stray: Suspect) -> Verdict | None:
    """The line that made the tensor."""
    if (born := birthplace(stray)) is None:
        return None
    node = stray.made_by[1] if stray.made_by is not None else None
    statement = source.statement(born.file, born.line)
    # What a statement binds may be another tensor, computed from this one.
    bound = node is None or node is getattr(statement, "value", None)
    why = f"made here on {stray.device} ({stray.operand.dtype}), and {met(scene, stray)}"
    fix = mend.best(scene, stray, born.file, born.line, bound)
    return fix.blames(born.file, born.line, why)


def _fix_at(scene: Scene, stray: Suspect, sight: Sight, made: ast.stmt, name: str) -> mend.Mend:
    """The variable of a line brought to the device: in the line itself, or right after it (a loop, a tuple)."""
    if fix := mend.made_there(scene, stray, sight.file, made.lineno):
        return fix
    held = sight.frame.f_locals.get(name)
    whole = isinstance(made, ast.Assign) and isinstance(held, torch.Tensor) and name in source.bound(made)
    if whole and (fix := mend.bound_there(scene, stray, sight.file, made.lineno)):
        return fix
    over = made.iter if isinstance(made, ast.For) else None
    zipped = isinstance(over, ast.Call) and source.called_name(over) == "zip"
    written = mend.is_written(scene, stray)
    if (zipped or written) and (fix := mend.at_use(scene, stray)):
        return fix  # one of several that a loop takes side by side: brought to the others where it meets them
    if not written and (fix := _after_binding(scene, stray, sight, made, name)):
        return fix
    return mend.best(scene, stray, sight.file, made.lineno, bound=False)


def _after_binding(scene: Scene, stray: Suspect, sight: Sight, made: ast.stmt, name: str) -> mend.Mend | None:
    """A line of its own after the one that binds a batch: `x = x.to(device)`."""
    first = made.body[0] if isinstance(made, ast.For) else None
    line = first.lineno if first is not None else mend.line_after(sight.file, made)
    device = mend.device_at(scene, stray, sight.file, line)
    text = moved_whole(sight, made, name, device, stray.device) if device is not None else None
    if text is None:
        return None
    if first is not None:
        return mend.Mend(
            f"move it first thing in the loop: {text}", [rewrite.before(sight.file, first, text)]
        )
    if hasattr(made, "body"):
        return None
    return mend.Mend(f"move it after this line: {text}", [rewrite.after(sight.file, made, text)])


def moved_whole(sight: Sight, made: ast.stmt, name: str, device: str, there: str) -> str | None:
    """The variable with all that it holds, moved, as a statement."""
    held = sight.frame.f_locals
    value = held.get(name)
    if isinstance(value, torch.Tensor):
        others = source.bound(made)
        order = [n.id for n in ast.walk(made) if isinstance(n, ast.Name) and n.id in others | {name}]
        names = [
            n
            for n in dict.fromkeys(order)
            if n == name or (isinstance(v := held.get(n), torch.Tensor) and str(v.device) == there)
        ]
        return f"{', '.join(names)} = {', '.join(f'{n}.to({device})' for n in names)}"
    code = _moved(value, name, device)
    return f"{name} = {code}" if code is not None else None


def _moved(value: Any, text: str, device: str) -> str | None:
    """Code for a tensor, or for a dict or list of them, brought to a device; what is no tensor stays."""
    if isinstance(value, dict):
        plain = all(isinstance(v, torch.Tensor) for v in value.values())
        entry = f"v.to({device})" if plain else f"v.to({device}) if torch.is_tensor(v) else v"
        return f"{{k: {entry} for k, v in {text}.items()}}"
    if isinstance(value, list | tuple) and value and len({type(v) for v in value}) == 1 and text != "t":
        inner = _moved(value[0], "t", device)
        return f"[{inner} for t in {text}]" if inner is not None else None
    return f"{text}.to({device})" if callable(getattr(value, "to", None)) else None
