"""What a backward pass refuses at once: a loss of several values, a function of the program that returns too few.

Reads source and the objects of a traceback; changes nothing.
"""

from __future__ import annotations

import ast
import re

import torch

from trimtab.diagnose import flow, holders, rewrite, source
from trimtab.diagnose.finding import Edit
from trimtab.diagnose.raised_common import own_frames
from trimtab.diagnose.rules_common import Verdict

_COUNT = re.compile(
    r"function (\w+)Backward returned an incorrect number of gradients \(expected (\d+), got (\d+)\)"
)


def several_values(error: BaseException) -> Verdict | None:
    """A loss that is not one number: its mean, where it is sent backward."""
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        for call, owner in source.methods_on(file, line, "backward"):
            for given in (
                owner,
                *call.args,
                *(a for n in ast.walk(owner) if isinstance(n, ast.Call) for a in n.args),
            ):
                value = holders.value_of(given, frame)
                if not isinstance(value, torch.Tensor) or value.numel() == 1:
                    continue
                why = f"{ast.unparse(given)} has {value.numel()} values, and only one number can be sent backward"
                edits = [rewrite.in_place_of(file, given, f"{rewrite.operand(given)}.mean()")]
                fix = f"Send their mean backward: {rewrite.shown(edits)}."
                return Verdict(source.cause(file, line, why), fix, edits=edits)
    return None


def gradient_count(error: BaseException) -> Verdict | None:
    """A backward of the program's own that returns fewer gradients than forward has inputs: None for the others."""
    found = _COUNT.search(str(error))
    files = dict.fromkeys(frame.f_code.co_filename for frame, _ in own_frames(error))
    for file in files if found is not None else ():
        for owner in source.walk(file):
            if found is None or not isinstance(owner, ast.ClassDef) or owner.name != found[1]:
                continue
            methods = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)}
            backward = methods.get("backward")
            returns = [n for n in ast.walk(backward) if isinstance(n, ast.Return)] if backward else []
            value = returns[-1].value if returns else None
            if value is None:
                continue
            why = f"forward takes {found[2]} inputs, and a gradient is returned for {found[3]}"
            missing = int(found[2]) - int(found[3])
            parts = value.elts if isinstance(value, ast.Tuple) else [value]
            code = ", ".join([*map(ast.unparse, parts), *["None"] * missing])
            edits: list[Edit] = (
                [rewrite.in_place_of(file, value, code)] if missing > 0 and len(returns) == 1 else []
            )
            fix = (
                f"Return one for every input, None where there is none: return {code}." if missing > 0 else ""
            )
            return Verdict(source.cause(file, returns[-1].lineno, why), fix, edits=edits)
    return None


def marked_late(error: BaseException) -> Verdict | None:
    """A gradient is asked for a tensor that required none when the output was computed: marked before that."""
    for frame, line in own_frames(error):
        file, node = frame.f_code.co_filename, source.statement(frame.f_code.co_filename, line)
        block = flow.block_of(file, node)
        earlier = block[: block.index(node)] if node in block else []
        names = source.names_in(node) if node is not None else set()
        known = {n: v for n in sorted(names) if isinstance(v := frame.f_locals.get(n), torch.Tensor)}
        for name, value in known.items():
            made = [n for n in earlier if source.bound(n) & names - {name} and name in source.names_in(n)]
            marks = [n for n in earlier if _marks(n, name)]
            late = bool(made) and all(mark.lineno > made[-1].lineno for mark in marks)
            if not value.is_leaf or not late or value.requires_grad != bool(marks):
                continue
            code = f"{name}.requires_grad_(True)"
            why = f"{name} does not require a gradient yet when line {made[-1].lineno} computes with it"
            edits = [rewrite.before(file, made[-1], code), *(rewrite.without(file, mark) for mark in marks)]
            at = marks[-1] if marks else made[-1]
            fix = f"Mark it before line {made[-1].lineno}: {code}."
            return Verdict(source.cause(file, at.lineno, why), fix, edits=edits)
    return None


def _marks(node: ast.stmt, name: str) -> bool:
    """Whether a statement only makes a tensor of this name require a gradient."""
    value = getattr(node, "value", None)
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(value, "func", None)
    return ast.unparse(target).removesuffix("_") == f"{name}.requires_grad" if target is not None else False
