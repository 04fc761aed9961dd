"""Rules about batches that a library should have moved: it cannot look into them, or never got their loader."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import devices, handed, holders, mend, rewrite, scope, source
from trimtab.diagnose.finding import Cause
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import origin
from trimtab.virtual.origin import Origin


def handed_over(scene: Scene, stray: Suspect) -> Verdict | None:
    """The tensor lies in an object of the program's own class, which came from a library as an argument, not moved."""
    if stray.device != "cpu" or stray.is_parameter or stray.moved is not None:
        return None
    for sight in scene.sights(stray):
        if sight.taken_from not in source.parameters(sight.file, sight.line):
            continue
        # The object itself is given, or lies in a dict that is.
        held = (sight.frame.f_locals.get(name) for name in (sight.taken_from, sight.root))
        batch = next((value for value in held if _is_opaque(value)), None)
        if batch is None:
            continue
        giver = _library_before(sight.frame)
        made = _made_at(type(batch).__name__, [frame.f_code.co_filename for frame in scene.frames])
        if giver is None or made is None:
            continue
        kind = type(batch).__name__
        why = (
            f"{giver} moves dicts, lists and tuples of tensors, and what has a `to` method; {kind} is neither, so the "
            f"batch made here is handed over as it is, on {stray.device}"
        )
        fix = f"make the batch a dict, or give {kind} a method to(self, device) that moves all its tensors"
        return Verdict(Cause(made[0], made[1], source.place(*made).code, why), fix)
    return None


def _is_opaque(batch: Any) -> bool:
    """An object with tensors among its attributes that no general mover knows."""
    known = (torch.Tensor, nn.Module, Mapping, list, tuple, set, str, type)
    if isinstance(batch, known) or hasattr(batch, "to") or not hasattr(batch, "__dict__"):
        return False
    return any(isinstance(value, torch.Tensor) for value in vars(batch).values())


def _library_before(frame: FrameType) -> str | None:
    """The library whose code called this function; None where the program did so itself."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] == "torch":
        caller = caller.f_back
    if caller is None or source.is_user_file(caller.f_code.co_filename):
        return None
    name: str = caller.f_globals.get("__name__", "").partition(".")[0]
    return name or None


def _made_at(kind: str, files: list[str]) -> tuple[str, int] | None:
    """Where an object of this class is made, outside the class itself; else where the class is defined."""
    defined = None
    for file in dict.fromkeys(files):
        own = source.classes(file, kind)
        defined = defined or next(((file, node.lineno) for node in own), None)
        for call in source.calls(file, kind):
            if not any(node.lineno <= call.lineno <= (node.end_lineno or 0) for node in own):
                return file, call.lineno
    return defined


def not_prepared(scene: Scene, stray: Suspect) -> Verdict | None:
    """A helper that moves models and loaders together (accelerate's prepare, Fabric's setup) got the model only."""
    partner = scene.partner(stray)
    if partner is None or stray.is_parameter or stray.moved is not None or stray.device != "cpu":
        return None
    there = (p for m in scene.modules for p in m.parameters() if str(p.device) == partner.device)
    weight = partner.held if partner.is_parameter else next(there, None)
    moved = origin.moved_of(weight) if weight is not None else None
    for call in source.call_on(moved.file, moved.line) if moved is not None else ():
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("prepare", "prepare_model", "setup"):
            assert moved is not None
            helper = ast.unparse(call.func.value)
            if (passed := _passed_through(scene, stray, moved, call, helper)) is not None:
                return passed
            why = f"{helper} moves the model here; the data does not come from a loader that it was given"
            fix = _prepared(scene, stray, moved, helper)
            if fix is None and partner.is_parameter:
                fix = mend.at_use(scene, stray) or mend.sentence(scene, stray, moved.line)
            cause = source.cause(moved.file, moved.line, why)
            return Verdict(cause, fix.text, edits=fix.edits) if fix is not None else None
    return None


def _passed_through(
    scene: Scene, stray: Suspect, moved: Origin, call: ast.Call, helper: str
) -> Verdict | None:
    """Tensors that were given to the helper with the model: it hands them back where they were."""
    statement, frame = source.statement(moved.file, moved.line), None
    if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1:
        frame = devices.frame_of(scene.frames, moved.file, moved.line)
    target = statement.targets[0] if frame is not None and isinstance(statement, ast.Assign) else None
    targets = target.elts if isinstance(target, ast.Tuple) else [target] if target is not None else []
    given = {ast.unparse(arg) for arg in call.args}
    left: dict[str, torch.Tensor] = {}
    for one in targets:
        value = holders.value_of(one, frame) if frame is not None else None
        if (
            isinstance(value, torch.Tensor)
            and str(value.device) == stray.device
            and ast.unparse(one) in given
        ):
            left[ast.unparse(one)] = value
    if statement is None or not any(_comes_from(stray, name, value) for name, value in left.items()):
        return None
    names = list(left)
    text = f"{', '.join(names)} = {', '.join(f'{name}.to({helper}.device)' for name in names)}"
    why = (
        f"{helper} moves models and loaders, no tensors: still on {stray.device} after it: {', '.join(names)}"
    )
    edits = [rewrite.after(moved.file, statement, text)]
    return Verdict(source.cause(moved.file, moved.line, why), f"move what it leaves: {text}", edits=edits)


def _comes_from(stray: Suspect, name: str, value: torch.Tensor) -> bool:
    """Whether a tensor is (a view of) another, or was made by a line that reads that one by its name."""
    if stray.tensor is not None and holders.same(stray.tensor, value):
        return True
    made = source.statement(stray.born.file, stray.born.line) if stray.born is not None else None
    return made is not None and any(
        isinstance(n, ast.Subscript) and ast.unparse(n.value) == name for n in source.header(made)
    )


def _prepared(scene: Scene, stray: Suspect, moved: Origin, helper: str) -> mend.Mend | None:
    """The loader that a batch comes from, given to the helper after the model."""
    statement = source.statement(moved.file, moved.line)
    for sight in scene.sights(stray):
        over = sight.made.iter if isinstance(sight.made, ast.For) else None
        names = sorted(source.names_in(over)) if over is not None else []
        loaders = [n for n in names if isinstance(sight.frame.f_locals.get(n), torch.utils.data.DataLoader)]
        if len(loaders) == 1 and statement is not None and not hasattr(statement, "body"):
            method = "setup_dataloaders" if "setup" in ast.unparse(statement) else "prepare"
            name = handed.called_outside(loaders[0], sight.frame, scene.frames)
            text = f"{name} = {helper}.{method}({name})"
            known = scope.is_bound(moved.file, moved.line, name)
            edits = [rewrite.after(moved.file, statement, text)] if known else []
            return mend.Mend(f"give it the loader too: {text}", edits)
    return None
