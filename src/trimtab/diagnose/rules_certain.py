"""Rules that prove the cause of a placement fault: an optimizer's state, a tied weight, two settings that disagree."""

from __future__ import annotations

import ast
import sys
from types import FrameType

import torch

from trimtab.diagnose import holders, rewrite, rules_modules, source
from trimtab.diagnose.rewrite import last_move_argument
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import deeds, origin
from trimtab.virtual.origin import Origin


def optimizer_state(scene: Scene, stray: Suspect) -> Verdict | None:
    """State that an optimizer keeps beside its parameters: loaded before the model moved, made before, or put there."""
    tensor = stray.tensor
    if tensor is None or stray.is_parameter:
        return None
    in_step = any("/torch/optim/" in f.file.replace("\\", "/") for f in scene.fault.frames)
    found = _slot(tensor)
    place = stray.moved or stray.born
    if place is None or (found is None and not in_step):
        return None
    if found is not None:
        optimizer, parameter = found
        line = origin.resolve(deeds.loaded(optimizer))
        if line is not None and not _made_in_step(place):
            why = "the optimizer's state is loaded here, while its parameters are on another device than they are now"
            return _move_first(line, why)
        moved = origin.moved_of(parameter)
        if _made_in_step(place) and moved is not None:
            why = "the parameters are moved here, after the optimizer has made its state beside them"
            fix = (
                "move the model before the optimizer is made, or load the optimizer's state again afterwards"
            )
            return Verdict(source.cause(moved.file, moved.line, why), fix, "unmoved-state")
        if not _constructs(place):
            return _put_there(place, stray)
    if found is None and _made_in_step(place):
        return None
    why = "the optimizer's state was put here, and its parameters are (or have moved) elsewhere"
    return _move_first(place, why)


def _slot(tensor: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor] | None:
    """The optimizer that keeps a tensor in its state, and for which parameter; looks at what is running."""
    frame: FrameType | None = sys._getframe(1)
    seen: set[int] = set()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            held = (value, *(vars(value).values() if hasattr(value, "__dict__") else ()))
            for optimizer in held if not isinstance(value, type) else ():
                if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in seen:
                    continue
                seen.add(id(optimizer))
                for parameter, slots in optimizer.state.items():
                    if isinstance(slots, dict) and any(entry is tensor for entry in slots.values()):
                        return optimizer, parameter
        frame = frame.f_back
    return None


def _made_in_step(place: Origin) -> bool:
    return any(source.called_name(call) == "step" for call in source.call_on(place.file, place.line))


def _constructs(place: Origin) -> bool:
    """Whether a line makes an optimizer: some make their state at once."""
    return any(
        "params" in source.called_name(call) or any("parameters" in ast.unparse(a) for a in call.args)
        for call in source.call_on(place.file, place.line)
    )


def _move_first(line: Origin, why: str) -> Verdict:
    """The move that comes too late goes before the line that made the optimizer."""
    text = "move the model first (model.to(device)), then build the optimizer and load its state"
    statement = source.statement(line.file, line.line)
    for call in source.call_on(line.file, line.line):
        name = source.root(call.func)
        made = source.last_assignment(line.file, line.line + 1, name) if name else None
        value = getattr(made, "value", None)
        if made is None or not isinstance(value, ast.Call):
            continue
        move = rules_modules.later_move(line.file, statement or made, value)
        if move is not None:
            code = ast.unparse(move)
            swapped = rules_modules.swapped(line.file, made, move, why)
            text = f"move the model first: put {code} before line {made.lineno}, where the optimizer is made"
            return Verdict(source.cause(line.file, line.line, why), text, "unmoved-state", swapped.edits)
    return Verdict(source.cause(line.file, line.line, why), text, "unmoved-state")


def _put_there(place: Origin, stray: Suspect) -> Verdict:
    """The program itself put a tensor into the optimizer's state."""
    why = f"this puts a tensor on {stray.device} into the optimizer's state, and its parameter is elsewhere"
    statement = source.statement(place.file, place.line)
    for call in source.call_on(place.file, place.line):
        if not isinstance(call.func, ast.Attribute) or statement is None:
            continue
        to_host = call.func.attr == "cpu" or (call.func.attr == "to" and "cpu" in ast.unparse(call))
        if to_host:
            edits = [rewrite.in_place_of(place.file, call, ast.unparse(call.func.value))]
            text = f"leave it beside its parameter: {rewrite.after_edits(place.file, statement, edits)}"
            return Verdict(source.cause(place.file, place.line, why), text, "unmoved-state", edits)
    fix = "make it where its parameter is: torch.zeros_like(p), or device=p.device"
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
