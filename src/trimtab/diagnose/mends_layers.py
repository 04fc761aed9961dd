"""How layers and parameters that a module does not know of are made its own, and optimizers are given what they lack.

Reads source, runs nothing. A parameter that was moved or computed after it became one is a plain tensor; layers in a
plain list or dict are nobody's.
"""

from __future__ import annotations

import ast
import copy

from trimtab.diagnose import rewrite, scope, source, trace
from trimtab.diagnose.finding import Edit, Place

Mend = tuple[str, list[Edit]]


def attribute_set(file: str, class_name: str, attribute: str) -> tuple[Place, ast.expr] | None:
    """Where a class first sets one of its attributes, and what to."""
    line = source.attribute_assignment(file, class_name, attribute)
    node = source.statement(file, line) if line is not None else None
    if line is None or not isinstance(node, ast.Assign | ast.AnnAssign):
        return None
    given = source.pairs(node) if isinstance(node, ast.Assign) else [(node.target, node.value)]
    for target, value in given:
        if isinstance(target, ast.Attribute) and target.attr == attribute and value is not None:
            return source.place(file, line), value
    return None


def registered(file: str, attribute: str, given: ast.expr, kind: str) -> Mend:
    """A list or dict of layers or parameters as the container that registers them: `kind` is ModuleList, …"""
    value = given
    if isinstance(value, ast.Call) and source.called_name(value) in ("list", "tuple") and value.args:
        value = value.args[0]
    written = rewrite.text_of(file, value)
    empty = written.replace(" ", "") in ("[]", "{}", "()", "list()", "dict()")
    inner = "" if empty else written[1:-1] if isinstance(value, ast.GeneratorExp) else written
    code = f"{_nn(file)}{kind}({inner})"
    return f"Use a container that registers them: self.{attribute} = {code}.", [
        rewrite.in_place_of(file, given, code)
    ]


def made_parameter(file: str, attribute: str, value: ast.expr) -> Mend | None:
    """A tensor that was to be trained, made a parameter last: what was done to it is done before."""
    for call in (n for n in ast.walk(value) if isinstance(n, ast.Call)):
        if source.called_name(call) == "Parameter" and len(call.args) == 1 and call is not value:
            inner = _replaced(value, call, call.args[0])
            made = ast.Call(call.func, [inner], call.keywords)
            code = ast.unparse(ast.fix_missing_locations(made))
            break
        flag = source.keyword(call, "requires_grad")
        if flag is not None and source.is_constant(flag, True):
            plain = ast.Call(call.func, call.args, [k for k in call.keywords if k.arg != "requires_grad"])
            code = f"{_nn(file)}Parameter({ast.unparse(_replaced(value, call, plain))})"
            break
        if source.called_name(call) == "requires_grad_" and isinstance(call.func, ast.Attribute):
            code = f"{_nn(file)}Parameter({ast.unparse(_replaced(value, call, call.func.value))})"
            break
    else:
        return None
    return f"Make the result the parameter: self.{attribute} = {code}.", [
        rewrite.in_place_of(file, value, code)
    ]


def _replaced(whole: ast.expr, old: ast.expr, new: ast.expr) -> ast.expr:
    """An expression with one of its parts replaced."""
    place = (old.lineno, old.col_offset, old.end_lineno, old.end_col_offset, type(old))

    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            at = tuple(
                getattr(node, name, None) for name in ("lineno", "col_offset", "end_lineno", "end_col_offset")
            )
            return new if (*at, type(node)) == place else self.generic_visit(node)

    swapped = Swap().visit(copy.deepcopy(whole))
    assert isinstance(swapped, ast.expr)
    return swapped


def _nn(file: str) -> str:
    """How a file writes torch.nn: by the base of its modules."""
    for node in source.walk(file):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if isinstance(base, ast.Attribute) and base.attr in ("Module", "Sequential"):
                return f"{ast.unparse(base.value)}."
    return "torch.nn."


def given_too(
    made: Place, optimizer: str, missing: list[str], instead: bool
) -> tuple[Place, str, list[Edit]]:
    """Modules given to an optimizer that lacks them, beside what it is given or instead of it; and on which line."""
    wanted = [f"{name}.parameters()" for name in missing if name]
    bound = wanted and all(scope.is_bound(made.file, made.line, name.split(".")[0]) for name in missing)
    for call in source.call_on(made.file, made.line):
        given = source.keyword(call, "params") or next(iter(call.args), None)
        if source.called_name(call) != optimizer or given is None or not wanted:
            continue
        place, value = trace.decided(made.file, made.line, given)
        text = rewrite.text_of(place.file, value)
        if instead and len(wanted) == 1:
            place, value, code = made, given, wanted[0]
        elif isinstance(value, ast.Call) and source.called_name(value) == "parameters":
            code = f"[{', '.join(f'*{one}' for one in [text, *wanted])}]"
        elif isinstance(value, ast.BinOp) or (
            isinstance(value, ast.Call) and source.called_name(value) == "list"
        ):
            code = " + ".join([text, *(f"list({one})" for one in wanted)])
        else:
            break
        edits = [rewrite.in_place_of(place.file, value, code)] if bound else []
        return place, f"Give it their parameters{' instead' if instead else ' too'}: {code}.", edits
    said = f": {', '.join(wanted)}" if wanted else ""
    return made, f"Give the optimizer their parameters too{said}.", []


def late_deed(made: Place, deed: Place) -> Place:
    """The statement behind the making of an optimizer, in its own block, that leads to a later deed; else the deed.

    Of several, the last one before the optimizer is used.
    """
    one = source.statement(made.file, made.line)
    function = source.function_at(deed.file, deed.line)
    names = {function.name} if function is not None else set()
    owner = source.class_at(deed.file, deed.line)
    if owner is not None and function is not None and function.name == "__init__":
        names = {owner.name}
    for node in source.walk(made.file) if one is not None and names else ():
        for block in (getattr(node, name, None) for name in ("body", "orelse")):
            if not isinstance(block, list) or one not in block:
                continue
            found: Place | None = None
            for later in block[block.index(one) + 1 :]:
                if made.file == deed.file and later.lineno <= deed.line <= (later.end_lineno or 0):
                    return source.place(made.file, later.lineno)
                calls = [n for n in source.header(later) if isinstance(n, ast.Call)]
                if any(source.called_name(call) in names for call in calls):
                    found = source.place(made.file, later.lineno)
                elif found is not None and source.bound(one) & source.names_in(later):
                    break
            if found is not None:
                return found
    return deed


def made_again(made: Place, stack: list[Place]) -> Mend | None:
    """An optimizer made anew behind the line of its own function that replaces layers under training."""
    function = source.function_at(made.file, made.line)
    here = next(
        (p for p in stack if p.file == made.file and source.function_at(p.file, p.line) is function), None
    )
    one = source.statement(made.file, made.line)
    node = source.statement(here.file, here.line) if here is not None else None
    if here is None or one is None or node is None:
        return None
    code = rewrite.written(made.file, one)
    fix = f"Make the optimizer again behind line {here.line} ({here.code}): {' '.join(code.split())}."
    # A schedule, or whatever else was given the old one, would go on with it.
    names = source.bound(one)
    handed = any(
        isinstance(a, ast.Name) and a.id in names
        for call in source.calls(made.file)
        for a in (*call.args, *(k.value for k in call.keywords))
    )
    simple = isinstance(one, ast.Assign) and isinstance(node, ast.Assign | ast.Expr | ast.AugAssign)
    return fix, [rewrite.after(here.file, node, code)] if simple and names and not handed else []
