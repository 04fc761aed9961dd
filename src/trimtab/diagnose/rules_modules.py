"""Rules about modules: one that was never moved, one on another GPU than the rest, a copy taken before the move."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn

from trimtab.diagnose import holders, mend, owners, rewrite, source
from trimtab.diagnose.rules_common import Verdict, construction
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import origin
from trimtab.virtual.origin import Origin


def never_moved(scene: Scene, stray: Suspect) -> Verdict | None:
    """A module that nobody moved, while its input was: a loss with weights, a teacher, a copy."""
    part = stray.registered
    if part is None or stray.moved is not None or stray.device != "cpu":
        return None
    root = owners.outermost(part.module, scene.modules)
    if any(str(p.device) == mend.wanted(scene, stray) for p in root.parameters()):
        return None  # the model did move
    for place in bindings(scene, root):
        file, made, name = place
        if (copy := _copied_before(scene, stray, file, made, name)) is not None:
            return copy
        fix = mend.module_moved(scene, stray, file, made, name)
        why = f"{name} is made here on the CPU and never moved, while its partner is elsewhere"
        return fix.blames(file, made.lineno, why)
    if (born := stray.born) is None:
        return None
    line = construction(born.file, born.line, 0)
    why = "this module is created on the CPU and never moved, while its input is"
    fix_text = f'move the module as well: .to("{mend.wanted(scene, stray)}")'
    return Verdict(source.cause(born.file, line, why), fix_text)


def elsewhere(scene: Scene, stray: Suspect) -> Verdict | None:
    """Of several models one is on another GPU than all the others and what they are fed: that one is misplaced."""
    partner = scene.partner(stray)
    part = partner.registered if partner is not None else None
    if partner is None or part is None or stray.is_parameter or "cpu" in (stray.device, partner.device):
        return None
    odd = owners.outermost(part.module, scene.modules)
    roots = {id(root): root for m in scene.modules if (root := owners.outermost(m, scene.modules)) is not odd}
    others = [p for root in roots.values() for p in root.parameters()]
    if not others or {str(p.device) for p in odd.parameters()} != {partner.device}:
        return None
    if {str(p.device) for p in others} != {stray.device} or not (
        spelled(partner.held) and not spelled(others[0])
    ):
        return None
    for file, made, name in bindings(scene, odd):
        why = f"{name} is on {partner.device}, while the other models and what they are fed are on {stray.device}"
        fix = mend.module_moved(scene, partner, file, made, name)
        return fix.blames(file, made.lineno, why)
    return None


def spelled(weight: torch.Tensor | None) -> bool:
    """Whether a weight's place was written out where it was put there (`.cuda()`, "cuda:0"), not taken from a name."""
    spans = origin.spans_of(weight) if weight is not None else (None, None)
    span = spans[1] or spans[0]
    node = source.node_at(*span) if span is not None else None
    calls = [n for n in ast.walk(node or ast.Pass()) if source.is_move(n)]
    given = [g for call in calls for g in (*call.args, *(k.value for k in call.keywords))]
    return bool(calls) and all(isinstance(g, ast.Constant) for g in given)


def bindings(scene: Scene, root: nn.Module) -> Iterator[tuple[str, ast.stmt, str]]:
    """The statements that gave the program's variables and attributes a module, the outermost frame last."""
    loops: list[tuple[str, ast.stmt, str]] = []
    for frame in scene.frames:
        file, line = frame.f_code.co_filename, frame.f_lineno
        name = next((k for k, v in frame.f_locals.items() if v is root and k != "self"), None)
        if name is None:
            continue
        made = source.last_assignment(file, line, name)
        if made is not None and name not in source.parameters(file, line):
            if hasattr(made, "body"):
                loops.append((file, made, name))  # a loop over them: what it runs over says more
            else:
                yield file, made, name
    # A generator expression stands on the line of the function that runs it.
    inner = [f.f_back for f in scene.frames if f.f_code.co_name == "<genexpr>" and f.f_back is not None]
    for frame in (*scene.frames, *inner):
        file, line = frame.f_code.co_filename, frame.f_lineno
        for name, key in holders.contained(root, frame):
            made = source.last_assignment(file, line, name)
            if made is not None and name not in source.parameters(file, line):
                yield file, made, name + key
    for found in holders.kept_in(lambda value: value is root, scene.frames):
        yield from _attribute_binding(scene, found)
    yield from loops


def _attribute_binding(scene: Scene, found: holders.Kept) -> Iterator[tuple[str, ast.stmt, str]]:
    """The line of a class that sets an attribute; of a helper that keeps a copy, the line that makes the helper."""
    owner, name = found.owner, found.name
    outer = next(holders.kept_in(lambda value: value is found.owner, scene.frames), None)
    if outer is not None:
        owner, name = outer.owner, outer.name
    named = holders.source_of(owner)
    line = (
        source.attribute_assignment(*named, name) or source.hidden_assignment(*named, name) if named else None
    )
    statement = source.statement(named[0], line) if named and line else None
    if named and statement is not None:
        text = f"self.{name}" if owner is found.owner else f"self.{name}.{found.name}"
        yield named[0], statement, text + found.key


def _copied_before(scene: Scene, stray: Suspect, file: str, made: ast.stmt, name: str) -> Verdict | None:
    """A copy of a model's weights (an average, a teacher) that was taken before the model moved."""
    value = getattr(made, "value", None)
    if value is None:
        return None
    move = later_move(file, made, value)
    if move is None:
        return None
    moved = _moved_by(move)
    why = f"{name} is made here from {moved}, before {moved} is moved (line {move.lineno}): it stays on {stray.device}"
    return swapped(file, made, move, why)


def swapped(file: str, made: ast.stmt, move: ast.stmt, why: str) -> Verdict:
    """The move of a model, put before the statement that was made too early."""
    code = ast.unparse(move)
    text = f"move the model first: put {code} before line {made.lineno}"
    edits = []
    if _can_go_before(file, move, made):
        edits = [rewrite.before(file, made, code), rewrite.without(file, move)]
    elif _can_go_after(file, made, move):
        text = f"move the model first: put line {made.lineno} after line {move.lineno}, {code}"
        edits = [rewrite.without(file, made), rewrite.after(file, move, ast.unparse(made))]
    return Verdict(source.cause(file, made.lineno, why), text, edits=edits)


def _can_go_after(file: str, made: ast.stmt, move: ast.stmt) -> bool:
    """Whether nothing between two statements of one block reads what the first binds."""
    if next(source.above(file, move), None) is not next(source.above(file, made), None):
        return False
    if not isinstance(made, ast.Assign) or hasattr(made, "body"):
        return False
    targets = {ast.unparse(t) for t in made.targets}
    return not any(
        isinstance(n, ast.Name | ast.Attribute)
        and ast.unparse(n) in targets
        and made.lineno < n.lineno <= (move.end_lineno or move.lineno)
        for n in ast.walk(source.scope_at(file, made.lineno))
    )


def _can_go_before(file: str, move: ast.stmt, made: ast.stmt) -> bool:
    """Whether both stand in one block and what the move needs is there before the other statement."""
    from trimtab.diagnose import scope

    if next(source.above(file, move), None) is not next(source.above(file, made), None):
        return False
    names = source.names_in(move) - source.bound(move)
    statements = source.own_statements(source.scope_at(file, made.lineno))
    between = [n for n in statements if made.lineno <= n.lineno < move.lineno]
    changed = {b for n in between for b in source.bound(n)}
    changed |= {ast.unparse(t) for n in between if isinstance(n, ast.Assign) for t in n.targets}
    attributes = {ast.unparse(n) for n in ast.walk(move) if isinstance(n, ast.Attribute)}
    known = all(scope.is_bound(file, made.lineno, name) for name in names)
    return known and not (names | attributes) & changed


def later_move(file: str, made: ast.stmt, value: ast.expr) -> ast.stmt | None:
    """The statement of the same scope, after `made`, that moves a model which `value` was made from."""
    given = {
        ast.unparse(n)
        for n in ast.walk(value)
        if isinstance(n, ast.Name | ast.Attribute) and not isinstance(n.ctx, ast.Store)
    }
    for statement in source.own_statements(source.scope_at(file, made.lineno)):
        if statement.lineno > made.lineno and _moved_by(statement) in given:
            return statement
    return None


def _moved_by(statement: ast.stmt) -> str:
    """What `model.to(device)` or `model = model.to(device)` moves, as written; empty for another statement."""
    value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    moved = ast.unparse(value.func.value) if value.func.attr in ("to", "cuda") else ""
    if isinstance(statement, ast.Assign) and [ast.unparse(t) for t in statement.targets] != [moved]:
        return ""
    return moved


def copied_before_move(scene: Scene, stray: Suspect) -> Verdict | None:
    """Tensors that were copied or shaped after a model's weights before the model moved."""
    if stray.is_parameter or stray.moved is not None or (born := stray.born) is None or stray.device != "cpu":
        return None
    for file, made in _makers(scene, stray, born):
        value = getattr(made, "value", None)
        if value is None or (move := later_move(file, made, value)) is None:
            continue
        if not _is_module(scene, _moved_by(move)):
            continue
        why = f"this is made after the model's weights, before the model is moved in line {move.lineno}"
        return swapped(file, made, move, why)
    return None


def _makers(scene: Scene, stray: Suspect, born: Origin) -> Iterator[tuple[str, ast.stmt]]:
    """The line that made a tensor, and the lines that made the object which keeps it."""
    statement = source.statement(born.file, born.line)
    if isinstance(statement, ast.Assign):
        yield born.file, statement
    for sight in scene.sights(stray):
        if sight.made is not None and not hasattr(sight.made, "body"):
            yield sight.file, sight.made
    for found in scene.keepers(stray):
        for frame in scene.frames:
            name = next((k for k, v in frame.f_locals.items() if v is found.owner and k != "self"), None)
            file, line = frame.f_code.co_filename, frame.f_lineno
            made = source.last_assignment(file, line, name) if name else None
            if made is not None:
                yield file, made
        yield from ((file, made) for file, made, _ in _attribute_binding(scene, found))


def _is_module(scene: Scene, text: str) -> bool:
    """Whether some running function knows a module by this name; a name that none knows is taken at its word."""
    node = ast.parse(text, mode="eval").body
    found = [v for frame in scene.frames if (v := holders.value_of(node, frame)) is not None]
    return not found or any(isinstance(v, nn.Module) for v in found)
