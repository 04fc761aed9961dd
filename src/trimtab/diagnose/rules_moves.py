"""Rules about the last move of a tensor: made to the wrong place, or never undone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trimtab.diagnose import devices, holders, mend, owners, rewrite, rules_modules, scope, source, trace
from trimtab.diagnose.rules_common import Verdict, met
from trimtab.diagnose.scene import Scene, Suspect
from trimtab.virtual import origin


def moved_away(scene: Scene, stray: Suspect) -> Verdict | None:
    """The last deed took the tensor from where its partner is: `.cpu()`, `p.data = …`, `part.to("cpu")`."""
    held = stray.held
    if held is None or scene.partner(stray) is None:
        return None
    if stray.moved is None:
        return _copied_to_host(scene, stray)
    registered = stray.registered
    if stray.device != "cpu" and registered is None:
        return None
    moved = stray.moved
    statement = source.statement(moved.file, moved.line)
    if statement is None:
        return None
    if registered is not None:
        return _weight_moved_away(scene, stray, registered, statement)
    call = stray.moved_by[1] if stray.moved_by is not None else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    if not source.goes_to_host(call):
        return None
    why = f"this brings it to {stray.device}, and {met(scene, stray)}"
    name = next(iter(source.bound(statement)), "")
    fix = mend.at_use(scene, stray)
    if fix is None or not name or not _read_by_host(moved.file, statement, name):
        kept = rewrite.in_place_of(moved.file, call, ast.unparse(call.func.value))
        fix = mend.Mend.by("leave it where it is", kept)
    return Verdict(source.cause(moved.file, call.lineno, why), fix.text, edits=fix.edits)


def _copied_to_host(scene: Scene, stray: Suspect) -> Verdict | None:
    """What was made by an expression that goes over the host: `p.detach().cpu().clone()`."""
    if stray.device != "cpu" or stray.is_parameter or stray.held is None or stray.born is None:
        return None
    file, node = stray.made_by or ("", None)
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if source.goes_to_host(node):
            kept = rewrite.in_place_of(file, node, rewrite.text_of(file, node.func.value))
            why = f"this brings it to {stray.device}, and {met(scene, stray)}"
            return mend.Mend.by("leave it where it is", kept).blames(file, node.lineno, why)
        node = node.func.value
    return None


def _read_by_host(file: str, statement: ast.stmt, name: str) -> bool:
    """Whether what a statement binds is read a second time afterwards, by something else than torch's arithmetic."""
    reads = [
        n
        for n in ast.walk(source.scope_at(file, statement.lineno))
        if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
    ]
    later = [n for n in reads if n.lineno > statement.lineno]
    return len(later) > 1 and not all(_is_arithmetic(file, n) for n in later)


def _is_arithmetic(file: str, node: ast.Name) -> bool:
    """Whether a name is only computed with, by torch: `torch.cat([a, x])`, `(x == 2).all()`; a number is no tensor."""
    for outer in source.above(file, node):
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.Assign | ast.AugAssign | ast.If)
        if isinstance(outer, ast.Call):
            method = isinstance(outer.func, ast.Attribute) and node in ast.walk(outer.func.value)
            own = method and source.called_name(outer) not in ("numpy", "tolist")
            if not own and not ast.unparse(outer.func).startswith(("torch.", "F.")):
                return False
        if isinstance(outer, ast.Subscript) and node not in ast.walk(outer.value):
            return False
    return False


def _weight_moved_away(
    scene: Scene, stray: Suspect, attribute: owners.Attribute, statement: ast.stmt
) -> Verdict | None:
    """A parameter or buffer that one line moved by itself, away from the rest of its model."""
    home = mend.wanted(scene, stray)
    rest = owners.outermost(attribute.module, scene.modules)
    others = [p for p in rest.parameters() if str(p.device) == home]
    assert stray.moved is not None
    file, line = stray.moved.file, stray.moved.line
    if not others or stray.held is None or origin.moved_when(others[0]) > origin.moved_when(stray.held):
        return None
    if stray.device != "cpu" and not rules_modules.spelled(stray.held):
        return None  # a model that is split on purpose
    path = ".".join(filter(None, (owners.path_of(attribute.module, scene.modules), attribute.name)))
    why = f"this puts {path} on {stray.device}, away from the rest of its model on {home}"
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(target, ast.Attribute) and target.attr == "data" and isinstance(statement, ast.Assign):
        owner = ast.unparse(target.value)
        if not source.has_move_of(statement.value, f"{owner}.data"):
            fix = mend.brought("bring it to its place", file, statement.value, f"{owner}.device")
            return fix.blames(file, line, why)
    fix = mend.other_goal(scene, stray) or _brought_back(scene, stray, attribute)
    return fix.blames(file, line, why)


def _brought_back(scene: Scene, stray: Suspect, attribute: owners.Attribute) -> mend.Mend:
    """The module is moved back before the line that uses it."""
    for frame in scene.frames:
        file, line = frame.f_code.co_filename, frame.f_lineno
        name = holders.expression_for(attribute.module, frame)
        statement = source.statement(file, line)
        device = devices.device_at(scene.frames, file, line, mend.wanted(scene, stray), scene.several)
        if name and device and statement is not None:
            text = f"{name}.to({device})"
            said = f"bring it back before it is used (line {line}): {text}"
            return mend.Mend(said, [rewrite.before(file, statement, text)])
    return mend.Mend(f'bring it back before it is used: .to("{mend.wanted(scene, stray)}")', [])


def loaded(scene: Scene, stray: Suspect) -> Verdict | None:
    """A checkpoint that comes back on the device it was saved from."""
    places = [(stray.born.file, stray.born.line)] if stray.born is not None else []
    for sight in scene.sights(stray):
        made = (sight.made, source.last_assignment(sight.file, sight.line, sight.taken_from))
        places += [(sight.file, statement.lineno) for statement in made if statement is not None]
    for file, line in places:
        for call in _loads(file, line):
            line = call.lineno
            why = f"the checkpoint comes back on the device it was saved from ({stray.device})"
            device = mend.device_at(scene, stray, file, line) or f'"{mend.wanted(scene, stray)}"'
            text = rewrite.with_keyword(file, call, "map_location", device)
            edits = [rewrite.in_place_of(file, call, text)]
            return Verdict(source.cause(file, line, why), text, "map-location", edits)
    return None


def _loads(file: str, line: int) -> Iterator[ast.Call]:
    """The calls of torch.load without a device, on a line or in the function of this file which the line calls."""
    called = list(source.call_on(file, line))
    names = {source.called_name(call) for call in called}
    inside = [n for n in source.walk(file) if isinstance(n, source.Function) and n.name in names]
    calls = [*called, *(n for function in inside for n in ast.walk(function) if isinstance(n, ast.Call))]
    for call in calls:
        if ast.unparse(call.func) == "torch.load" and source.keyword(call, "map_location") is None:
            yield call


def wrong_gpu(scene: Scene, stray: Suspect) -> Verdict | None:
    """Moved on purpose, to another GPU than its partner: by a number, or by `.cuda()`, which takes the present one."""
    partner = scene.partner(stray)
    if partner is None or stray.device == "cpu" or partner.device == "cpu" or stray.tensor is None:
        return None
    ours, theirs = mend.move_call(stray), mend.move_call(partner)
    if ours is None:
        return None
    if theirs is not None and _without_number(ours[1]) and _without_number(theirs[1]):
        return _present_device_changed(scene, stray, ours, theirs)
    file, call = ours
    device = mend.device_at(scene, stray, file, call.lineno)
    why = f"this moves it to {stray.device}, and {met(scene, stray)}"
    if device is None or not isinstance(call.func, ast.Attribute):
        fix = _setting(scene, stray, file, call) or mend.at_use(scene, stray)
        fix = fix or mend.sentence(scene, stray, call.lineno)
        return fix.blames(file, call.lineno, why)
    edit = mend.to_device(file, call, device)
    return mend.Mend.by("move it there", edit).blames(file, call.lineno, why)


def _setting(scene: Scene, stray: Suspect, file: str, call: ast.Call) -> mend.Mend | None:
    """The setting that a move obeys, where it is spelled out: `{"device": "cuda"}`, with the GPU of the partner."""
    if not call.args or isinstance(call.args[0], ast.Constant):
        return None
    place, node = trace.decided(file, call.lineno, call.args[0])
    home, inner = mend.wanted(scene, stray), node
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device" and len(node.args) == 1:
        inner = node.args[0]
    if not isinstance(inner, ast.Constant) or not devices.means(inner.value, stray.device):
        return None
    text = f'"{home}"' if isinstance(inner.value, str) else home.removeprefix("cuda:")
    if isinstance(inner.value, str) and (number := _number(scene, stray, place.file, place.line)):
        text = f'f"cuda:{{{number}}}"'
    edit = rewrite.in_place_of(place.file, inner, text)
    return mend.Mend.by(f"name the GPU of its partner in the setting (line {place.line})", edit)


def _number(scene: Scene, stray: Suspect, file: str, line: int) -> str | None:
    """The number of a GPU by which the partner was moved, as the program writes it, if a line knows it too."""
    partner = scene.partner(stray)
    theirs = mend.move_call(partner) if partner is not None else None
    given = theirs[1].args[0] if theirs is not None and theirs[1].args else None
    if theirs is None or not isinstance(given, ast.Name | ast.Attribute) or theirs[0] != file:
        return None
    known = scope.is_bound(file, line, source.root(given)) and source.called_name(theirs[1]) == "cuda"
    same = source.function_at(file, line) is source.function_at(file, theirs[1].lineno)
    return ast.unparse(given) if known and same else None


def _without_number(call: ast.Call) -> bool:
    given = [*call.args, *(k.value for k in call.keywords if k.arg == "device")]
    return all(isinstance(g, ast.Constant) and g.value == "cuda" for g in given)


def _present_device_changed(
    scene: Scene, stray: Suspect, ours: tuple[str, ast.Call], theirs: tuple[str, ast.Call]
) -> Verdict | None:
    """Two moves to "the" GPU went to different ones: torch.cuda.set_device was called in between."""
    file, first = theirs
    early = source.statement_of(file, first)
    function = source.function_at(file, first.lineno)
    setters = {"set_device"} | {
        f.name
        for f in source.walk(file)
        if isinstance(f, source.Function)
        and any(isinstance(n, ast.Call) and source.called_name(n) == "set_device" for n in ast.walk(f))
    }
    for call in source.calls(file, *setters):
        inside = source.function_at(file, call.lineno) is function
        if not inside or call.lineno <= first.lineno or early is None:
            continue
        late = source.statement(file, call.lineno)
        why = (
            f"the present GPU changes here, after line {first.lineno} has used it: what moves to cuda without a number "
            f"goes to {stray.device} from now on, and the weights are on {mend.wanted(scene, stray)}"
        )
        text = f"choose the GPU first: {ast.unparse(call)} before line {first.lineno}"
        edits = []
        if isinstance(late, ast.Expr) and late.value is call:
            edits = [rewrite.without(file, late), rewrite.before(file, early, ast.unparse(call))]
        return Verdict(source.cause(file, call.lineno, why), text, edits=edits)
    return None
