"""The rules that lead from a placement fault to its cause. The first that applies speaks.

A rule gets the scene and a suspect and returns a verdict or None. Order matters: what is certain (a result thrown
away, state that was never registered) comes before what is likely (the line that last set the variable).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from trimtab.diagnose import holders, source
from trimtab.diagnose.rewrite import add_device, assigned, has_factory, last_move_argument
from trimtab.diagnose.scene import Scene, Sight, Suspect
from trimtab.diagnose.verdict import Verdict

if TYPE_CHECKING:
    from trimtab.virtual.origin import Origin


def _target(scene: Scene, stray: Suspect) -> str:
    """The device to move to, as code: the partner's own name if it has one here."""
    partner = scene.partner(stray)
    if name := scene.expression_of(partner):
        return f"{name}.device"
    return f'"{partner.device}"' if partner is not None else "x.device"


def _optimizer_state(scene: Scene, stray: Suspect) -> Verdict | None:
    in_step = any("/torch/optim/" in f.file.replace("\\", "/") for f in scene.fault.frames)
    place = stray.moved or stray.born
    if not in_step or stray.is_parameter or place is None:
        return None
    why = "the optimizer's state was put here, and its parameters are (or have moved) elsewhere"
    fix = "move the model first (model.to(device)), then build the optimizer and load its state"
    return Verdict(source.cause(place.file, place.line, why), fix, "unmoved-state")


def _tied(scene: Scene, stray: Suspect) -> Verdict | None:
    """A weight that two modules share follows the last move of either."""
    for suspect in (stray, *scene.operands):
        owners = {id(a.module) for a in suspect.attributes if a.registered}
        if len(owners) < 2 or suspect.moved is None:
            continue
        names = [
            f"{holders.path_of(a.module, scene.modules)}.{a.name}" for a in suspect.attributes if a.registered
        ]
        if not _moves_one_of(suspect.moved, names):
            continue
        why = f"this moves a tied weight ({' = '.join(names)}): both modules follow the last move, to {suspect.device}"
        fix = "keep tied modules on one device (move both to the same one) and bring the activations there"
        return Verdict(source.cause(suspect.moved.file, suspect.moved.line, why), fix)
    return None


def _moves_one_of(moved: Origin, paths: list[str]) -> bool:
    """Whether a line moves one part of a model (`model.head.to(…)`) and so only one of the given parameters by name."""
    for call in source.call_on(moved.file, moved.line):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in source.MOVES:
            continue
        part = ast.unparse(call.func.value).split(".")[-1]
        if 0 < sum(part in path.split(".") for path in paths) < len(paths):
            return True
    return False


def _dropped_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """`x.to(device)` whose result nobody kept."""
    from trimtab.virtual import origin

    tensors = [stray.tensor, stray.held]
    for sight in scene.sights(stray):
        tensors.append(sight.frame.f_locals.get(sight.name))
    for tensor in tensors:
        copied = origin.copied_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if copied is None or (moved := source.dropped_move(copied.file, copied.line)) is None:
            continue
        code = source.place(copied.file, copied.line).code
        why = f"the moved copy of {moved} is thrown away here: Tensor.to does not work in place"
        return Verdict(
            source.cause(copied.file, copied.line, why), f"assign it: {moved} = {code.split('#')[0].strip()}"
        )
    return None


def _unregistered(scene: Scene, stray: Suspect) -> Verdict | None:
    """A tensor in a plain attribute, or a layer in a plain list: module.to() does not reach it."""
    plain = [a for a in stray.attributes if not a.registered]
    for attribute in [a for a in stray.attributes if a.registered]:
        plain += _plain_holder(attribute.module, scene)
    for attribute in plain:
        named = holders.source_of(attribute.module)
        born = stray.born.line if stray.born is not None and named and stray.born.file == named[0] else 0
        line = source.attribute_assignment(*named, attribute.name, born) if named else None
        if named is None or line is None:
            continue
        file, class_name = named
        layers = any(a.registered for a in stray.attributes) and bool(attribute.container)
        why, fix = _registration(attribute, class_name, layers)
        rewritten = add_device(file, line, _target(scene, stray))
        function = source.function_at(file, line)
        if rewritten and function is not None and function.name != "__init__":
            fix = f"make it where its partner is: {rewritten}"
        return Verdict(source.cause(file, line, why), fix, "unmoved-state")
    return None


def _plain_holder(module: object, scene: Scene, depth: int = 6) -> list[holders.Attribute]:
    """The plain container in which a module, or a parent of it, is kept; empty when all are registered."""
    current = module
    for _ in range(depth):
        held = holders.holders_of(current, scene.modules)  # type: ignore[arg-type]
        registered = [h for h in held if h.registered]
        if held and not registered:
            return held
        if not registered:
            return []
        current = registered[0].module
    return []


def _registration(attribute: holders.Attribute, class_name: str, layers: bool) -> tuple[str, str]:
    name = f"self.{attribute.name}"
    if layers:
        kind = "ModuleDict" if attribute.container == "dict" else "ModuleList"
        why = f"{class_name} keeps layers in a plain {attribute.container}: they are neither moved nor trained with it"
        return why, f"{name} = nn.{kind}(...)"
    why = f"{name} is a plain attribute, no registered buffer: {class_name}.to(device) does not move it"
    return why, f'self.register_buffer("{attribute.name}", ..., persistent=False)'


def _made_after_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """A layer that was created after its model had moved, or a module that never was moved."""
    from trimtab.virtual import origin

    owner = next((a.module for a in stray.attributes if a.registered), None)
    if owner is None or stray.moved is not None or stray.device != "cpu":
        return None
    root = holders.outermost(owner, scene.modules)
    if (born := stray.born) is None:
        return _copied_module(scene, stray, root)
    moves = [m for p in root.parameters() if p.device.type != "cpu" and (m := origin.moved_of(p)) is not None]
    line = _construction(born.file, born.line, max((m.line for m in moves if m.file == born.file), default=0))
    if moves:
        why = "these parameters are created after the model was moved, so they stay on the CPU"
        fix = "create them first and move afterwards, or call model.to(device) once more after this line"
    else:
        why = "this module is created on the CPU and never moved, while its input is"
        fix = f"move the module as well: module.to({_target(scene, stray)})"
    return Verdict(source.cause(born.file, line, why), fix)


def _copied_module(scene: Scene, stray: Suspect, root: object) -> Verdict | None:
    """A module whose parameters have no line of their own (a deep copy): where its variable was set."""
    for frame in scene.frames:
        name = next((key for key, value in frame.f_locals.items() if value is root), None)
        made = source.last_assignment(frame.f_code.co_filename, frame.f_lineno, name) if name else None
        if made is not None:
            why = f"{name} is made here on the CPU and never moved, while its partner is elsewhere"
            fix = f"move it as well: {name}.to({_target(scene, stray)})"
            return Verdict(source.cause(frame.f_code.co_filename, made.lineno, why), fix)
    return None


def _construction(file: str, line: int, after: int) -> int:
    """From a line inside a class's __init__ out to the line that constructs it (behind `after`, if"
    " there is one)."""
    for _ in range(4):
        function, owner = source.function_at(file, line), source.class_at(file, line)
        if function is None or owner is None or function.name != "__init__":
            break
        sites = [
            n for n in source.calls(file, owner.name) if not owner.lineno <= n <= (owner.end_lineno or 0)
        ]
        if not sites:
            break
        line = next((n for n in sites if n > after), sites[0])
    return line


def _placement_conflict(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch follows a setting while a helper object (an accelerator, a trainer) moved the model"
    " elsewhere."""
    partner = scene.partner(stray)
    if partner is None or not partner.is_parameter or (moved := partner.moved) is None:
        return None
    chosen = last_move_argument(scene, stray)
    if chosen is None or not any(
        word in chosen.lower() for word in ("cfg", "conf", "args", "device", "opt", "setting")
    ):
        return None
    for call in source.call_on(moved.file, moved.line):
        if not isinstance(call.func, ast.Attribute) or call.func.attr in source.MOVES:
            continue
        maker = call.func.value
        made = (
            source.last_assignment(moved.file, moved.line, maker.id) if isinstance(maker, ast.Name) else None
        )
        if made is None or not isinstance(getattr(made, "value", None), ast.Call):
            continue
        why = f"{ast.unparse(maker)} chooses the device by itself ({partner.device}) while batches follow {chosen}"
        fix = f"let it obey the same setting as the batches ({chosen}), or send batches to {ast.unparse(maker)}.device"
        return Verdict(source.cause(moved.file, made.lineno, why), fix, "placement-conflict")
    return None


def _not_prepared(scene: Scene, stray: Suspect) -> Verdict | None:
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


def _made_before_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """A copy of the weights (an average, a teacher) that was taken before the model moved."""
    from trimtab.virtual import origin

    if stray.is_parameter or stray.moved is not None or (born := stray.born) is None:
        return None
    line = _construction(born.file, born.line, 0)
    if line == born.line:
        return None
    parameters = [p for module in scene.modules for p in module._parameters.values() if p is not None]
    moves = [m for p in parameters if (m := origin.moved_of(p)) is not None]
    after = [m.line for m in moves if m.file == born.file and m.line > line]
    if not after:
        return None
    why = f"made here on {stray.device}, before the model moved (line {min(after)})"
    return Verdict(source.cause(born.file, line, why), "move the model first, then make this")


def _mover(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch went through a function or comprehension that moves tensors, and it passed this one by."""
    for sight in scene.sights(stray):
        made = source.last_assignment(sight.file, sight.line, sight.root)
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


def _sibling(scene: Scene, stray: Suspect) -> Verdict | None:
    """One of several things that came together was moved, this one was not."""
    for sight in scene.sights(stray):
        line = source.sibling_move(
            sight.file, sight.line, sight.root, inline=sight.frame is not scene.frames[0]
        )
        if line is not None:
            device = assigned(sight.file, line) or _target(scene, stray)
            why = f"here its siblings are moved and {sight.name} is not"
            return Verdict(
                source.cause(sight.file, line, why), f"move it too: {sight.name} = {sight.name}.to({device})"
            )
    return None


def _misplaced_layer(scene: Scene, stray: Suspect) -> Verdict | None:
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


def _device_alias(scene: Scene, stray: Suspect) -> Verdict | None:
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
            why = f"the helper tensors are made on this device, and they meet a tensor on {_other(scene, stray)}"
            fix = f"take the device from the tensor that they meet: {device.id} = {_target(scene, stray)}"
            return Verdict(source.cause(born.file, chosen[-1].lineno, why), fix)
    return None


def _loads_where_it_was(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "torch.load" and source.keyword(call, "map_location") is None


def _loaded(scene: Scene, stray: Suspect) -> Verdict | None:
    """A checkpoint that comes back on the device it was saved from."""
    for sight in scene.sights(stray):
        made = source.last_assignment(sight.file, sight.line, sight.root)
        value = getattr(made, "value", None)
        for call in ast.walk(value) if made is not None and value is not None else ():
            if isinstance(call, ast.Call) and _loads_where_it_was(call) and made is not None:
                why = f"the checkpoint comes back on the device it was saved from ({stray.device})"
                fix = f"torch.load(..., map_location={_target(scene, stray)})"
                return Verdict(source.cause(sight.file, made.lineno, why), fix, "map-location")
    return None


def assignment(scene: Scene, stray: Suspect) -> Verdict | None:
    """The line that gave the variable its value, followed back to the line that made the tensor."""
    for sight in scene.sights(stray):
        if sight.name.startswith("self."):
            continue
        made = source.last_assignment(sight.file, sight.line, sight.root)
        if made is None:
            continue
        made = _followed(scene, sight, made, stray.device)
        born = stray.born
        if born is not None and born.line != made.lineno and _made_elsewhere(made, born):
            return birth(scene, stray)
        why = f"{sight.name} is made here on {stray.device}, and it meets a tensor on {_other(scene, stray)}"
        return Verdict(source.cause(sight.file, made.lineno, why), _fix_at(scene, stray, sight, made.lineno))
    return None


def _made_elsewhere(made: ast.stmt, born: Origin) -> bool:
    """The variable was set from a call, and the tensor was made by a factory on another line: inside that call."""
    value = getattr(made, "value", None)
    if value is None or has_factory(value) or not any(isinstance(n, ast.Call) for n in ast.walk(value)):
        return False
    return any(has_factory(call) for call in source.call_on(born.file, born.line))


def _followed(scene: Scene, sight: Sight, made: ast.stmt, device: str) -> ast.stmt:
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
    target = _target(scene, stray)
    if rewritten := add_device(file, line, target):
        return f"make it where its partner is: {rewritten}"
    name = sight.name if sight is not None else scene.expression_of(stray) or stray.operand.name
    return f"bring it to its partner: {name} = {name}.to({target})"


def _other(scene: Scene, stray: Suspect) -> str:
    partner = scene.partner(stray)
    return partner.device if partner is not None else "another device"


Rule = Callable[[Scene, Suspect], "Verdict | None"]
CERTAIN: tuple[Rule, ...] = (
    _optimizer_state,
    _tied,
    _dropped_move,
    _loaded,
    _unregistered,
    _made_after_move,
    _placement_conflict,
)
"""What the evidence proves, whichever operand it is found on."""
LIKELY: tuple[Rule, ...] = (
    _not_prepared,
    _made_before_move,
    _mover,
    _sibling,
    _misplaced_layer,
    _device_alias,
    assignment,
    birth,
)
"""What explains the likeliest stray operand best."""
