"""A layer and its input that do not fit, and what cannot be sent to a worker: the line that sized or defined it.

Reads the failing layer and its input from the traceback's frames and follows the layer's size to where it was decided.
"""

from __future__ import annotations

import ast
import re

import torch
from torch import nn

from trimtab.diagnose import rewrite, source, trace
from trimtab.diagnose.finding import cause_at
from trimtab.diagnose.raised_common import frames_of, own_frames
from trimtab.diagnose.rules_common import Verdict
from trimtab.virtual import origin

_SIZED = {
    nn.Linear: "in_features",
    nn.Conv1d: "in_channels",
    nn.Conv2d: "in_channels",
    nn.Conv3d: "in_channels",
}


def layer_width(error: BaseException) -> Verdict | None:
    """A layer made for another number of features than it is given; silent where the input could be reshaped to fit."""
    for frame in frames_of(error):
        layer, given = frame.f_locals.get("self"), frame.f_locals.get("input")
        word = _SIZED.get(type(layer))
        if layer is None or word is None or not isinstance(given, torch.Tensor) or given.dim() < 2:
            continue
        wide = int(getattr(layer, word))
        has = int(given.shape[-1] if word == "in_features" else given.shape[1])
        per_row = given[0].numel()
        if has == wide or wide in given.shape or per_row == wide:
            return None
        born = origin.born_of(layer.weight)
        if born is None or not source.is_user_file(born.file):
            return None
        for call in source.call_on(born.file, born.line):
            size = source.keyword(call, word) or next(iter(call.args), None)
            here = call.lineno <= born.line <= (call.end_lineno or 0)
            if not here or source.called_name(call) != type(layer).__name__ or size is None:
                continue
            if isinstance(size, ast.Constant) and size.value != wide:
                continue
            place, node = trace.decided(born.file, size.lineno, size)
            why = f"this makes the layer for {wide} features, and its input has {has} ({list(given.shape)})"
            say = (
                f"{ast.unparse(node)}: {word} has to come out as {has}"
                if node is not size
                else f"{word}={has}"
            )
            edits = [rewrite.in_place_of(born.file, size, str(has))] if node is size else []
            fix = f"Size the layer by its input: {say}; or give it rows of {wide}."
            return Verdict(cause_at(place, why), fix, edits=edits)
        return None
    return None


def not_sent(error: BaseException) -> Verdict | None:
    """The lambda, nested function or nested class that cannot be pickled, by the name that the error gives."""
    said = re.search(r"local object '([^']+)'", str(error))
    if said is None:
        return None
    *outer, last = said[1].replace(".<locals>", "").split(".")
    for file in dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error)):
        scopes: list[ast.AST] = [tree] if (tree := source.tree(file)) is not None else []
        for name in outer:
            scopes = [n for scope in scopes for n in ast.walk(scope) if getattr(n, "name", None) == name]
        found = {
            node.lineno
            for scope in scopes
            for node in ast.walk(scope)
            if isinstance(node, ast.Lambda | source.Function | ast.ClassDef)
            and (isinstance(node, ast.Lambda) if last == "<lambda>" else getattr(node, "name", None) == last)
        }
        if len(found) == 1:
            why = f"workers get the data set and collate_fn by pickle, and {said[1]} is local to a function"
            say = "Define it with def at the top of the module (functools.partial gives it what it needs from here)"
            return Verdict(source.cause(file, found.pop(), why), f"{say}, or make it a class with __call__.")
    return None
