"""Rules about modules that a model's move does not reach: one kept past the table of its parts (`object.__setattr__`,
`__dict__`, a tuple of one), one that the model's own `to` passes by; and about a weight that two moves reach. Where a
plain list should register its layers, rules_held speaks."""

from __future__ import annotations

import ast

import torch
from torch import nn

from trimtab.diagnose import devices, holders, mend, owners, rewrite, source
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_modules import bindings
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import origin
from trimtab.virtual.origin import Origin


def kept_aside(scene: Scene, stray: Suspect) -> Verdict | None:
    """A module that a model keeps without registering it, on purpose: it has to be moved by itself."""
    part = stray.registered
    if part is None or stray.moved is not None or stray.device != "cpu":
        return None
    root = owners.outermost(part.module, scene.modules)
    for keeper in owners.holders_of(root, scene.modules):
        named = holders.source_of(keeper.module)
        if keeper.registered or named is None or not _on_purpose(root, keeper):
            continue
        path = f"{keeper.name}[0]" if keeper.container else keeper.name
        why = f"{named[1]} keeps {path} past the table of its parts: its own move does not reach it"
        for file, made, name in bindings(scene, root):
            fix = mend.module_moved(scene, stray, file, made, name)
            if fix.edits:
                return fix.blames(file, made.lineno, why, "unmoved-state")
        if (verdict := _beside_the_model(scene, stray, keeper.module, path, why)) is not None:
            return verdict
    return None


def _on_purpose(root: nn.Module, keeper: owners.Attribute) -> bool:
    """Whether a module is kept out of the table: past it, or alone in a container and not trained there."""
    if not keeper.container:
        return True
    kept = vars(keeper.module)[keeper.name]
    trained = torch.is_grad_enabled() and any(p.requires_grad for p in root.parameters())
    return len(kept) == 1 and isinstance(kept, list | tuple) and not trained


def _beside_the_model(scene: Scene, stray: Suspect, keeper: nn.Module, path: str, why: str) -> Verdict | None:
    """The move of the model that keeps it, and the same for what is kept, after it."""
    home = mend.wanted(scene, stray)
    weight = next((p for p in keeper.parameters() if str(p.device) == home), None)
    moved = origin.moved_of(weight) if weight is not None else None
    statement = source.statement(moved.file, moved.line) if moved is not None else None
    frame = devices.frame_of(scene.frames, moved.file, moved.line) if moved is not None else None
    name = holders.expression_for(keeper, frame) if frame is not None else None
    moves = [n for n in ast.walk(statement or ast.Pass()) if source.is_move(n)]
    if moved is None or statement is None or not isinstance(statement, ast.Assign | ast.Expr):
        return None
    if name is None or len(moves) != 1:
        return None
    text = f"{name}.{path}{_suffix(moved.file, moves[0])}"
    edits = [rewrite.after(moved.file, statement, text)]
    return Verdict(source.cause(moved.file, moved.line, why), f"move it too: {text}", "unmoved-state", edits)


def _suffix(file: str, move: ast.Call) -> str:
    """`.to(device)`, `.cuda()` as it is written behind what is moved."""
    assert isinstance(move.func, ast.Attribute)
    return rewrite.text_of(file, move).removeprefix(rewrite.text_of(file, move.func.value))


def passed_over(scene: Scene, stray: Suspect) -> Verdict | None:
    """A part of a model whose own method moves other parts, one by one, and not this one."""
    part = stray.registered
    if part is None or stray.moved is not None or stray.device != "cpu":
        return None
    for holder in owners.climb(part.module, scene.modules):
        named = holders.source_of(holder.module)
        weights = [p for p in holder.module.parameters() if str(p.device) == mend.wanted(scene, stray)]
        moved = origin.moved_of(weights[-1]) if weights else None
        if named is None or moved is None or moved.file != named[0] or not holder.name.isidentifier():
            continue
        method, around = source.function_at(*moved[:2]), source.class_at(*moved[:2])
        statement = source.statement(*moved[:2])
        call = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        if method is None or method.name == "__init__" or around is None or around.name != named[1]:
            continue
        if statement is None or not source.is_move(call) or not isinstance(call.func, ast.Attribute):
            continue
        other, mine = ast.unparse(call.func.value), f"self.{holder.name}"
        if not other.startswith("self.") or other.startswith(f"{mine}."):
            continue
        text = f"{mine}{_suffix(moved.file, call)}"
        text = f"{mine} = {text}" if isinstance(statement, ast.Assign) else text
        why = f"{method.name}() moves {other} here and passes {mine} by"
        edits = [rewrite.after(moved.file, statement, text)]
        return Verdict(source.cause(*moved[:2], why), f"move it too: {text}", edits=edits)
    return None


def tied(scene: Scene, stray: Suspect) -> Verdict | None:
    """A weight that two modules share follows the last move of either."""
    for suspect in (stray, *scene.operands):
        held_by = {id(a.module) for a in suspect.attributes if a.registered}
        if len(held_by) < 2 or suspect.moved is None:
            continue
        names = [
            f"{owners.path_of(a.module, scene.modules)}.{a.name}" for a in suspect.attributes if a.registered
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
