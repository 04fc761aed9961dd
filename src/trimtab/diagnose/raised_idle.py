"""Modules and optimizers that get no gradient: a frozen one that DDP refuses, one whose loss a condition left out.

Decided by the parameters in the failing frames and by what a condition is at that moment. Runs none of the program.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import flow, frozen, holders, rewrite, source
from trimtab.diagnose.raised_common import own_frames, values_named
from trimtab.diagnose.rules_common import Verdict


def wrapped_frozen(error: BaseException) -> Verdict | None:
    """A module of which nothing is trained is left unwrapped; one that is to be trained was frozen by mistake."""
    module = next((v for v in values_named(error, "module") if isinstance(v, nn.Module)), None)
    for frame, line in own_frames(error)[:1] if module is not None else ():
        file = frame.f_code.co_filename
        calls = [c for c in source.call_on(file, line) if _wraps(c, frame)]
        given = next(iter([*calls[0].args, source.keyword(calls[0], "module")])) if len(calls) == 1 else None
        node = source.statement(file, line)
        if given is None or node is None or isinstance(given, ast.Starred):
            return None
        code = rewrite.text_of(file, given)
        kept = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
        trained = next((c for c in source.calls(file) if _trains(c, {code, kept})), None)
        if trained is not None:
            freezing = [n.lineno for n in source.walk(file) if isinstance(n, ast.stmt) and _freezes(n)]
            at = source.place(file, freezing[0] if len(freezing) == 1 else line)
            why = f"nothing of {code} is left to train, and the optimizer of line {trained.lineno} is to train it"
            fix, edits = frozen.mend(at, [n for n, _ in module.named_parameters()] if module else [])
            if len(freezing) != 1:
                fix, edits = (
                    f"Freeze only a part of {code}, or unfreeze what is to be trained before this.",
                    [],
                )
            return Verdict(source.cause(file, at.line, why), fix, edits=edits)
        why = f"nothing of {code} is trained, so DDP has no gradient to average"
        edits = [rewrite.in_place_of(file, calls[0], code)]
        said = rewrite.after_edits(file, node, edits)
        if kept == code and node.end_lineno is not None and len(flow.block_of(file, node)) > 1:
            edits, said = [rewrite.without(file, node)], f"take this line out, and use {code} as it is"
        inside = source.scope_at(file, line)  # elsewhere the same name may mean another model
        inner = [n for n in ast.walk(inside) if isinstance(n, ast.Attribute) and n.attr == "module"]
        edits += [rewrite.in_place_of(file, n, kept) for n in inner if kept and ast.unparse(n.value) == kept]
        more = f"; {kept}.module is {kept} then" if len(edits) > 1 else ""
        return Verdict(source.cause(file, line, why), f"Leave it unwrapped: {said}{more}.", edits=edits)
    return None


def _wraps(call: ast.Call, frame: FrameType) -> bool:
    called = holders.value_of(call.func, frame)
    named = source.called_name(call) in ("DistributedDataParallel", "DDP")
    return named or called is nn.parallel.DistributedDataParallel


def _trains(call: ast.Call, names: set[str]) -> bool:
    """Whether a call makes an optimizer for the parameters of one of these."""
    optimizer = getattr(torch.optim, source.called_name(call), None)
    inside = [n for a in call.args for n in ast.walk(a) if isinstance(n, ast.Attribute)]
    held = {ast.unparse(n.value).removesuffix(".module") for n in inside if "parameters" in n.attr}
    return isinstance(optimizer, type) and bool(held & names)


def _freezes(node: ast.stmt) -> bool:
    """Whether a statement by itself takes parameters out of training."""
    if isinstance(node, ast.Assign) and source.is_constant(node.value, False):
        return any(isinstance(t, ast.Attribute) and t.attr == "requires_grad" for t in node.targets)
    calls = [n for n in source.header(node) if isinstance(n, ast.Call)]
    return any(
        source.called_name(c) == "requires_grad_" and c.args and source.is_constant(c.args[0], False)
        for c in calls
    )


def stepped_without(error: BaseException) -> Verdict | None:
    """An optimizer that is stepped in a round in which a condition left its loss out: stepped under that condition."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        step = source.statement(file, line)
        calls = [c for c, _ in source.methods_on(file, line, "step") if c.args]
        held = holders.value_of(calls[0].args[0], frame) if calls else None
        if not isinstance(step, ast.Expr) or not isinstance(held, torch.optim.Optimizer):
            return None
        mine = {id(p) for group in held.param_groups for p in group["params"]}
        inside = flow.loop_at(source.place(file, line)) or source.function_at(file, line)
        for node in ast.walk(inside) if inside is not None else ():
            if not isinstance(node, ast.If) or not (node.end_lineno or 0) < line:
                continue
            now = _truth(node.test, frame)
            if now is None or not _feeds(file, node.orelse if now else node.body, frame, mine):
                continue
            test = ast.unparse(node.test)
            test = f"not ({test})" if now else test
            name = ast.unparse(calls[0].args[0])
            both = [n for n in flow.block_of(file, step) if _unscales(n, name)] + [step]
            edits = [rewrite.lines_for(file, n, f"if {test}:\n    {ast.unparse(n)}") for n in both]
            said = "; ".join(f"line {n.lineno}: if {test}: {ast.unparse(n)}" for n in both)
            why = f"{name} got no gradient in this round: its loss is left out by the condition of line {node.lineno}"
            return Verdict(
                source.cause(file, line, why),
                f"Step it only in the rounds that train it: {said}.",
                edits=edits,
            )
    return None


def _unscales(node: ast.stmt, name: str) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and source.called_name(call) == "unscale_"
        and ast.unparse(call.args[0]) == name
    )


def _feeds(file: str, block: list[ast.stmt], frame: FrameType, mine: set[int]) -> bool:
    """Whether statements that did not run would have made a loss of a module with these parameters."""
    parts = [n for statement in block for n in ast.walk(statement)]
    backward = any(isinstance(n, ast.Call) and source.called_name(n) == "backward" for n in parts)
    bound = {name for n in parts for name in source.bound(n)}
    losses = {name for c in source.calls(file, "scale", "backward") for name in source.names_in(c)}
    if not backward and not bound & losses:
        return False
    for _ in range(3):
        if any(id(p) in mine for module in _modules(parts, frame) for p in module.parameters()):
            return True
        names = [(n.id, n.lineno) for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        made = [
            m for name, at in names if name not in losses and (m := source.last_assignment(file, at, name))
        ]
        parts = [n for statement in made for n in ast.walk(statement)]
    return False


def _modules(parts: list[ast.AST], frame: FrameType) -> Iterator[nn.Module]:
    for node in parts:
        value = (
            holders.value_of(node, frame)
            if isinstance(node, ast.Name | ast.Attribute | ast.Subscript)
            else None
        )
        if isinstance(value, nn.Module) and not (isinstance(node, ast.Name) and node.id == "self"):
            yield value


_PLAIN = (
    ast.BoolOp,
    ast.UnaryOp,
    ast.BinOp,
    ast.Compare,
    ast.Constant,
    ast.operator,
    ast.unaryop,
    ast.boolop,
)


class _Filled(ast.NodeTransformer):
    """Puts plain numbers and words in the place of the names that stand for them in a frame."""

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame

    def visit(self, node: ast.AST) -> Any:
        value = holders.value_of(node, self._frame)
        known = isinstance(value, bool | int | float | str)
        return ast.copy_location(ast.Constant(value), node) if known else self.generic_visit(node)


def _truth(test: ast.expr, frame: FrameType) -> bool | None:
    """Whether a condition on plain numbers and words holds now; None where more would have to be computed."""
    filled = _Filled(frame).visit(copy.deepcopy(test))
    if not all(isinstance(n, (*_PLAIN, ast.cmpop)) and not isinstance(n, ast.Pow) for n in ast.walk(filled)):
        return None
    try:
        return bool(eval(compile(ast.Expression(filled), "<condition>", "eval"), {}))  # constants alone
    except (TypeError, ZeroDivisionError):
        return None
