"""The line to change for raised errors about gradients: graphs that are cut, frozen, carried over or hidden."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import torch

from trimtab.diagnose import flow, rewrite, source
from trimtab.diagnose.finding import Edit, Place
from trimtab.diagnose.raised_common import own_frames
from trimtab.diagnose.rules_common import Verdict

_CHECKPOINTS = ("checkpoint", "checkpoint_sequential")


def reentrant(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A checkpoint call that is re-entrant, by word or by default; else the return of an opaque output."""
    for word in _reentrant_words(file):
        return word.lineno
    for call in source.calls(file, *_CHECKPOINTS, "gradient_checkpointing_enable"):
        enables = source.called_name(call) == "gradient_checkpointing_enable"
        if not (call.args or call.keywords) if enables else not source.keyword(call, "use_reentrant"):
            return call.lineno
    return opaque_return(file)


def _reentrant_words(file: str) -> Iterator[ast.expr]:
    """Where re-entry is asked for: `use_reentrant=True`, or an entry of that name in a dict of settings."""
    for node in source.walk(file):
        pairs = zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        said = next((v for k, v in pairs if source.is_constant(k, "use_reentrant")), None)
        said = source.keyword(node, "use_reentrant") if isinstance(node, ast.Call) else said
        if said is not None and source.is_constant(said, True):
            yield said


def opaque_return(file: str) -> int | None:
    """A `return` of forward that builds an object of a plain class of this file: DDP cannot look into it."""
    plain = {
        node.name
        for node in source.walk(file)
        if isinstance(node, ast.ClassDef) and not node.bases and not node.decorator_list
    }
    for node in source.walk(file):
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            for inner in ast.walk(node):
                value = inner.value if isinstance(inner, ast.Return) else None
                if isinstance(value, ast.Call) and source.called_name(value) in plain:
                    return value.lineno
    return None


def unused_branch(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """A layer that __init__ makes and no other method uses: where it is unfrozen, else where it is made."""
    if opaque := opaque_return(file):
        return opaque
    for node in source.walk(file):
        if not isinstance(node, ast.ClassDef):
            continue
        for attribute, line in _unused_layers(node):
            return _unfrozen(file, node, attribute) or line
    lines = [p.line for p in own if p.file == file]
    return next((found for line in lines if (found := _unused_output(file, line))), None)


def _unused_output(file: str, line: int) -> int | None:
    """The model returned several outputs and the loss reads only some: the line that makes the loss."""
    node = source.statement(file, line)
    bound = source.bound(node)
    if not bound:
        return None
    scope = source.function_at(file, line) or source.tree(file)
    names = [n for n in ast.walk(scope) if isinstance(n, ast.Name)] if scope else []
    read = [n for n in names if isinstance(n.ctx, ast.Load)]
    if len(bound) > 1 and bound <= {n.id for n in read}:
        return None
    return min((n.lineno for n in read if n.id in bound and n.lineno > line), default=None)


def _unused_layers(owner: ast.ClassDef) -> Iterator[tuple[str, int]]:
    methods = [m for m in owner.body if isinstance(m, source.Function)]
    if not any(m.name == "forward" for m in methods):
        return
    used = {
        inner.attr
        for method in methods
        if method.name != "__init__"
        for inner in ast.walk(method)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }
    made = [n for m in methods if m.name == "__init__" for n in ast.walk(m) if isinstance(n, ast.Assign)]
    for inner in made:
        for target, value in source.pairs(inner):
            layer = isinstance(value, ast.Call) and source.called_name(value)[:1].isupper()
            if layer and isinstance(target, ast.Attribute) and target.attr not in used:
                yield target.attr, inner.lineno


def _unfrozen(file: str, owner: ast.ClassDef, attribute: str) -> int | None:
    for call in source.calls(file, "requires_grad_"):
        inside = owner.lineno <= call.lineno <= (owner.end_lineno or 0)
        if not inside and re.search(rf"\.{attribute}\b", ast.unparse(call.func)):
            return call.lineno
    return None


def freezes_on(node: ast.stmt) -> bool:
    """Whether a statement sets a requires_grad to anything but True."""
    if isinstance(node, ast.Assign):
        return _sets_requires_grad(node) and not source.is_constant(node.value, True)
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return call is not None and source.called_name(call) == "requires_grad_" and _first_is_false(call.args)


def _sets_requires_grad(node: ast.Assign) -> bool:
    return any(
        isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in node.targets
    )


def _first_is_false(given: list[ast.expr]) -> bool:
    return bool(given) and source.is_constant(given[0], False)


def without_grad(file: str, own: Sequence[Place], error: BaseException) -> int | None:
    """The loss was computed under no_grad: the line that switches gradients off."""
    if (left := _left_off(file)) is not None:
        return left.lineno
    node = source.statement(file, own[0].line)
    for name in sorted(source.names_in(node)) if node is not None else ():
        made = source.last_assignment(file, own[0].line, name)
        if made is not None and (switch := flow.switch_around(file, made.lineno)) is not None:
            return switch.line
    return None


def _left_off(file: str) -> ast.Expr | None:
    """A statement that switched gradients off for good: they are off now, outside of every block."""
    if torch.is_grad_enabled():
        return None
    found = [
        node
        for node in source.walk(file)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if source.called_name(node.value) in ("set_grad_enabled", "_set_grad_enabled")
        and _first_is_false(node.value.args)
    ]
    return found[0] if found else None


def left_off(error: BaseException) -> Verdict | None:
    """Gradients that a function switched off and never on again: it is decorated instead."""
    for file in dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error)):
        if (node := _left_off(file)) is None:
            continue
        why = "this switches gradients off, and nothing switches them on again"
        function = source.function_at(file, node.lineno)
        if function is None or len(function.body) < 2 or "torch" not in ast.unparse(node):
            return Verdict(
                source.cause(file, node.lineno, why), "Switch them off for a block: with torch.no_grad():"
            )
        edits = [rewrite.before(file, function, "@torch.no_grad()"), rewrite.without(file, node)]
        fix = f"Switch them off for {function.name} alone: @torch.no_grad() above it, in place of this line."
        return Verdict(source.cause(file, node.lineno, why), fix, edits=edits)
    return None


def reentrant_flag(error: BaseException) -> Verdict | None:
    """Re-entrant checkpointing that the program asks for by word: the flag itself, wherever it is written."""
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error))
    found = [(file, node) for file in files for node in _reentrant_words(file)]
    if len(found) != 1:
        return None
    file, node = found[0]
    why = "re-entrant checkpointing runs a backward pass of its own inside the backward pass"
    return Verdict(
        source.cause(file, node.lineno, why),
        'Checkpoint without it: "use_reentrant": False (and DDP without find_unused_parameters=True).',
        edits=[rewrite.in_place_of(file, node, "False")],
    )


def without_reentry(place: Place | None) -> tuple[str, list[Edit]]:
    """The fix for a checkpoint call that is re-entrant, by word or by default; in a library, what its user can do."""
    for call in source.call_on(place.file, place.line) if place is not None else ():
        if place is None or source.called_name(call) not in _CHECKPOINTS:
            continue
        code = rewrite.with_keyword(place.file, call, "use_reentrant", "False")
        edit = rewrite.add_keyword(place.file, call, "use_reentrant", "False")
        return f"Checkpoint without re-entry: {code}.", [edit]
    return (
        'Checkpoint without re-entry: gradient_checkpointing_kwargs={"use_reentrant": False}, or let the inputs '
        "require a gradient: model.enable_input_require_grads().",
        [],
    )
