"""Calls that a library refuses for what they were given: the keyword's own line, and what to write instead."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import holders, rewrite, source, trace
from trimtab.diagnose.raised_common import frames_of, own_frames
from trimtab.diagnose.rules_common import Verdict

_UNEXPECTED = re.compile(r"(?:([\w.]+)\(\) )?got an unexpected keyword argument '(\w+)'")
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "tokenizer": "processing_class",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "no_cuda": "use_cpu",
    "use_mps_device": "",
}
"""What transformers and TRL renamed, where the new name is not the likest one; without one: to be left out."""


def unexpected_keyword(error: BaseException) -> Verdict | None:
    """The keyword in the user's call; its new name if what is called has one."""
    if (said := _UNEXPECTED.search(str(error))) is None or not (own := own_frames(error)):
        return None
    called, name = (said[1] or "").split(".")[0], said[2]
    frame, line = own[0]
    file = frame.f_code.co_filename
    found = [
        (call, given) for call in source.call_on(file, line) for given in call.keywords if given.arg == name
    ]
    if not found:
        return None
    call, given = found[0]
    new = _new_name(_callee(call, frame.f_globals | frame.f_locals), name)
    why = f"{called or source.called_name(call)} of the installed version takes no {name}"
    cause = source.cause(file, given.lineno, why)
    if new:
        value = ast.unparse(given.value)
        keyword = ast.Name(name)
        keyword.lineno, keyword.col_offset = given.lineno, given.col_offset
        keyword.end_lineno, keyword.end_col_offset = given.lineno, given.col_offset + len(name.encode())
        edits = [rewrite.in_place_of(file, keyword, new)]
        return Verdict(cause, f"It is called {new} now: {new}={value}.", edits=edits)
    return Verdict(cause, f"Leave {name} out, or install the version that this was written for.")


def _callee(call: ast.Call, names: dict[str, Any]) -> Any:
    """What a call calls, where it is a plain or dotted name of the frame."""
    parts = ast.unparse(call.func).split(".")
    thing = names.get(parts[0])
    for part in parts[1:]:
        thing = getattr(thing, part, None)
    return thing


def _new_name(callee: Any, name: str) -> str | None:
    try:
        known = set(inspect.signature(callee).parameters)
    except (TypeError, ValueError):
        return None
    if _RENAMED.get(name) in known:
        return _RENAMED[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return near[0] if near and name not in _RENAMED else None


def adapter_targets(error: BaseException) -> Verdict | None:
    """LoRA's target names that the model does not have: the line that says them, and the names that it has."""
    for frame, _ in own_frames(error):
        file = frame.f_code.co_filename
        for given in (k for call in source.calls(file) for k in call.keywords if k.arg == "target_modules"):
            names = sorted(_linear_names(error))
            shown = f" (this model's layers are called {', '.join(names[:8])})" if names else ""
            return Verdict(
                source.cause(file, given.lineno, "no layer of this model has one of these names"),
                f'Name layers that it has{shown}, or all of them: target_modules="all-linear".',
                edits=[rewrite.in_place_of(file, given.value, '"all-linear"')],
            )
    return None


def _linear_names(error: BaseException) -> Iterator[str]:
    seen: set[str] = set()
    for frame in frames_of(error):
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module):
                for path, module in value.named_modules():
                    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                        seen.add(path.rpartition(".")[2])
                seen -= {"", "lm_head"}
        if seen:
            break
    yield from seen


def half_range(error: BaseException) -> Verdict | None:
    """A number that half precision cannot hold, written into a tensor: most often the mask value of attention."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for given, masked in _numbers_given(file, line):
            place, said = trace.decided(file, line, given)
            try:
                number = ast.literal_eval(said)
            except ValueError:
                continue
            if not isinstance(number, float | int) or abs(number) < 65504:
                continue
            named = isinstance(masked, ast.Name | ast.Attribute) and masked is not None
            dtype = f"{ast.unparse(masked)}.dtype" if named and masked is not None else "torch.float16"
            code = f"torch.finfo({dtype}).{'min' if number < 0 else 'max'}"
            at = f" (line {place.line})" if said is not given else ""
            why = f"{rewrite.text_of(file, given)}{at} is beyond what float16 can hold (65504)"
            edits = [rewrite.in_place_of(file, given, code)]
            fix = f"Use the type's own limit: {code}."
            return Verdict(source.cause(file, given.lineno, why), fix, edits=edits)
    return None


def _numbers_given(file: str, line: int) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a line gives to calls or writes into a tensor, each with the tensor that it goes into."""
    node = source.statement(file, line)
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield node.value, node.targets[0].value
    for call in source.call_on(file, line):
        masked = call.func.value if isinstance(call.func, ast.Attribute) else None
        if masked is None or ast.unparse(masked) == "torch":
            masked = call.args[-2] if len(call.args) > 1 else None
        yield from ((given, masked) for given in (*call.args, *(k.value for k in call.keywords)))


def leaf_in_place(error: BaseException) -> Verdict | None:
    """A parameter that is overwritten while autograd watches: the statement, with gradients switched off."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        node = source.statement(file, line)
        if not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign):
            return None
        indent = " " * node.col_offset
        code = f"with torch.no_grad():\n{indent}    {rewrite.written(file, node)}"
        named = "torch" in frame.f_globals and node.lineno == node.end_lineno
        return Verdict(
            source.cause(file, line, "a parameter is overwritten in place while autograd watches"),
            f"Switch gradients off for it: `with torch.no_grad():` around `{ast.unparse(node)}`.",
            edits=[rewrite.in_place_of(file, node, code)] if named else [],
        )
    return None


def numpy_of_grad(error: BaseException) -> Verdict | None:
    """`.numpy()` of a tensor with a graph: the tensor detached, as it is written on the line."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        calls = [
            c for c in source.call_on(file, line) if source.called_name(c) in ("numpy", "array", "asarray")
        ]
        for call in calls:
            node = (
                call.func.value
                if source.called_name(call) == "numpy" and isinstance(call.func, ast.Attribute)
                else None
            )
            node = node or next(iter(call.args), None)
            while (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "cpu"
            ):
                node = node.func.value
            value = holders.value_of(node, frame) if node is not None else None
            if node is None or (isinstance(value, torch.Tensor) and not value.requires_grad):
                continue
            code = f"{rewrite.operand(node)}.detach()"
            why = "the tensor is part of a graph, and numpy knows none"
            edits = [rewrite.in_place_of(file, node, code)]
            return Verdict(source.cause(file, line, why), f"Take its values alone: {code}.", edits=edits)
    return None


def assigned_parameter(error: BaseException) -> Verdict | None:
    """A result that is put in a parameter's place: a name of its own, in the rest of the function."""
    for frame, line in own_frames(error)[:1]:
        file, node = frame.f_code.co_filename, source.statement(frame.f_code.co_filename, line)
        function = source.function_at(file, line)
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if (
            function is None
            or not isinstance(target, ast.Attribute)
            or target.attr in source.names_in(function)
        ):
            return None
        name, text = target.attr, ast.unparse(target)
        uses = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and ast.unparse(n) == text]
        later = [n for n in uses if n is target or n.lineno > (node.end_lineno or line if node else line)]
        why = f"{text} is a parameter, and the result of a computation cannot take its place"
        return Verdict(
            source.cause(file, line, why),
            f"Give the result a name of its own here and below: {name} = {ast.unparse(node.value)}."  # type: ignore[union-attr]
            f" To change the parameter itself: with torch.no_grad(): {text}.copy_(...).",
            edits=[rewrite.in_place_of(file, n, name) for n in later],
        )
    return None


def whole_parameter(error: BaseException) -> Verdict | None:
    """Whole numbers that are to be trained: made floating point where the parameter is made."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call in source.call_on(file, line):
            if source.called_name(call) == "Parameter" and call.args:
                code = f"{rewrite.operand(call.args[0])}.float()"
                why = "these are whole numbers, which have no gradient"
                edits = [rewrite.in_place_of(file, call.args[0], code)]
                return Verdict(
                    source.cause(file, line, why), f"Make them floating point: {code}.", edits=edits
                )
    return None


def target_type(error: BaseException) -> Verdict | None:
    """A loss that wants floating-point targets and was given whole numbers or truth values."""
    for frame in frames_of(error):
        scores, target = frame.f_locals.get("input"), frame.f_locals.get("target")
        if not isinstance(scores, torch.Tensor) or not isinstance(target, torch.Tensor):
            continue
        if frame.f_code.co_name in ("cross_entropy", "nll_loss"):
            return None  # these count classes
        if not scores.is_floating_point() or target.is_floating_point():
            continue
        kind = str(target.dtype).removeprefix("torch.")
        return _cast_argument(
            error, "target", 1, f"the targets are {kind} here, and this loss wants floating point"
        )
    return None


def _cast_argument(error: BaseException, name: str, position: int, why: str) -> Verdict | None:
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call in source.call_on(file, line):
            given = source.keyword(call, name) or (call.args[position] if len(call.args) > position else None)
            # Of the calls on the line, the loss is the one that is given scores and targets.
            if (
                given is None
                or isinstance(given, ast.Starred | ast.Constant)
                or len(call.args) + len(call.keywords) < 2
            ):
                continue
            code = f"{rewrite.operand(given)}.float()"
            edits = [rewrite.in_place_of(file, given, code)]
            return Verdict(source.cause(file, given.lineno, why), f"Cast them: {code}.", edits=edits)
    return None


def hidden_size(error: BaseException) -> Verdict | None:
    """A recurrent layer's first state that is made for another number of rows than the batch has."""
    from trimtab.virtual import origin

    said = re.search(r"[Ee]xpected hidden(?:\[\d\])? size \(([\d, ]+)\), got \[([\d, ]+)\]", str(error))
    if said is None:
        return None
    wanted, got = ([int(n) for n in part.split(",") if n.strip()] for part in said.groups())
    for frame in frames_of(error):
        for value in list(frame.f_locals.values()):
            for tensor in value if isinstance(value, tuple | list) else (value,):
                shape = list(getattr(tensor, "shape", ()) or ())
                if shape != got or (born := origin.born_of(tensor)) is None:
                    continue
                sizes = [(w, g) for w, g in zip(wanted, got, strict=False) if w != g]
                why = f"this state is for {sizes[0][1]} rows and the batch has {sizes[0][0]}" if sizes else ""
                return Verdict(
                    source.cause(born.file, born.line, why),
                    "Make the state for the batch that comes (x.size(0) rows), or give the loader drop_last=True.",
                )
    return None
