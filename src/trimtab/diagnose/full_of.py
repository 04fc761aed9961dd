"""What fills a GPU, where the stack or the line tells it: predictions that a Trainer gathers, outputs that DataParallel
does, layers that PEFT copies, passes that wait for one backward, the scores of all pairs of an attention."""

from __future__ import annotations

import ast
import gc
import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.diagnose import flow, holders, source
from trimtab.diagnose.finding import cause_at
from trimtab.diagnose.rules_common import Verdict
from trimtab.diagnose.scene import Scene
from trimtab.virtual import origin, state
from trimtab.virtual.origin import Origin

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


def saved_whole(scene: Scene, full: str, used: int) -> Verdict | None:
    """Whole layers that PEFT trains as copies, modules_to_save: each with gradients and an optimizer's state."""
    machine, here = state.machine(), scene.fault.frame
    copies: dict[str, int] = {}
    made: list[Any] = list(machine.modules) if machine is not None else []
    for module in made:
        if type(module).__name__ != "ModulesToSaveWrapper":
            continue
        name = type(module.original_module).__name__
        trained = [
            p for p in module.modules_to_save.parameters() if p.requires_grad and str(p.device) == full
        ]
        held = sum(p.numel() * p.element_size() for p in trained)
        copies[name] = copies.get(name, 0) + held
    held = sum(copies.values())
    if here is None or 4 * held < _SHARE * used:
        return None
    why = (
        f"PEFT trains whole copies of layers here ({', '.join(sorted(copies))}): {held / 2**30:.1f} GiB of weights "
        "beside the frozen ones, as much for gradients, and what the optimizer keeps of them"
    )
    fix = "Leave modules_to_save out of the LoraConfig, or name smaller layers in it."
    if "Embedding" in copies:
        fix = (
            "Train only the rows of the new tokens: LoraConfig(trainable_token_indices={name_of_the_embedding: [ids]}) "
            "in the place of modules_to_save."
        )
    files = dict.fromkeys(at.file for at in scene.fault.stack)
    lines = [(file, call.lineno) for file in files for call in source.calls(file, "get_peft_model")]
    file, line = lines[0] if lines else (here.file, here.line)
    return Verdict(source.cause(file, line, why), fix)


def gathered_by_data_parallel(scene: Scene, full: str, used: int) -> Verdict | None:
    """What nn.DataParallel brings from all its GPUs to one, and what is computed of it there."""
    kept: dict[int, tuple[int, Origin]] = {}
    for tensor in (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)):
        if type(tensor.grad_fn).__name__ == "GatherBackward" and str(tensor.device) == full:
            born = origin.born_of(tensor)
            if born is not None:
                count = tensor.numel() * tensor.element_size()
                kept[holders.storage_of(tensor)] = (count, born)
    held = sum(count for count, _ in kept.values())
    if held < _SHARE * used:
        return None
    _, line = max(kept.values(), key=lambda pair: pair[0])
    why = (
        f"nn.DataParallel brings what each GPU gives to {full} ({held / 2**30:.1f} GiB), and all that is computed of "
        "it, the loss too, is there alone"
    )
    fix = (
        "Compute the loss inside the module that DataParallel wraps, so that one number comes back of each GPU; or "
        "take DistributedDataParallel, a process for each GPU, which gathers nothing."
    )
    return Verdict(source.cause(line.file, line.line, why), fix)


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


def of_attention(line: Origin) -> str:
    """What to write where the scores of all pairs fill a GPU: attention by hand, or one that no fused kernel takes."""
    machine = state.machine()
    for handle, why in machine.plain_attention.items() if machine is not None else ():
        at = origin.resolve(handle)
        if at is not None and (at.file, at.line) == (line.file, line.line):
            anew = (
                " Lay them out so: q, k, v = (x.contiguous() for x in (q, k, v))."
                if "stride 1" in why
                else ""
            )
            return f"No fused kernel takes this attention, and the plain one keeps the scores of all pairs: {why}{anew}"
    if _weighs_by_softmax(line.file, line.line):
        return (
            "Compute it by torch.nn.functional.scaled_dot_product_attention(q, k, v): its fused kernels keep no scores "
            "of all pairs."
        )
    return ""


_PRODUCTS = ("matmul", "bmm", "einsum")


def _weighs_by_softmax(file: str, line: int) -> bool:
    """Whether a line makes a softmax that is multiplied, there or further down in its function."""
    statement, function = source.statement(file, line), source.function_at(file, line)
    if statement is None or function is None:
        return False
    made = [call for call in source.call_on(file, line) if source.called_name(call) == "softmax"]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            parts: list[ast.AST] = [node.left, node.right]
        elif isinstance(node, ast.Call) and source.called_name(node) in _PRODUCTS:
            parts = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        else:
            continue
        inside = [inner for part in parts for inner in ast.walk(part)]
        if made and (any(one in inside for one in made) or names & {getattr(n, "id", "") for n in inside}):
            return True
    return False
