"""A batch of one row, of which batch norm can take no statistics: the line that makes such a batch.

A rehearsal says which loader gave the last batch; else the variables of its frames do. Runs none of the program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from trimtab.diagnose import holders, rewrite, source
from trimtab.diagnose.finding import Place
from trimtab.diagnose.raised_common import known_here, own_frames
from trimtab.diagnose.rules_common import Verdict


def lone_row(error: BaseException, giver: Any = None, made: Place | None = None) -> Verdict | None:
    """The loader whose last batch has one row (`giver`, if that is known, made at a line), else the slice that has."""
    if "more than 1 value per channel" not in str(error):
        return None
    if made is not None:
        calls = [c for c in source.call_on(made.file, made.line) if source.called_name(c) == "DataLoader"]
        return _left(error, giver, made.file, calls[0]) if len(calls) == 1 else None
    loops = list(_loops(error))
    for frame, name, held in known_here(error, _may_hold_loader):
        file = frame.f_code.co_filename
        inside = {name: held} if isinstance(held, DataLoader) else vars(held)
        for key, loader in inside.items():
            for call in source.calls(file, "DataLoader") if isinstance(loader, DataLoader) else ():
                node = source.statement(file, call.lineno)
                names = source.bound(node) | source.self_targets(node) if node is not None else set()
                only = len(source.calls(file, "DataLoader")) == 1
                if (key in names or only) and (said := _left(error, loader, file, call)):
                    return said
    return next((said for frame, loop in loops if (said := _sliced(frame, loop)) is not None), None)


def _left(error: BaseException, loader: Any, file: str, call: ast.Call) -> Verdict | None:
    """What a loader's numbers leave for the last batch, and the loader without it."""
    size: Any = getattr(loader, "batch_size", None)
    sampler: Any = getattr(loader, "sampler", None)
    rows = len(sampler) if hasattr(sampler, "__len__") else 0
    if size == 1:
        why = "this gives batches of 1 row, and batch norm needs 2 in training"
        return Verdict(source.cause(file, call.lineno, why), "Give it a batch_size of 2 or more.")
    if not size or loader.drop_last or rows <= size or rows % size != 1:
        return None
    if (said := _evaluated(error)) is not None:
        return said
    # One helper makes the loaders of training and of evaluation, which must lose no row.
    shuffle = source.keyword(call, "shuffle")
    chosen = (
        shuffle is not None and not isinstance(shuffle, ast.Constant) and isinstance(sampler, RandomSampler)
    )
    value = ast.unparse(shuffle) if chosen and shuffle is not None else "True"
    why = f"{rows} rows in batches of {size} leave a last batch of 1; batch norm needs 2"
    hidden = any(k.arg is None for k in call.keywords) and any(
        "drop_last" in (getattr(n, "value", None), getattr(n, "arg", None)) for n in source.walk(file)
    )
    return Verdict(
        source.cause(file, call.lineno, why),
        f"Leave the last rows of an epoch out: drop_last={value}.",
        edits=[] if hidden else [rewrite.add_keyword(file, call, "drop_last", value)],
    )


def _evaluated(error: BaseException) -> Verdict | None:
    """Rows that are only looked at: the model was to be in eval mode, and no row is to be left out."""
    for frame, line in own_frames(error):
        file = frame.f_code.co_filename
        function = source.function_at(file, line)
        around = [*source.contexts_around(file, line), *(function.decorator_list if function else ())]
        if not any("no_grad" in ast.unparse(n) or "inference_mode" in ast.unparse(n) for n in around):
            continue
        models = [
            c.func for c in source.call_on(file, line) if hasattr(holders.value_of(c.func, frame), "eval")
        ]
        name = ast.unparse(models[0]) if models else "the model"
        loop = next((n for f, n in _loops(error) if f is frame), None)
        why = "this is an evaluation in training mode, in which batch norm takes the statistics of its 1 row"
        again = f" (and {name}.train() before the next epoch)"
        edits = [rewrite.before(file, loop, f"{name}.eval()")] if models and loop is not None else []
        back = any(source.called_name(c) == "train" for c in source.calls(file))
        fix = f"Evaluate in eval mode, before the loop: {name}.eval(){again}."
        return Verdict(
            source.cause(file, loop.lineno if loop else line, why), fix, edits=edits if back else []
        )
    return None


def _loops(error: BaseException) -> Iterator[tuple[FrameType, ast.For]]:
    """The `for` loops in which the program's frames stand, innermost first."""
    for frame, line in own_frames(error):
        file = frame.f_code.co_filename
        node = source.statement(file, line)
        above = source.above(file, node) if node is not None else ()
        function = source.function_at(file, line)
        for n in above:
            if isinstance(n, ast.For) and source.function_at(file, n.lineno) is function:
                yield frame, n


def _sliced(frame: FrameType, loop: ast.For) -> Verdict | None:
    """A loop that cuts batches out of the rows: its last piece is one row."""
    file, call, target = frame.f_code.co_filename, loop.iter, loop.target
    why = "the last piece that this loop takes is 1 row; batch norm needs 2 in training"
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "range" and len(call.args) == 3:
        code = f"{rewrite.operand(call.args[1])} - 1"
        edits = [rewrite.in_place_of(file, call.args[1], code)]
        return Verdict(
            source.cause(file, loop.lineno, why),
            f"Begin no batch at the last row: {rewrite.after_edits(file, loop, edits)}",
            edits=edits,
        )
    rows: Any = frame.f_locals.get(target.id) if isinstance(target, ast.Name) else None
    names = {source.called_name(n) for n in ast.walk(call) if isinstance(n, ast.Call)}
    if (
        names & {"split", "chunk", "tensor_split", "array_split"}
        and hasattr(rows, "__len__")
        and len(rows) == 1
    ):
        code = f"if len({ast.unparse(target)}) < 2:\n    continue"
        edit = rewrite.before(file, loop.body[0], code)
        fix = f"Pass over a piece of one row, first thing in the loop: {' '.join(code.split())}."
        return Verdict(source.cause(file, loop.lineno, why), fix, edits=[edit])
    return None


def _may_hold_loader(value: Any) -> bool:
    own = getattr(value, "__dict__", None)
    return isinstance(value, DataLoader) or (
        isinstance(own, dict) and any(isinstance(inner, DataLoader) for inner in own.values())
    )
