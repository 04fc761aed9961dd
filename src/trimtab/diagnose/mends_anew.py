"""Parameters that a line makes in every step: whether it is the one that makes them, and how they are made once.

Reads source, runs nothing.
"""

from __future__ import annotations

import ast
import builtins

from torch import nn

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, Place


def maker(place: Place) -> ast.Call | None:
    """The call on a line that makes a parameter or a layer, unless it is a copy or a layer of normalisation."""
    for call in source.call_on(place.file, place.line):
        name = source.called_name(call)
        own = any(isinstance(n, ast.ClassDef) and n.name == name for n in source.walk(place.file))
        if "Norm" not in name and (name == "Parameter" or own or isinstance(getattr(nn, name, None), type)):
            return call
    return None


def gradient_is_read(place: Place) -> bool:
    """Whether a function that knows one of the names of this line reads a gradient by hand."""
    node = source.statement(place.file, place.line)
    names = source.bound(node)
    for scope in source.walk(place.file):
        if isinstance(scope, source.Function | ast.Module):
            own = source.own_statements(scope)
            plain = [one for one in own if not isinstance(one, source.Function | ast.ClassDef)]
            inside = [n for one in plain for n in ast.walk(one)]
            reads = any(
                isinstance(n, ast.Attribute) and n.attr == "grad" and isinstance(n.ctx, ast.Load)
                for n in inside
                if not (isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.autograd.grad")
            )
            if reads and names & {n.id for n in inside if isinstance(n, ast.Name)}:
                return True
    return False


def made_once(place: Place, made: ast.Call) -> tuple[str, list[Edit]]:
    """In a module's forward, made in its __init__; elsewhere, said in the program's own names."""
    node, owner = source.statement(place.file, place.line), source.class_at(place.file, place.line)
    function = source.function_at(place.file, place.line)
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    name = target.id if isinstance(target, ast.Name) else ""
    plain = _without_device(made)
    code = ast.unparse(plain)
    start = next(
        (f for f in (owner.body if owner else ()) if isinstance(f, ast.FunctionDef) and f.name == "__init__"),
        None,
    )
    if isinstance(node, ast.Assign) and start is not None and function is not start and name:
        fix = f"Make it once, in __init__: self.{name} = {code}, and use self.{name} here."
        local = source.names_in(plain) - _globals(place.file) - set(dir(builtins))
        taken = any(
            f"self.{name}" == ast.unparse(n) for n in ast.walk(owner or start) if isinstance(n, ast.Attribute)
        )
        if local or taken:
            return fix, []
        last = start.body[-1]
        return fix, [
            rewrite.in_place_of(place.file, node.value, f"self.{name}"),
            rewrite.after(place.file, last, f"self.{name} = {code}"),
        ]
    given = f"[{name}]" if source.called_name(made) == "Parameter" else f"{name}.parameters()"
    said = f"{name} = {code}" if name else code
    to = f", and give it to the optimizer ({given})" if name else ", and give its parameters to the optimizer"
    return f"Make it once, before the loop, on the device of the model: {said}{to}.", []


def _without_device(call: ast.Call) -> ast.Call:
    """The same call, the device left to the module that will hold it."""

    class Plain(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            keywords = [k for k in node.keywords if k.arg != "device"]
            return ast.copy_location(ast.Call(node.func, node.args, keywords), node)

    copied = ast.parse(ast.unparse(call), mode="eval").body
    plain = Plain().visit(copied)
    assert isinstance(plain, ast.Call)
    return plain


def _globals(file: str) -> set[str]:
    """What a file binds outside of its functions."""
    tree = source.tree(file)
    found: set[str] = set()
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, source.Function | ast.ClassDef):
            found.add(node.name)
        found |= source.bound(node)
    return found
