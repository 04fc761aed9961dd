"""Rules about who keeps a stray tensor: a plain attribute of a module, an object of the program, a cached table."""

from __future__ import annotations

import ast

import torch
from torch import nn

from trimtab.diagnose import holders, mend, owners, rewrite, source
from trimtab.diagnose.rules_common import Verdict, met
from trimtab.diagnose.scene import Scene, Suspect


def unregistered(scene: Scene, stray: Suspect) -> Verdict | None:
    """A tensor in a plain attribute, or a layer in a plain list: module.to() does not reach it."""
    plain = [a for a in stray.attributes if not a.registered]
    for attribute in [a for a in stray.attributes if a.registered]:
        # What holds the outermost module holds it unregistered.
        plain += owners.holders_of(owners.outermost(attribute.module, scene.modules), scene.modules)
    for attribute in plain:
        named = holders.source_of(attribute.module)
        if named is None or not source.is_user_file(named[0]):
            continue
        born = stray.born.line if stray.born is not None and stray.born.file == named[0] else 0
        line = source.attribute_assignment(*named, attribute.name, born)
        if line is None:
            continue
        file, class_name = named
        function = source.function_at(file, line)
        if function is not None and function.name != "__init__":
            return _set_later(scene, stray, file, line, f"self.{attribute.name}", attribute.container)
        layers = any(a.registered for a in stray.attributes) and bool(attribute.container)
        return _registration(scene, stray, attribute, class_name, layers, file, line)
    return None


def _registration(
    scene: Scene,
    stray: Suspect,
    attribute: owners.Attribute,
    class_name: str,
    layers: bool,
    file: str,
    line: int,
) -> Verdict:
    """What `__init__` sets as a plain attribute becomes part of the module."""
    name, kept = f"self.{attribute.name}", getattr(attribute.module, attribute.name, None)
    statement = source.statement(file, line)
    value = _only_value(statement)
    if layers:
        kind = "ModuleDict" if attribute.container == "dict" else "ModuleList"
        why = f"{class_name} keeps layers in a plain {attribute.container}: they are neither moved nor trained with it"
    elif attribute.container and _all_parameters(kept):
        kind = "ParameterDict" if attribute.container == "dict" else "ParameterList"
        why = f"{class_name} keeps parameters in a plain {attribute.container}: they are neither moved nor trained"
    elif attribute.container:
        why = f"{name} is a plain {attribute.container} of tensors: {class_name}.to(device) does not move what is in it"
        fix = mend.at_use(scene, stray)
        one = f'self.register_buffer(f"{attribute.name}_{{i}}", tensor, persistent=False)'
        text = f"register each of them as a buffer of its own: {one}"
        if fix is not None and (stored := _stored_later(file, class_name, attribute.name)):
            why = f"{name} keeps what was made for the device of one call ({stray.device}), and {met(scene, stray)}"
            return fix.blames(file, stored, why, "unmoved-state")
        if fix is not None:
            text = f"{fix.text}; or {text}"
        return Verdict(source.cause(file, line, why), text, "unmoved-state", fix.edits if fix else [])
    elif isinstance(kept, nn.Module):
        why = f"{name} is kept past the module's own table: {class_name}.to(device) does not move it"
        fix = mend.module_moved(scene, stray, file, statement, name) if statement is not None else None
        text = fix.text if fix else f"register it: {name} = …"
        return Verdict(source.cause(file, line, why), text, "unmoved-state", fix.edits if fix else [])
    else:
        why = f"{name} is a plain attribute, no registered buffer: {class_name}.to(device) does not move it"
        code = ast.unparse(value) if value is not None else "..."
        text = f'self.register_buffer("{attribute.name}", {code}, persistent=False)'
        known = statement is not None and value is not None
        edits = [rewrite.in_place_of(file, statement, text)] if known and statement is not None else []
        return Verdict(source.cause(file, line, why), text, "unmoved-state", edits)
    code = ast.unparse(value) if value is not None else "..."
    text = f"{name} = nn.{kind}({code})"
    known = value is not None and _knows_nn(file)
    edits = [rewrite.in_place_of(file, value, f"nn.{kind}({code})")] if known and value is not None else []
    return Verdict(source.cause(file, line, why), text, "unmoved-state", edits)


def _stored_later(file: str, class_name: str, attribute: str) -> int | None:
    """The line outside the constructor that puts an entry into a container which an object keeps."""
    for node in (n for owner in source.classes(file, class_name) for n in ast.walk(owner)):
        kept = isinstance(node, ast.Subscript) and ast.unparse(node.value) == f"self.{attribute}"
        if not isinstance(node, ast.Subscript) or not kept or not isinstance(node.ctx, ast.Store):
            continue
        method = source.function_at(file, node.lineno)
        if method is not None and method.name != "__init__":
            return node.lineno
    return None


def _only_value(statement: ast.stmt | None) -> ast.expr | None:
    """What `self.x = …` alone sets."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.value if isinstance(statement.targets[0], ast.Attribute) else None
    return statement.value if isinstance(statement, ast.AnnAssign) else None


def _all_parameters(kept: object) -> bool:
    entries = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list | tuple) else ()
    return bool(entries) and all(isinstance(entry, nn.Parameter) for entry in entries)


def _knows_nn(file: str) -> bool:
    imports = [n for n in source.walk(file) if isinstance(n, ast.Import | ast.ImportFrom)]
    return any((a.asname or a.name) == "nn" for n in imports for a in n.names)


def partly_moved(scene: Scene, stray: Suspect) -> Verdict | None:
    """An object of the program's own, of which a method moves some tensors and passes this one by."""
    if stray.is_parameter:
        return None
    home = mend.wanted(scene, stray)
    for found in scene.keepers(stray):
        named = holders.source_of(found.owner)
        move = _own_mover(*named, found.name) if named and not found.container else None
        if named is None or move is None:
            continue
        others = [vars(found.owner).get(name) for name in source.self_targets(move)]
        if not any(isinstance(o, torch.Tensor) and str(o.device) == home for o in others):
            continue
        text = ast.unparse(move).replace(ast.unparse(move.targets[0]), f"self.{found.name}")
        why = f"here the tensors of this {named[1]} are moved and {found.name} is not"
        edits = [rewrite.after(named[0], move, text)]
        return Verdict(source.cause(named[0], move.lineno, why), f"move it too: {text}", edits=edits)
    return None


def _own_mover(file: str, class_name: str, attribute: str) -> ast.Assign | None:
    """The last statement `self.a = self.a.to(d)` of the method that moves a class's tensors but for one."""
    inside = [m for owner in source.classes(file, class_name) for m in owner.body]
    for method in (m for m in inside if isinstance(m, source.Function)):
        moves = [s for s in source.moved_in_place(method) if source.self_targets(s)]
        if moves and not any(attribute in source.self_targets(n) for n in ast.walk(method)):
            return moves[-1]
    return None


def kept(scene: Scene, stray: Suspect) -> Verdict | None:
    """An object of the program's own (a metric, a buffer of experience, a table of noise levels) keeps the tensor."""
    if stray.is_parameter or _came_as_argument(scene, stray):
        return None
    for found in scene.keepers(stray):
        named = holders.source_of(found.owner)
        born = stray.born.line if stray.born is not None and named and stray.born.file == named[0] else 0
        line = source.attribute_assignment(*named, found.name, born) if named else None
        if named is None or line is None or isinstance(found.owner, nn.Module):
            continue
        return _set_later(scene, stray, named[0], line, f"self.{found.name}", found.container)
    return None


def _came_as_argument(scene: Scene, stray: Suspect) -> bool:
    """Whether it lies in a batch: an object that was made anew for this call is no keeper."""
    for sight in scene.sights(stray):
        owner = sight.frame.f_locals.get(sight.root)
        if sight.name != sight.root and sight.root != "self" and isinstance(owner, dict | list | tuple):
            return True
    return False


def _set_later(scene: Scene, stray: Suspect, file: str, line: int, name: str, kind: str) -> Verdict:
    """The line that set an attribute to a tensor on this device; a guard around it, where it is set once for all."""
    guard = _guard(file, line, name)
    if guard is not None and stray.device != "cpu" and (fix := _rebuilt(scene, stray, file, guard, name)):
        why = f"{name} is built once, for the device of the first caller ({stray.device}), and {met(scene, stray)}"
        return Verdict(source.cause(file, guard.lineno, why), fix.text, "unmoved-state", fix.edits)
    why = f"{name} is set here on {stray.device}, and {met(scene, stray)}"
    value = _only_value(source.statement(file, line))
    fix = _each_moved(scene, stray, file, line, kind) if kind else None
    fix = fix or mend.best(scene, stray, file, line, bound=value is not None and not kind)
    return fix.blames(file, line, why, "unmoved-state" if stray.attributes else "")


def _each_moved(scene: Scene, stray: Suspect, file: str, line: int, kind: str) -> mend.Mend | None:
    """A dict or list of tensors that an attribute is set to, each of them moved."""
    statement = source.statement(file, line)
    value, device = _only_value(statement), mend.device_at(scene, stray, file, line)
    if statement is None or value is None or device is None or rewrite.has_factory(value):
        return None
    code = rewrite.operand(value)
    text = f"[t.to({device}) for t in {code}]"
    if kind == "dict":
        text = f"{{k: v.to({device}) for k, v in {code}.items()}}"
    return mend.Mend.by("move what is in it", rewrite.in_place_of(file, value, text))


def _guard(file: str, line: int, name: str) -> ast.If | None:
    """The condition under which a cached attribute is built."""
    statement = source.statement(file, line)
    for node in source.above(file, statement) if statement is not None else ():
        if isinstance(node, source.Function):
            return None
        if isinstance(node, ast.If) and name in ast.unparse(node.test):
            return node
    return None


def _rebuilt(scene: Scene, stray: Suspect, file: str, guard: ast.If, name: str) -> mend.Mend | None:
    """The table is built again when it is asked for on another device."""
    asked = [
        ast.unparse(n)
        for n in ast.walk(guard)
        if isinstance(n, ast.Attribute) and n.attr == "device" and source.root(n) not in ("self", "")
    ]
    asked += [
        f"{p}.device" for p in source.parameters(file, guard.lineno) if p in ("x", "q", "hidden_states")
    ]
    if not asked:
        return None
    test = ast.unparse(guard.test)
    both = isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.And)
    text = f"{f'({test})' if both else test} or {name}.device != {asked[0]}"
    edits = [rewrite.in_place_of(file, guard.test, text)]
    return mend.Mend(f"build it again for another device: if {text}:", edits)
