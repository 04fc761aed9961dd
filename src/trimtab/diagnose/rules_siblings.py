"""Rules about what was moved beside a stray tensor: a mover that passes it by, one of several that came together."""

from __future__ import annotations

import ast

from trimtab.diagnose import mend, rewrite, source
from trimtab.diagnose.rewrite import assigned
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.rules_likely import moved_whole
from trimtab.diagnose.scene import Scene, Sight, Suspect


def mover(scene: Scene, stray: Suspect) -> Verdict | None:
    """The batch went through a function or comprehension that moves tensors, and it passed this one by."""
    for sight in scene.sights(stray):
        made = sight.made
        value = source.value_for(made, sight.root) if made is not None else None
        if made is None or value is None or sight.name == sight.root or stray.is_parameter:
            continue
        if stray.device != "cpu":
            continue  # something moved it
        called = [source.called_name(n) for n in ast.walk(value) if isinstance(n, ast.Call)]
        line = next((found for name in called if (found := _move_in(sight.file, name))), None)
        line = line or (made.lineno if source.has_move(value) else None)
        if line is not None:
            if (beside := _as_the_others(sight, line)) is not None:
                after, fix = beside
                why = f"here the parts of {sight.root} are moved one by one, and {sight.name} is not"
                return fix.blames(sight.file, after, why)
            why = f"this moves the batch and passes {sight.name} by: it is nested, or kept aside"
            return _passed_by(sight, line).blames(sight.file, line, why)
    return None


def _passed_by(sight: Sight, line: int) -> mend.Mend:
    """The entry that a moving line names and does not move, moved as the others are."""
    entry = sight.name.rpartition(".")[2]
    statement = source.statement(sight.file, line)
    device = assigned(sight.file, line)
    whole = statement is None or hasattr(statement, "body") or not entry.isidentifier()
    if device is not None and statement is not None and not whole:
        reads = [n for n in ast.walk(statement) if isinstance(n, ast.Attribute) and n.attr == entry]
        reads = [n for n in reads if isinstance(n.ctx, ast.Load)]
        bare = [n for n in reads if not isinstance(next(source.above(sight.file, n)), ast.Attribute)]
        if len(bare) == 1:
            return mend.brought("move it too", sight.file, bare[0], device)
    if fix := _into_nested(sight, statement):
        return fix
    text = "move recursively: also the tensors inside dicts, lists and tuples of the batch"
    return mend.Mend(text, [])


def _as_the_others(sight: Sight, line: int) -> tuple[int, mend.Mend] | None:
    """Where a function moves the entries of an object or dict one by one: its last move, and one more line after it."""
    moves = source.moved_in_place(source.scope_at(sight.file, line))
    last = next((m for m in moves[::-1] if isinstance(m.targets[0], ast.Attribute | ast.Subscript)), None)
    target = last.targets[0] if last is not None else None
    if last is None or not isinstance(target, ast.Attribute | ast.Subscript):
        return None
    entry = sight.name.removeprefix(sight.root)
    if entry.count(".") + entry.count("[") != 1 or entry[0] != (".", "[")[isinstance(target, ast.Subscript)]:
        return None
    text = ast.unparse(last).replace(ast.unparse(target), ast.unparse(target.value) + entry)
    said = f"move it too, after line {last.lineno}: {text}"
    return last.lineno, mend.Mend(said, [rewrite.after(sight.file, last, text)])


def _into_nested(sight: Sight, statement: ast.stmt | None) -> mend.Mend | None:
    """What a mover passes on as no tensor, moved inside: a dict by the mover itself, a list entry by entry."""
    passed = _passed_on(statement)
    container = sight.frame.f_locals.get(sight.root)
    held = list(container.values()) if isinstance(container, dict) else []
    mover_ = source.function_at(sight.file, statement.lineno) if statement is not None else None
    if passed is None or statement is None or "][" not in sight.name:
        return None
    names = [a.arg for a in mover_.args.args] if mover_ is not None else []
    moves = [n for n in ast.walk(mover_ or statement) if source.is_move(n) and n.args]
    if mover_ is not None and names[:1] not in ([], ["self"]) and any(isinstance(v, dict) for v in held):
        text = f"{mover_.name}({', '.join([passed.id, *names[1:]])}) if isinstance({passed.id}, dict) else {passed.id}"
    elif moves and any(isinstance(v, list | tuple) for v in held):
        device, item = ast.unparse(moves[0].args[0]), "t" if passed.id != "t" else "item"
        inner = f"[{item}.to({device}) if torch.is_tensor({item}) else {item} for {item} in {passed.id}]"
        text = f"{inner} if isinstance({passed.id}, (list, tuple)) else {passed.id}"
        text = text if isinstance(statement, ast.Return) or mover_ is not None else f"({text})"
    else:
        return None
    return mend.Mend.by("move what is nested too", rewrite.in_place_of(sight.file, passed, text))


def _passed_on(statement: ast.stmt | None) -> ast.Name | None:
    """The name that a statement gives on as it is: `out[k] = v`, `{k: v.to(d) if is_tensor(v) else v for …}`."""
    value = statement.value if isinstance(statement, ast.Assign | ast.Return) else None
    if isinstance(value, ast.Name):
        return value
    choices = [n.orelse for n in ast.walk(value or ast.Pass()) if isinstance(n, ast.IfExp)]
    return choices[0] if len(choices) == 1 and isinstance(choices[0], ast.Name) else None


def sibling(scene: Scene, stray: Suspect) -> Verdict | None:
    """One of several things that came together was moved, this one was not."""
    for sight in scene.sights(stray):
        inline, entry = sight.frame is not scene.frames[0], sight.name != sight.root
        line = _sibling_move(sight.file, sight.line, sight.root, inline, entry)
        if line is not None:
            why = f"here its siblings are moved and {sight.name} is not"
            fix = _with_its_siblings(scene, stray, sight, line)
            return fix.blames(sight.file, line, why)
    return None


def _with_its_siblings(scene: Scene, stray: Suspect, sight: Sight, line: int) -> mend.Mend:
    """Moved beside the one that is: in the same call, or after the line that does so, with the words that it uses."""
    device = assigned(sight.file, line) or mend.device_at(scene, stray, sight.file, line)
    statement = source.statement(sight.file, line)
    if device is None or statement is None:
        return mend.at_use(scene, stray) or mend.sentence(scene, stray, line)
    given = [
        a for call in source.call_on(sight.file, line) for a in call.args if ast.unparse(a) == sight.name
    ]
    if line == sight.line and given:
        return mend.brought("move it too", sight.file, given[0], device)
    text = f"{sight.name} = {sight.name}.to({device})"
    apart = isinstance(statement, ast.Assign) and (
        source.root(statement.targets[0]) == sight.root or _moves_out_of(statement, sight.root)
    )
    if sight.made is not None and (sight.name == sight.root or not apart):
        # With all that came together and stayed there.
        text = moved_whole(sight, sight.made, sight.root, device, stray.device) or text
    edits = [] if hasattr(statement, "body") else [rewrite.after(sight.file, statement, text)]
    return mend.Mend(f"move it too: {text}", edits)


def _sibling_move(file: str, line: int, name: str, inline: bool = False, entry: bool = False) -> int | None:
    """The line before `line` that moved what was bound together with `name`: where its own move is missing.

    Bound together: in one tuple (`x, y = …`, `for x, y in loader`), as parameters of one function, or as entries of one
    dict (`name` is then the dict, of which some entries were moved one by one). With `inline`, a sibling that is moved
    in the arguments of the call on `line` itself counts too; with `entry`, where it is known that `name` is a dict or
    object whose own entry is looked for, a statement that moves what it takes out of `name`, wherever it puts it.
    """
    binding = source.last_assignment(file, line, name)
    together = source.bound(binding) if binding is not None else set(source.parameters(file, line))
    since = binding.lineno if binding is not None else 0
    found: int | None = None
    for node in source.own_statements(source.scope_at(file, line)):
        if not since < node.lineno < line:
            continue
        if entry and _moves_out_of(node, name):
            found = node.lineno
        if not isinstance(node, ast.Assign) or not source.has_move(node.value):
            continue
        targets = source.bound(node)
        one = any(isinstance(t, ast.Subscript) and source.root(t) == name for t in node.targets)
        if one or (name not in targets and targets & together and len(together) > 1):
            found = node.lineno
    if found is None and inline and len(together) > 1:
        for call in source.call_on(file, line):
            for argument in (*call.args, *(k.value for k in call.keywords)):
                if source.root(argument) in together - {name} and source.has_move(argument):
                    found = line
    return found


def _moves_out_of(node: ast.stmt, name: str) -> bool:
    """Whether a statement moves entries of a container: `{k: batch[k].to(d) for k in KEYS}`, `f(batch.ids.to(d))`."""
    value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
    if value is None:
        return False
    if any(source.is_move(n) and n is not value and source.root(n.func) == name for n in ast.walk(value)):
        return True
    loops = [g for n in ast.walk(value) for g in getattr(n, "generators", ())]
    return source.has_move(value) and any(source.root(g.iter) == name for g in loops)


def _move_in(file: str, function: str) -> int | None:
    """The first line of a function of this file that moves something; the condition, if only some things are moved."""
    for node in source.walk(file):
        if not isinstance(node, source.Function) or node.name != function or not source.has_move(node):
            continue
        for choice in ast.walk(node):
            if not isinstance(choice, ast.If) or not any(source.has_move(s) for s in choice.body):
                continue
            if not _is_type_test(choice.test):
                return choice.lineno
            passed = choice.orelse[-1] if choice.orelse else None
            if isinstance(passed, ast.Assign | ast.Return) and isinstance(passed.value, ast.Name):
                return passed.lineno
        return min(n.lineno for n in ast.walk(node) if source.is_move(n))
    return None


def _is_type_test(node: ast.expr) -> bool:
    names = ("isinstance", "is_tensor", "hasattr")
    return any(isinstance(n, ast.Call) and source.called_name(n) in names for n in ast.walk(node))
