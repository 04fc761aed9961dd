"""Tensors that carry a graph where none belongs: what an optimizer is to train, what an object keeps between steps.

Looks at the live objects of a traceback and reads source; changes nothing.
"""

from __future__ import annotations

import ast

import torch
from torch import nn

from trimtab.diagnose import graphs, holders, mends_data, mends_layers, owners, rewrite, source
from trimtab.diagnose.finding import Edit, cause_at
from trimtab.diagnose.raised_common import known_here, own_frames, values_named
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
    for call, inner in source.methods_on(born.file, born.line, "to", "cuda", "float", "half"):
        if not isinstance(inner, ast.Call):
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


def lost_parameter(error: BaseException) -> Verdict | None:
    """A parameter that was computed with after it became one: a module keeps the result, whose graph is made once."""
    frames = [frame for frame, _ in own_frames(error)]
    modules = owners.modules_seen(frames[0]) if frames else []
    registered = {id(p) for module in modules for p in module._parameters.values() if p is not None}
    for module in modules:
        for name, value in vars(module).items():
            if not isinstance(value, torch.Tensor) or value.grad_fn is None:
                continue
            leaves = list(graphs.leaves(value, 200))
            if not leaves or any(id(leaf) in registered for leaf in leaves):
                continue
            named = holders.source_of(module)
            found = mends_layers.attribute_set(*named, name) if named is not None else None
            mend = mends_layers.made_parameter(found[0].file, name, found[1]) if found is not None else None
            if found is not None and mend is not None:
                why = "this computes with the parameter once, and every step goes back through the result"
                return Verdict(cause_at(found[0], why), mend[0], kind="no-gradient", edits=mend[1])
    return None


def copied_with_graph(error: BaseException) -> Verdict | None:
    """A copy of an object that keeps a result of the last pass: the attribute, let go of before the copy."""
    frames = own_frames(error)
    held = holders.kept_in(
        lambda v: isinstance(v, torch.Tensor) and v.grad_fn is not None, [f for f, _ in frames]
    )
    for kept in held:
        named = holders.source_of(kept.owner)
        line = source.attribute_assignment(*named, kept.name) if named is not None else None
        if named is None or line is None:
            continue
        frame, at = frames[0]
        owner, node = (
            holders.expression_for(kept.owner, frame),
            source.statement(frame.f_code.co_filename, at),
        )
        why = f"self.{kept.name} keeps a tensor of the last pass with its graph, and a graph cannot be copied"
        code = f"{owner or 'model'}.{kept.name} = None"
        edits = [rewrite.before(frame.f_code.co_filename, node, code)] if owner and node is not None else []
        fix = f"Let go of it before the copy (line {at}): {code}; or make the copy before the first pass."
        return Verdict(source.cause(named[0], line, why), fix, edits=edits)
    return None


def empty_list(error: BaseException) -> Verdict | None:
    """An optimizer that is given nothing: an iterator that was used up before, or a model whose layers are nobody's."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call in source.call_on(file, line):
            given = source.keyword(call, "params") or next(iter(call.args), None)
            once = isinstance(given, ast.Name) and hasattr(type(holders.value_of(given, frame)), "__next__")
            if isinstance(given, ast.Name) and once and not _all_frozen(error):
                made, fix, edits = mends_data.kept_as_list(source.place(file, line), given)
                why = "this can be gone through once only, and was, before the optimizer is given it"
                return Verdict(cause_at(made, why), fix, edits=edits)
            model = holders.value_of(asked, frame) if (asked := _asked_parameters(given)) else None
            if isinstance(model, nn.Module) and (verdict := _unregistered(model)) is not None:
                return verdict
    return None


def _all_frozen(error: BaseException) -> bool:
    """Whether the program's functions know models, and none of them has a trainable parameter."""
    models = [model for _, _, model in known_here(error, lambda value: isinstance(value, nn.Module))]
    return bool(models) and not any(p.requires_grad for model in models for p in model.parameters())


def _asked_parameters(node: ast.expr | None) -> ast.expr | None:
    """Whose parameters `model.parameters()` asks for."""
    func = node.func if isinstance(node, ast.Call) else None
    return func.value if isinstance(func, ast.Attribute) and func.attr == "parameters" else None


def _unregistered(model: nn.Module) -> Verdict | None:
    """The attribute of a model without parameters that holds layers or parameters in a plain list or dict."""
    for name, value in vars(model).items():
        items = list(value.values()) if isinstance(value, dict) else value
        if name.startswith("_") or not isinstance(items, list | tuple) or not items:
            continue
        kind = "Module" if isinstance(items[0], nn.Module) else "Parameter"
        named = holders.source_of(model)
        if not isinstance(items[0], nn.Module | torch.Tensor) or named is None:
            continue
        if (found := mends_layers.attribute_set(*named, name)) is not None:
            kind += "Dict" if isinstance(value, dict) else "List"
            fix, edits = mends_layers.registered(found[0].file, name, found[1], kind)
            why = "a plain list or dict does not register what is in it: the model has no parameters"
            return Verdict(cause_at(found[0], why), fix, edits=edits)
    return None


def _carried(file: str, line: int) -> ast.Assign | None:
    """The statement of a loop around a line that computes a variable from what the round before has left in it."""
    loops = (n for n in source.walk(file) if isinstance(n, ast.For | ast.While))
    for loop in (n for n in loops if n.lineno < line <= (n.end_lineno or 0)):
        inside = [n for n in ast.walk(loop) if isinstance(n, ast.Assign | ast.For | ast.With)]
        this_round: set[str] = set()
        for node in sorted(inside, key=lambda n: n.lineno):
            value = node.value if isinstance(node, ast.Assign) else None
            computes = isinstance(value, ast.Call | ast.BinOp) and "detach" not in ast.unparse(value)
            again = source.bound(node) & source.names_in(value) if value is not None else set()
            if isinstance(node, ast.Assign) and computes and again - this_round and not source.has_move(node):
                return node
            this_round |= source.bound(node)
    return None


def carried(error: BaseException) -> Verdict | None:
    """A variable that a loop computes from its own last value: cut from its graph after the backward pass."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        made, node = _carried(file, line), source.statement(file, line)
        if made is None or not isinstance(node, ast.Expr):
            return None
        for name in sorted(source.bound(made) & source.names_in(made.value)):
            value = frame.f_locals.get(name)
            parts = value if isinstance(value, tuple) else (value,)
            if not all(isinstance(part, torch.Tensor) for part in parts) or not any(p.grad_fn for p in parts):
                continue
            several = isinstance(value, tuple)
            cut = f"tuple(part.detach() for part in {name})" if several else f"{name}.detach()"
            why = f"{name} comes from the last round with its graph, which that round's pass has freed"
            fix = f"Cut it from the round that ends, after the backward pass (line {line}): {name} = {cut}."
            edits = [rewrite.after(file, node, f"{name} = {cut}")]
            return Verdict(source.cause(file, made.lineno, why), fix, edits=edits)
    return None


def kept_state(error: BaseException) -> Verdict | None:
    """An object of the program that keeps a tensor with its graph from one step to the next, and reads it there."""
    frames = [frame for frame, _ in own_frames(error)]
    if any(_carried(frame.f_code.co_filename, line) for frame, line in own_frames(error)[:1]):
        return None
    kept_now = holders.kept_in(
        lambda v: isinstance(v, torch.Tensor) and v.dim() > 0 and v.grad_fn is not None, frames
    )
    buffers = (
        holders.Kept(module, name)
        for module in owners.modules_seen(frames[0] if frames else None)
        for name, value in module._buffers.items()
        if value is not None and value.grad_fn is not None
    )
    for kept in (*kept_now, *buffers):
        named = holders.source_of(kept.owner)
        if named is None or kept.container not in ("", "tuple") or not source.is_user_file(named[0]):
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
        goes_on = f"self.{attribute}" in {ast.unparse(n) for n in ast.walk(value)}
        why = f"self.{attribute} keeps the graph of the step that made it, and the next step goes on from it"
        # A buffer is no part of a graph: what is put there goes without one.
        buffer = isinstance(kept.owner, nn.Module) and attribute in kept.owner._buffers
        if (not once or kept.container or goes_on) and not buffer:
            fix, edits = _let_go_between(error, kept)
            return Verdict(source.cause(file, value.lineno, why), fix, edits=edits)
        return Verdict(
            source.cause(file, value.lineno, why),
            f"Cut it from the last step: self.{attribute} = {code}.",
            edits=[rewrite.in_place_of(file, value, code)],
        )
    return None


def _let_go_between(error: BaseException, kept: holders.Kept) -> tuple[str, list[Edit]]:
    """State that a step itself goes on from is cut after its backward pass, where the failing line stands."""
    for frame, line in own_frames(error)[:1]:
        owner = holders.expression_for(kept.owner, frame)
        node = source.statement(frame.f_code.co_filename, line)
        if owner is None or not isinstance(node, ast.Expr):
            continue
        state = f"{owner}.{kept.name}"
        value = f"tuple(part.detach() for part in {state})" if kept.container else f"{state}.detach()"
        code = f"{state} = {value}"
        edits = [rewrite.after(frame.f_code.co_filename, node, code)]
        return f"Cut it from the last step, after the backward pass (line {line}): {code}.", edits
    return f"Cut {kept.name} from the last step before the next one begins, with .detach().", []
