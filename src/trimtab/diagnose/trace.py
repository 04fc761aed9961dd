"""Where a value was decided: from an expression back through names, parameters, attributes and settings.

Reads source only, as far as it is certain: a function that is called from several places ends the way. Runs nothing.
"""

from __future__ import annotations

import ast

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place

_STEPS = 8


def decided(file: str, line: int, node: ast.expr) -> tuple[Place, ast.expr]:
    """The place where the value of an expression on a line was decided, and the expression that stands there."""
    place = source.place(file, node.lineno)
    for _ in range(_STEPS):
        if (found := _one_step(file, line, node)) is None:
            break
        line, node = found
        place = source.place(file, line)
    return place, node


def _one_step(file: str, line: int, node: ast.expr) -> tuple[int, ast.expr] | None:
    match node:
        case ast.Name():
            return _name(file, line, node.id)
        case ast.Attribute(value=ast.Name(id="self")):
            return _own_attribute(file, line, node.attr)
        case ast.Attribute():
            return _field(file, node.attr)
        case ast.Subscript(value=ast.Name(id=holder), slice=ast.Constant(value=key)):
            return _entry(file, line, holder, key)
        case ast.Call(func=ast.Name(id="int" | "float" | "str"), args=[given]):
            return line, given
    return None


def _name(file: str, line: int, name: str) -> tuple[int, ast.expr] | None:
    made = source.last_assignment(file, line, name)
    if isinstance(made, ast.Assign | ast.AnnAssign) and (value := source.value_for(made, name)) is not None:
        # Of `a, b = f()` the part that `a` is given cannot be told.
        several = isinstance(made, ast.Assign) and any(isinstance(t, ast.Tuple) for t in made.targets)
        return None if several and value is made.value else (value.lineno, value)
    return _argument(file, line, name) if made is None else None


def _argument(file: str, line: int, name: str) -> tuple[int, ast.expr] | None:
    """What the only call of the function around a line gives for a parameter; its default where it gives nothing."""
    function = source.function_at(file, line)
    if function is None or name not in source.parameters(file, line):
        return None
    owner = source.class_at(file, function.lineno)
    called = owner.name if owner is not None and function.name == "__init__" else function.name
    sites = [
        call for call in source.calls(file, called) if source.function_at(file, call.lineno) is not function
    ]
    if len(sites) != 1:
        return None
    given = argument(sites[0], function, name)
    if given is not None:
        return given.lineno, given
    default = _default(function, name)
    return (default.lineno, default) if default is not None else None


def argument(call: ast.Call, function: source.Function, name: str) -> ast.expr | None:
    """What a call gives for a parameter of the function that it calls."""
    if (given := source.keyword(call, name)) is not None:
        return given
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    position = names.index(name) - (names[:1] in (["self"], ["cls"])) if name in names else -1
    if not 0 <= position < len(call.args) or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    return call.args[position]


def _default(function: source.Function, name: str) -> ast.expr | None:
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
    own = {a.arg: d for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if d}
    return {**defaults, **own}.get(name)


def _own_attribute(file: str, line: int, attribute: str) -> tuple[int, ast.expr] | None:
    owner = source.class_at(file, line)
    made = source.attribute_assignment(file, owner.name, attribute) if owner is not None else None
    node = source.statement(file, made) if made is not None else None
    for target, value in source.pairs(node) if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Attribute) and target.attr == attribute and value.lineno != line:
            return value.lineno, value
    return _field(file, attribute) if made is None else None


def _field(file: str, attribute: str) -> tuple[int, ast.expr] | None:
    """A setting: a dataclass's field, or an option of the command line, by its only definition in the file."""
    found: list[ast.expr] = []
    for node in source.walk(file):
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.AnnAssign | ast.Assign) and attribute in source.bound(inner):
                    found += [value] if (value := source.value_for(inner, attribute)) is not None else []
        elif isinstance(node, ast.Call) and source.called_name(node) == "add_argument" and node.args:
            option = getattr(node.args[0], "value", None)
            if isinstance(option, str) and option.lstrip("-").replace("-", "_") == attribute:
                found.append(source.keyword(node, "default") or node)
    return (found[0].lineno, found[0]) if len(found) == 1 else None


def _entry(file: str, line: int, holder: str, key: object) -> tuple[int, ast.expr] | None:
    made = source.last_assignment(file, line, holder)
    value = source.value_for(made, holder) if made is not None else None
    if made is None and (passed := _argument(file, line, holder)) is not None:
        # What the caller gives by a name of its own, as far back as it goes.
        _, value = decided(file, *passed)
    if isinstance(value, ast.Call) and source.called_name(value) == "dict":
        given = source.keyword(value, str(key))
        return (given.lineno, given) if given is not None else None
    if not isinstance(value, ast.Dict):
        return None
    for name, entry in zip(value.keys, value.values, strict=True):
        if isinstance(name, ast.Constant) and name.value == key:
            return entry.lineno, entry
    return None
