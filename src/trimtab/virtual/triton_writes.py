"""Which parameters of a Triton kernel it writes to, by its source: what a kernel that was not run leaves unknown.

Too many rather than too few: whatever a pointer was made of counts. It looks at names alone and runs nothing.
"""

from __future__ import annotations

import ast
from typing import Any
from weakref import WeakKeyDictionary

_known: WeakKeyDictionary[Any, tuple[str, frozenset[str]]] = WeakKeyDictionary()
"""By a kernel's function: the source that was read, which Triton lets be exchanged, and what is written."""


def written(kernel: Any) -> frozenset[str]:
    """The names of the parameters into whose memory a kernel stores; all of them where its source does not tell."""
    source, found = _known.get(kernel.fn, (None, frozenset()))
    if source != kernel.src:
        names = frozenset(param.name for param in kernel.params)
        found = names & _written(kernel, frozenset()) or names
        _known[kernel.fn] = kernel.src, found
    return found


def _written(function: Any, above: frozenset[str]) -> set[str]:
    tree = ast.parse(function.src)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    parameters = [argument.arg for argument in definition.args.args]
    made_of: dict[str, set[str]] = {name: {name} for name in parameters}
    assignments = [
        node for node in ast.walk(definition) if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
    ]
    for _ in assignments:
        before = {name: len(of) for name, of in made_of.items()}
        for node in assignments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            of = _names_behind(node.value, made_of) if node.value is not None else set()
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        made_of.setdefault(name.id, set()).update(of)
        if {name: len(of) for name, of in made_of.items()} == before:
            break
    stored: set[str] = set()
    for call in ast.walk(definition):
        if isinstance(call, ast.Call):
            for pointer in _stored_to(call, function, above | {function.fn.__qualname__}):
                stored |= _names_behind(pointer, made_of)
    return stored & set(parameters)


def _stored_to(call: ast.Call, function: Any, above: frozenset[str]) -> list[ast.expr]:
    """The expressions into whose memory a call stores."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = call.args + [keyword.value for keyword in call.keywords]
    if name == "store" or name.startswith("atomic_") or name == "scatter":
        # As a function the pointer is the first argument; as a method of a descriptor, what stands before the dot.
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        return [*owner, *given[:1]]
    callee = function.fn.__globals__.get(name)
    if callee is None or not hasattr(callee, "params") or not hasattr(callee, "src"):
        return given if _is_inline_code(name) else []
    if callee.fn.__qualname__ in above:
        return given
    inner = _written(callee, above)
    order = [param.name for param in callee.params]
    return [value for place, value in zip(order, call.args, strict=False) if place in inner] + [
        keyword.value for keyword in call.keywords if keyword.arg in inner
    ]


def _is_inline_code(name: str) -> bool:
    return name.startswith("inline_asm") or name == "extern_elementwise"


def _names_behind(expression: ast.expr, made_of: dict[str, set[str]]) -> set[str]:
    """The parameters of which a value is made; what was loaded from memory is no pointer into it."""
    if isinstance(expression, ast.Call):
        name = expression.func.attr if isinstance(expression.func, ast.Attribute) else ""
        if name == "load":
            return set()
    found: set[str] = set()
    for part in ast.iter_child_nodes(expression):
        if isinstance(part, ast.expr):
            found |= _names_behind(part, made_of)
        elif isinstance(part, ast.keyword):
            found |= _names_behind(part.value, made_of)
    if isinstance(expression, ast.Name):
        found |= made_of.get(expression.id, set())
    return found
