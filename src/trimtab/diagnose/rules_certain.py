"""Rules that prove the cause of a placement fault: a result thrown away, state that no move reaches, a tied weight."""

from __future__ import annotations

import ast

import torch

from trimtab.diagnose import holders, source
from trimtab.diagnose.rewrite import add_device, last_move_argument
from trimtab.diagnose.rules_common import Verdict, construction, target
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import origin
from trimtab.virtual.origin import Origin


def optimizer_state(scene: Scene, stray: Suspect) -> Verdict | None:
    in_step = any("/torch/optim/" in f.file.replace("\\", "/") for f in scene.fault.frames)
    place = stray.moved or stray.born
    if not in_step or stray.is_parameter or place is None:
        return None
    why = "the optimizer's state was put here, and its parameters are (or have moved) elsewhere"
    fix = "move the model first (model.to(device)), then build the optimizer and load its state"
    return Verdict(source.cause(place.file, place.line, why), fix, "unmoved-state")


def tied(scene: Scene, stray: Suspect) -> Verdict | None:
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


def dropped_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """`x.to(device)` whose result nobody kept."""
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


def _loads_where_it_was(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "torch.load" and source.keyword(call, "map_location") is None


def loaded(scene: Scene, stray: Suspect) -> Verdict | None:
    """A checkpoint that comes back on the device it was saved from."""
    for sight in scene.sights(stray):
        if (made := sight.made) is None:
            continue
        for call in ast.walk(getattr(made, "value", None) or ast.Pass()):
            if isinstance(call, ast.Call) and _loads_where_it_was(call):
                why = f"the checkpoint comes back on the device it was saved from ({stray.device})"
                fix = f"torch.load(..., map_location={target(scene, stray)})"
                return Verdict(source.cause(sight.file, made.lineno, why), fix, "map-location")
    return None


def unregistered(scene: Scene, stray: Suspect) -> Verdict | None:
    """A tensor in a plain attribute, or a layer in a plain list: module.to() does not reach it."""
    plain = [a for a in stray.attributes if not a.registered]
    for attribute in [a for a in stray.attributes if a.registered]:
        # What holds the outermost module holds it unregistered.
        plain += holders.holders_of(holders.outermost(attribute.module, scene.modules), scene.modules)
    for attribute in plain:
        named = holders.source_of(attribute.module)
        born = stray.born.line if stray.born is not None and named and stray.born.file == named[0] else 0
        line = source.attribute_assignment(*named, attribute.name, born) if named else None
        if named is None or line is None:
            continue
        file, class_name = named
        layers = any(a.registered for a in stray.attributes) and bool(attribute.container)
        why, fix = _registration(attribute, class_name, layers)
        rewritten = add_device(file, line, target(scene, stray))
        function = source.function_at(file, line)
        if rewritten and function is not None and function.name != "__init__":
            fix = f"make it where its partner is: {rewritten}"
        return Verdict(source.cause(file, line, why), fix, "unmoved-state")
    return None


def _registration(attribute: holders.Attribute, class_name: str, layers: bool) -> tuple[str, str]:
    name = f"self.{attribute.name}"
    if layers:
        kind = "ModuleDict" if attribute.container == "dict" else "ModuleList"
        why = f"{class_name} keeps layers in a plain {attribute.container}: they are neither moved nor trained with it"
        return why, f"{name} = nn.{kind}(...)"
    why = f"{name} is a plain attribute, no registered buffer: {class_name}.to(device) does not move it"
    return why, f'self.register_buffer("{attribute.name}", ..., persistent=False)'


def made_after_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """A layer that was created after its model had moved, or a module that never was moved."""
    owner = next((a.module for a in stray.attributes if a.registered), None)
    if owner is None or stray.moved is not None or stray.device != "cpu":
        return None
    root = holders.outermost(owner, scene.modules)
    if (born := stray.born) is None:
        return _copied_module(scene, stray, root)
    moves = [m for p in root.parameters() if p.device.type != "cpu" and (m := origin.moved_of(p)) is not None]
    line = construction(born.file, born.line, max((m.line for m in moves if m.file == born.file), default=0))
    if moves:
        why = "these parameters are created after the model was moved, so they stay on the CPU"
        fix = "create them first and move afterwards, or call model.to(device) once more after this line"
    else:
        why = "this module is created on the CPU and never moved, while its input is"
        fix = f"move the module as well: module.to({target(scene, stray)})"
    return Verdict(source.cause(born.file, line, why), fix)


def _copied_module(scene: Scene, stray: Suspect, root: object) -> Verdict | None:
    """A module whose parameters have no line of their own (a deep copy): where its variable was set."""
    for frame in scene.frames:
        name = next((key for key, value in frame.f_locals.items() if value is root), None)
        made = source.last_assignment(frame.f_code.co_filename, frame.f_lineno, name) if name else None
        if made is not None:
            why = f"{name} is made here on the CPU and never moved, while its partner is elsewhere"
            fix = f"move it as well: {name}.to({target(scene, stray)})"
            return Verdict(source.cause(frame.f_code.co_filename, made.lineno, why), fix)
    return None


def placement_conflict(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch follows a setting, while a helper object (an accelerator, a trainer) moved the model elsewhere."""
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
