"""Numbers that do not agree: rows that a data set promises, steps of a schedule, a last batch of one, saved shapes.

Each is decided by the numbers in the failing frames, never by the error's words alone. Runs none of the program's code.
"""

from __future__ import annotations

import ast
import re
from types import FrameType
from typing import Any

from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from trimtab.diagnose import flow, holders, mends_layers, rewrite, source, trace
from trimtab.diagnose.finding import Place, cause_at
from trimtab.diagnose.raised_common import own_frames, values_named
from trimtab.diagnose.rules_common import Verdict


def too_long(error: BaseException) -> Verdict | None:
    """A data set whose __len__ promises rows that its __getitem__ cannot give."""
    for frame, line in own_frames(error)[:1]:
        data, file = frame.f_locals.get("self"), frame.f_code.co_filename
        if (
            not isinstance(error, IndexError)
            or not isinstance(data, Dataset)
            or not hasattr(data, "__len__")
            or frame.f_code.co_name != "__getitem__"
        ):
            return None
        function = source.function_at(file, line)
        owner = source.class_at(file, line)
        sized = [
            n for n in (owner.body if owner else ()) if isinstance(n, source.Function) and n.name == "__len__"
        ]
        returns = [
            n for one in sized for n in ast.walk(one) if isinstance(n, ast.Return) and n.value is not None
        ]
        if function is None or len(function.args.args) != 2 or len(returns) != 1:
            return None
        index = function.args.args[1].arg
        for node in ast.walk(source.statement(file, line) or function):
            rows: Any = holders.value_of(node.value, frame) if isinstance(node, ast.Subscript) else None
            if not isinstance(node, ast.Subscript) or not hasattr(rows, "__len__"):
                continue
            asked, code = _asked(node, index, frame)
            if asked is None or asked < len(rows) or code == ast.unparse(returns[0].value or node):
                continue
            number = frame.f_locals.get(index)
            why = f"this promises {len(data)} rows, and row {number} asks for element {asked} of {len(rows)}"
            edits = [rewrite.in_place_of(file, returns[0].value or node, code)]
            return Verdict(
                source.cause(file, returns[0].lineno, why),
                f"Promise those that are there: return {code}.",
                edits=edits,
            )
    return None


def _asked(node: ast.Subscript, index: str, frame: FrameType) -> tuple[int | None, str]:
    """Which element `rows[i]` or `rows[i + offset]` asks for, and how many rows there are then."""
    base = ast.unparse(node.value)
    match node.slice:
        case ast.Name(id=name) if name == index:
            return holders.value_of(node.slice, frame), f"len({base})"
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add(), right=offset) if name == index:
            more = holders.value_of(offset, frame)
            first = frame.f_locals.get(index)
            if isinstance(more, int) and isinstance(first, int):
                return first + more, f"len({base}) - {rewrite.operand(offset)}"
    return None, ""


def too_many_steps(error: BaseException) -> Verdict | None:
    """A schedule for fewer steps than the program makes: the line that made it, with the loop's own length."""
    schedule = next((v for v in values_named(error, "self") if isinstance(v, LRScheduler)), None)
    if "Tried to step" not in str(error):
        return None
    for frame, line in own_frames(error)[:1] if schedule is not None else ():
        file = frame.f_code.co_filename
        at = source.place(file, line)
        receivers = [
            c.func.value
            for c in source.call_on(file, line)
            if isinstance(c.func, ast.Attribute) and c.func.attr == "step"
        ]
        place, made = _made(at, receivers[0]) if receivers else (at, None)
        if not isinstance(made, ast.Call):
            return None
        loop = flow.loop_at(at)
        batches = (
            next(
                (
                    n
                    for n in ast.walk(loop.iter)
                    if isinstance(n, ast.Name | ast.Attribute)
                    and isinstance(holders.value_of(n, frame), DataLoader)
                ),
                None,
            )
            if isinstance(loop, ast.For)
            else None
        )
        given = source.keyword(made, "steps_per_epoch")
        steps = getattr(schedule, "total_steps", "fewer")
        why = f"this makes the schedule for {steps} steps, and the loop steps it more often"
        cause = cause_at(source.place(place.file, (given or made).lineno), why)
        if batches is not None and given is not None and isinstance(given, ast.expr) and place.file == file:
            code = f"len({ast.unparse(batches)})"
            if ast.unparse(given) != code:
                edits = [rewrite.in_place_of(file, given, code)]
                return Verdict(
                    cause, f"Count the steps as the loop makes them: steps_per_epoch={code}.", edits=edits
                )
        return Verdict(
            cause,
            "Give it the number of all steps: the epochs times the batches of an epoch.",
        )
    return None


def _made(at: Place, node: ast.expr) -> tuple[Place, ast.expr]:
    place, value = trace.decided(at.file, at.line, node)
    owner = source.class_at(at.file, at.line)
    if value is node and isinstance(node, ast.Attribute) and owner is not None:
        return mends_layers.attribute_set(at.file, owner.name, node.attr) or (place, value)
    return place, value


def other_shapes(error: BaseException) -> Verdict | None:
    """A saved state with layers of another size (a new head): loaded without them."""
    names = re.findall(r"size mismatch for ([\w.]+): copying a param", str(error))
    layers = list(dict.fromkeys(name.rpartition(".")[0] + "." for name in names if "." in name))
    for frame, line in own_frames(error)[:1]:
        file = frame.f_code.co_filename
        call = next(
            (c for c in source.call_on(file, line) if source.called_name(c) == "load_state_dict"), None
        )
        if call is None or not call.args or not 0 < len(layers) <= 3 or isinstance(call.args[0], ast.Starred):
            return None
        prefix = repr(layers[0]) if len(layers) == 1 else f"({', '.join(map(repr, layers))})"
        state = rewrite.text_of(file, call.args[0])
        code = f"{{k: v for k, v in {state}.items() if not k.startswith({prefix})}}"
        edits = [rewrite.in_place_of(file, call.args[0], code)]
        if source.keyword(call, "strict") is None:
            edits = [rewrite.in_place_of(file, call.args[0], f"{code}, strict=False")]
        said = ", ".join(layers).replace(".,", ",").rstrip(".")
        why = f"{said} has another size in what is loaded than in this model"
        call_code = f"{ast.unparse(call.func)}({code}, strict=False)"
        fix = f"Leave it out, to start it anew: {call_code}; or build the model with the saved size."
        return Verdict(source.cause(file, line, why), fix, edits=edits)
    return None
