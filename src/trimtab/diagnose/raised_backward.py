"""What a backward pass refuses at once: a loss of several values, a function of the program that returns too few.

Reads source and the objects of a traceback; changes nothing.
"""

from __future__ import annotations

import ast
import re

import torch

from trimtab.diagnose import holders, rewrite, source
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
