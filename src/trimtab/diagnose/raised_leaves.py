"""Tensors that carry a graph where none belongs: what an optimizer is to train, what an object keeps between steps.

Looks at the live objects of a traceback and reads source; changes nothing.
"""

from __future__ import annotations

import ast

import torch

from trimtab.diagnose import holders, rewrite, source
from trimtab.diagnose.raised_common import own_frames, values_named
from trimtab.diagnose.raised_graph import carried_state
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin


def no_leaf(error: BaseException) -> Verdict | None:
    """What an optimizer is to train was moved or computed after it had become a leaf: the line that did so."""
    given = [t for t in values_named(error, "param") if isinstance(t, torch.Tensor) and not t.is_leaf]
    trace = origin.trace_of(given[0]) if given else None
    born = (origin.resolve(trace.moved) or origin.resolve(trace.born)) if trace is not None else None
    if born is None or not source.is_user_file(born.file):
        return None
    why = "this computes a new tensor from the one that was to be trained: it is no leaf, and no optimizer takes it"
    cause = source.cause(born.file, born.line, why)
    for call in source.call_on(born.file, born.line):
        inner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(inner, ast.Call) or source.called_name(call) not in ("to", "cuda", "float", "half"):
            continue
        there = f".{source.called_name(call)}({', '.join(map(ast.unparse, [*call.args, *call.keywords]))})"
        if source.called_name(inner) == "Parameter" and len(inner.args) == 1:
            code = f"{ast.unparse(inner.func)}({rewrite.operand(inner.args[0])}{there})"
        elif (flag := source.keyword(inner, "requires_grad")) is not None and source.is_constant(flag, True):
            plain = ast.Call(inner.func, inner.args, [k for k in inner.keywords if k.arg != "requires_grad"])
            code = f"{ast.unparse(plain)}{there}.requires_grad_()"
        else:
            continue
        return Verdict(
            cause,
            f"Move first, then make it a leaf: {code}.",
            edits=[rewrite.in_place_of(born.file, call, code)],
        )
    return Verdict(cause, "Compute it first, and make the result the leaf: value.detach().requires_grad_().")


def kept_state(error: BaseException) -> Verdict | None:
    """An object of the program that keeps a tensor with its graph from one step to the next, and reads it there."""
    own = [source.place(frame.f_code.co_filename, line) for frame, line in own_frames(error)]
    if any(carried_state(file, own, error) for file in dict.fromkeys(at.file for at in own)):
        return None
    frames = [frame for frame, _ in own_frames(error)]
    for kept in holders.kept_in(
        lambda v: isinstance(v, torch.Tensor) and v.dim() > 0 and v.grad_fn is not None, frames
    ):
        named = holders.source_of(kept.owner)
        if named is None or kept.container or not source.is_user_file(named[0]):
            continue
        file, attribute = named[0], kept.name
        owner = next(
            (n for n in source.walk(file) if isinstance(n, ast.ClassDef) and n.name == named[1]), None
        )
        sets = [
            (node, value)
            for method in (owner.body if owner is not None else ())
            if isinstance(method, source.Function) and method.name not in ("__init__", "reset")
            for node in ast.walk(method)
            if isinstance(node, ast.Assign)
            for target, value in source.pairs(node)
            if ast.unparse(target) == f"self.{attribute}" and value.lineno
        ]
        uses = [n for n in source.walk(file) if isinstance(n, ast.Attribute) and n.attr == attribute]
        if len(sets) != 1 or not any(isinstance(n.ctx, ast.Load) for n in uses):
            continue
        node, value = sets[0]
        if "detach" in ast.unparse(value) or isinstance(node.targets[0], ast.Tuple):
            continue
        # Read once, it is read to go on from. Read again, the loss of the same step may need its graph.
        once = sum(isinstance(n.ctx, ast.Load) for n in uses) == 1
        code = f"{rewrite.operand(value)}.detach()"
        why = f"self.{attribute} keeps the graph of the step that made it, and the next step goes on from it"
        if not once:
            fix = f"Cut it from the last step before the next one begins: x.{attribute} = x.{attribute}.detach()."
            return Verdict(source.cause(file, value.lineno, why), fix)
        return Verdict(
            source.cause(file, value.lineno, why),
            f"Cut it from the last step: self.{attribute} = {code}.",
            edits=[rewrite.in_place_of(file, value, code)],
        )
    return None
