"""Rules that explain a placement fault best where nothing is proved: what was moved around it, which line made it."""

from __future__ import annotations

import ast

from trimtab.diagnose import source
from trimtab.diagnose.rewrite import add_device, assigned, has_factory
from trimtab.diagnose.rules_common import Verdict, alone, construction, met, target
from trimtab.diagnose.scene import Scene, Sight, Suspect
from trimtab.virtual import origin
from trimtab.virtual.origin import Origin


def not_prepared(scene: Scene, stray: Suspect) -> Verdict | None:
    """A helper that moves models and loaders together (accelerate's prepare, Fabric's setup) got the model only."""
    partner = scene.partner(stray)
    if partner is None or not partner.is_parameter or stray.is_parameter or stray.moved is not None:
        return None
    if (moved := partner.moved) is None or stray.device != "cpu":
        return None
    for call in source.call_on(moved.file, moved.line):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("prepare", "prepare_model", "setup"):
            helper = ast.unparse(call.func.value)
            why = f"{helper} moves the model here; the data does not come from a loader that it was given"
            fix = f"give it the loader too (loader = {helper}.{call.func.attr}(loader)), or move the batch"
            return Verdict(source.cause(moved.file, moved.line, why), fix)
    return None


def made_before_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """A copy of the weights (an average, a teacher) that was taken before the model moved."""
    if stray.is_parameter or stray.moved is not None or (born := stray.born) is None:
        return None
    line = construction(born.file, born.line, 0)
    if line == born.line:
        return None
    parameters = [p for module in scene.modules for p in module._parameters.values() if p is not None]
    moves = [m for p in parameters if (m := origin.moved_of(p)) is not None]
    after = [m.line for m in moves if m.file == born.file and m.line > line]
    if not after:
        return None
    why = f"made here on {stray.device}, before the model moved (line {min(after)})"
    return Verdict(source.cause(born.file, line, why), "move the model first, then make this")


def mover(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch went through a function or comprehension that moves tensors, and it passed this one by."""
    for sight in scene.sights(stray):
        made = sight.made
        value = source.value_for(made, sight.root) if made is not None else None
        if made is None or value is None or sight.name == sight.root or stray.is_parameter:
            continue
        called = [source.called_name(n) for n in ast.walk(value) if isinstance(n, ast.Call)]
        line = next((found for name in called if (found := source.move_in(sight.file, name))), None)
        line = line or (made.lineno if source.has_move(value) else None)
        if line is not None:
            why = f"this moves the batch and passes {sight.name} by: it is nested, or kept aside"
            fix = "move recursively: also the tensors inside dicts, lists and tuples of the batch"
            return Verdict(source.cause(sight.file, line, why), fix)
    return None


def sibling(scene: Scene, stray: Suspect) -> Verdict | None:
    """One of several things that came together was moved, this one was not."""
    for sight in scene.sights(stray):
        line = source.sibling_move(
            sight.file,
            sight.line,
            sight.root,
            inline=sight.frame is not scene.frames[0],
            entry=sight.name != sight.root,
        )
        if line is not None:
            device = assigned(sight.file, line) or target(scene, stray)
            why = f"here its siblings are moved and {sight.name} is not"
            return Verdict(
                source.cause(sight.file, line, why), f"move it too: {sight.name} = {sight.name}.to({device})"
            )
    return None


def misplaced_layer(scene: Scene, stray: Suspect) -> Verdict | None:
    """The activation was brought to its device on purpose, just before: then the layer is the one that is elsewhere."""
    partner, here = scene.partner(stray), scene.fault.frame
    if (
        partner is None
        or here is None
        or stray.moved is None
        or not partner.is_parameter
        or partner.moved is None
    ):
        return None
    if stray.moved.function != here.function or stray.moved.file != here.file or stray.device == "cpu":
        return None
    why = f"this layer is put on {partner.device}, and what it gets was moved to {stray.device} for it"
    fix = f'put the layer on "{stray.device}", or move its input to "{partner.device}"'
    return Verdict(source.cause(partner.moved.file, partner.moved.line, why), fix)


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
            fix = f"take the device from the tensor that they meet: {device.id} = {target(scene, stray)}"
            return Verdict(source.cause(born.file, chosen[-1].lineno, why), fix)
    return None


def assignment(scene: Scene, stray: Suspect) -> Verdict | None:
    """The line that gave the variable its value, followed back to the line that made the tensor."""
    for sight in scene.sights(stray):
        if sight.name.startswith("self.") or sight.made is None:
            continue
        made = _followed(sight, sight.made, stray.device)
        born = stray.born
        if born is not None and born.line != made.lineno and _made_elsewhere(made, born):
            return birth(scene, stray)
        why = f"{sight.name} is made here on {stray.device}, and {met(scene, stray)}"
        return Verdict(source.cause(sight.file, made.lineno, why), _fix_at(scene, stray, sight, made.lineno))
    return None


def _made_elsewhere(made: ast.stmt, born: Origin) -> bool:
    """The variable was set from a call, and the tensor was made by a factory on another line: inside that call."""
    value = getattr(made, "value", None)
    if value is None or has_factory(value) or not any(isinstance(n, ast.Call) for n in ast.walk(value)):
        return False
    return any(has_factory(call) for call in source.call_on(born.file, born.line))


def _followed(sight: Sight, made: ast.stmt, device: str) -> ast.stmt:
    """Back over lines that only reshape or cast a tensor to the one that made it."""
    for _ in range(5):
        value = getattr(made, "value", None)
        name = _derived_from(value) if value is not None else None
        if name is None or str(getattr(sight.frame.f_locals.get(name), "device", device)) != device:
            break
        if (before := source.last_assignment(sight.file, made.lineno, name)) is None:
            break
        made = before
    return made


def _derived_from(node: ast.expr) -> str | None:
    """The name that an expression only reshapes or casts: `mask` in `mask.tril()[None]` and `torch.triu(mask)`."""
    if has_factory(node):
        return None
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.") and node.args:
        return _derived_from(node.args[0])
    return (
        source.root(node) if not isinstance(node, ast.Call) or isinstance(node.func, ast.Attribute) else None
    )


def birth(scene: Scene, stray: Suspect) -> Verdict | None:
    """The line that made the tensor."""
    if (born := stray.born) is None:
        return None
    why = f"made here on {stray.device} ({stray.operand.dtype})"
    return Verdict(source.cause(born.file, born.line, why), _fix_at(scene, stray, None, born.line))


def _fix_at(scene: Scene, stray: Suspect, sight: Sight | None, line: int) -> str:
    file = sight.file if sight is not None else stray.born.file if stray.born is not None else ""
    device = target(scene, stray)
    if rewritten := add_device(file, line, device):
        return f"make it {'on the GPU' if alone(scene) else 'where its partner is'}: {rewritten}"
    name = sight.name if sight is not None else scene.expression_of(stray) or stray.operand.name
    return f"bring it to {'the GPU' if alone(scene) else 'its partner'}: {name} = {name}.to({device})"
