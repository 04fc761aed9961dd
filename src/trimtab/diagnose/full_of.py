"""What fills a GPU, where the stack tells it: predictions that a Trainer gathers, passes that wait for one backward."""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.diagnose import flow, holders, source
from trimtab.diagnose.finding import cause_at
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene

_SHARE = 0.1
"""The part of what a GPU holds from which on predictions are worth a word."""


def gathered_by_trainer(scene: Scene, full: str, used: int) -> Verdict | None:
    """Predictions of an evaluation of transformers' Trainer, which stay on the GPU until it ends."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_code.co_name == "evaluation_loop" and "all_preds" in frame.f_locals
    ):
        frame = frame.f_back
    here = scene.fault.frame
    if frame is None or here is None:
        return None
    kept = frame.f_locals["all_preds"]
    leaves = tree_leaves(getattr(kept, "tensors", kept))
    there = [one for one in leaves if isinstance(one, torch.Tensor) and str(one.device) == full]
    held = sum(one.numel() * one.element_size() for one in there)
    if held < _SHARE * used:
        return None
    why = (
        f"the Trainer keeps the predictions of every batch on {full} until the evaluation ends ({held / 2**30:.1f} GiB "
        "by now), and makes one tensor of them anew with each batch"
    )
    fix = (
        "Keep only what the metric needs, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), or "
        "bring them to the host batch by batch: eval_accumulation_steps=1 in TrainingArguments. A smaller batch keeps "
        "as many."
    )
    return Verdict(source.cause(here.file, here.line, why), fix)


def waiting_for_backward(scene: Scene) -> Verdict | None:
    """Passes of a loop whose losses are gathered, and sent backward only behind it: all their graphs are alive."""
    frame = holders.outside(scene.frames)
    if frame is None or not torch.is_grad_enabled():
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    loop = flow.loop_at(source.place(file, line))
    if loop is None or source.function_at(file, loop.lineno) is not source.function_at(file, line):
        return None
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    if any(isinstance(node, ast.Call) and "backward" in source.called_name(node) for node in inside):
        return None
    for node in inside:
        name = _gathers(node)
        passes = _graphs(frame.f_locals.get(name, frame.f_globals.get(name))) if name else 0
        if not name or not passes:
            continue
        many = f"the graphs of {passes} passes" if passes > 1 else "the graphs of all passes of this loop"
        why = f"{many} are alive here: `{name}` keeps each of them, and nothing is sent backward before the loop ends"
        fix = (
            f"Where only the sum or mean of `{name}` is trained on, send each loss backward as it is made, "
            "`(loss / number_of_passes).backward()` in the loop, and keep loss.detach() of it: gradients add up by "
            "themselves, and one pass is held at a time."
        )
        return Verdict(cause_at(source.place(file, getattr(node, "lineno", line)), why), fix)
    return None


def _gathers(node: ast.AST) -> str:
    """The name to which a node adds: a list that grows, or a sum."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[_]):
            return name
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
            return name
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(left=ast.Name(id=left), op=ast.Add())):
            return name if name == left else ""
    return ""


def _graphs(value: Any) -> int:
    """How many losses of earlier passes it is made of, as far as that can be seen."""
    if isinstance(value, list):
        return found if (found := sum(map(_graphs, value))) > 1 else 0
    return int(isinstance(value, torch.Tensor) and value.grad_fn is not None and value.numel() == 1)
