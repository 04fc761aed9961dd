"""Losses that are given what they take for something else: probabilities for scores, a column against a row of numbers.

Nothing raises, and the loss even falls. What a loss was given is read from the graph behind it (the last operation that
is no mere view) and from shapes, never from names; two calls from one line, in training, are needed to speak.
"""

from __future__ import annotations

import ast
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.diagnose import holders, mends_losses, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, watch_function
from trimtab.virtual import deeds, origin, state

_VIEWS = (
    *(
        "View",
        "Reshape",
        "UnsafeView",
        "Squeeze",
        "Unsqueeze",
        "Transpose",
        "Permute",
        "Alias",
        "Expand",
        "T",
    ),
    *("Slice", "Select", "ToCopy", "Clone", "Index", "MaskedSelect", "Split", "Flatten"),
)
_LAYERS = ("Addmm", "Mm", "Bmm", "Linear", "Convolution")
_MARK = "trimtab made"
_SOFT = (torch.softmax, torch.Tensor.softmax, F.softmax)
_SIGMOID = (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid)
_PLAIN_DIFFERENCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_DIFFERENCES = (torch.Tensor.sub, torch.sub, torch.Tensor.__sub__)
_TAKES = {
    F.cross_entropy: ("Softmax", "scores: it takes their softmax itself, so it is taken twice"),
    F.binary_cross_entropy_with_logits: (
        "Sigmoid",
        "scores: it takes their sigmoid itself, so it is taken twice",
    ),
    F.nll_loss: ("Softmax", "logarithms of probabilities"),
    F.kl_div: ("Softmax", "logarithms of probabilities"),
}
"""What a loss must not be given, and what it takes its input for."""


class Losses(BaseCheck):
    """Looks at what losses are given."""

    def install(self) -> None:
        self._seen: dict[tuple[str, int], int] = {}
        for function in (*_SOFT, *_SIGMOID):
            watch_function(function, self._made)
        for loss in _TAKES:
            watch_function(loss, partial(self._given, loss))
        for difference in (*_PLAIN_DIFFERENCES, *_DIFFERENCES):
            watch_function(difference, partial(self._compared, difference in _PLAIN_DIFFERENCES))

    def _made(self, caller: FrameType, args: tuple[Any, ...], result: Any) -> None:
        """Remember in the graph which line, or which module of its own, made probabilities."""
        if not isinstance(result, torch.Tensor) or result.grad_fn is None:
            return
        frame = next(places.frames(), None)
        if frame is not None:
            inner: FrameType | None = caller
            while inner is not None and inner is not frame and not _activation(inner):
                inner = inner.f_back
            module = inner.f_locals["self"] if inner is not None and _activation(inner) else None
            made: Any = result.grad_fn
            made.metadata[_MARK] = (frame.f_code.co_filename, frame.f_lineno, module)

    def _given(self, loss: Any, caller: FrameType, args: tuple[Any, ...], result: Any) -> None:
        wrong, means = _TAKES[loss]
        scores = args[0] if args else None
        node = _behind(scores) if isinstance(scores, torch.Tensor) and torch.is_grad_enabled() else None
        if node is None:
            return
        if not node.name().startswith(wrong):
            if loss is F.nll_loss and node.name().startswith(_LAYERS) and _some_positive(scores):
                self._unnormalised()
            return
        frame = next(places.frames(), None)
        made = node.metadata.get(_MARK)
        if frame is None or made is None or not self._again(frame):
            return
        at, module = source.place(*made[:2]), made[2]
        word = "softmax" if wrong == "Softmax" else "sigmoid"
        said = "probabilities" if loss in (F.cross_entropy, F.binary_cross_entropy_with_logits) else word
        place, fix, edits = mends_losses.without_activation(
            at, _placed(module, frame) if module is not None else None, word, loss in (F.nll_loss, F.kl_div)
        )
        self.report(
            "wrong-loss",
            f"{loss.__name__} is given the result of a {word} and takes it for {means}.",
            source.place(frame.f_code.co_filename, frame.f_lineno),
            cause_at(place, f"this makes {said} of the scores before the loss gets them"),
            fix=fix,
            op=loss.__name__,
            once=f"{place.file}:{place.line}",
            edits=edits,
        )

    def _unnormalised(self) -> None:
        frame = next(places.frames(), None)
        if frame is None or not self._again(frame):
            return
        place = source.place(frame.f_code.co_filename, frame.f_lineno)
        fix, edits = mends_losses.with_log_softmax(place)
        self.report(
            "wrong-loss",
            "nll_loss is given a layer's plain scores, some above 0, and takes them for logarithms of probabilities: "
            "it has no least value.",
            place,
            cause_at(place, "the scores reach the loss without log_softmax"),
            fix=fix,
            op="nll_loss",
            once="unnormalised",
            edits=edits,
        )

    def _compared(self, is_loss: bool, caller: FrameType, args: tuple[Any, ...], result: Any) -> None:
        """A column of n predictions against n numbers in a row: every one is compared with every other."""
        if (
            len(args) < 2
            or not torch.is_grad_enabled()
            or not all(isinstance(a, torch.Tensor) for a in args[:2])
        ):
            return
        column = next((n for n in (0, 1) if args[n].dim() == 2 and args[n].shape[1] == 1), None)
        if column is None or args[1 - column].shape != args[column].shape[:1] or len(args[column]) < 2:
            return
        one, other = args[column], args[1 - column]
        predicted, known = (one, other) if one.requires_grad else (other, one)
        if not predicted.requires_grad or known.requires_grad or known.dim() == 0:
            return
        if held_by_modules(known):
            return  # a grid of its own, not the targets of these rows
        # Whoever compares all with all makes the column on purpose, by a view of a row.
        if not is_loss and (one is not predicted or _is_view(one)):
            return
        frame = next(places.frames(), None)
        if frame is None or not self._again(frame):
            return
        place = source.place(frame.f_code.co_filename, frame.f_lineno)
        node = operand(place, frame, args, column)
        fix, edits = mends_losses.squeezed(place, node)
        shapes = f"{list(args[0].shape)} and {list(args[1].shape)}"
        self.report(
            "wrong-loss",
            f"Tensors of the shapes {shapes} are compared: each of the {len(one)} predictions with the targets of all "
            f"{len(one)} rows, so the model learns their mean.",
            place,
            cause_at(place, "one side is a column and the other a row, which broadcast to a square"),
            fix=fix,
            op="sub" if not is_loss else "loss",
            once=f"{place.file}:{place.line}",
            edits=edits,
        )

    def _again(self, frame: FrameType) -> bool:
        """Whether this is the second time that a line does so."""
        key = (frame.f_code.co_filename, frame.f_lineno)
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] == 2


def held_by_modules(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a buffer or parameter."""
    here = state.machine()
    held = (m._buffers.values() for m in (here.modules if here is not None else ()))
    return isinstance(tensor, nn.Parameter) or any(tensor is one for buffers in held for one in buffers)


def _activation(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), nn.Softmax | nn.Softmax2d | nn.Sigmoid)


def _placed(module: nn.Module, frame: FrameType) -> tuple[Place, nn.Module, str] | None:
    """The line that put an activation into a model, the module that holds it and under which name."""
    for owner in holders.modules_seen(frame):
        for name, child in owner._modules.items():
            put = deeds.placement(owner, name) if child is module else None
            line = origin.resolve(put.line) if put is not None else None
            if line is not None:
                return source.place(line.file, line.line), owner, name
    return None


def _behind(tensor: torch.Tensor) -> Any:
    """The last operation behind a tensor that is no mere view, if there is one way back to it."""
    node: Any = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0").rstrip("0123456789") in _VIEWS:
        following = [n for n, _ in node.next_functions if n is not None]
        node = following[0] if following else None
    return node


def _is_view(tensor: torch.Tensor) -> bool:
    name = tensor.grad_fn.name() if tensor.grad_fn is not None else "View"
    return name.startswith(_VIEWS)


def _some_positive(tensor: Any) -> bool:
    with torch.no_grad():
        return tensor.device.type != "meta" and bool((tensor.detach() > 1e-3).any())


def operand(
    place: Place, frame: FrameType, args: tuple[Any, ...], column: int, kind: type[ast.operator] = ast.Sub
) -> ast.expr | None:
    """The expression on a line that is the column."""
    statement = source.statement(place.file, place.line)
    nodes = list(source.header(statement)) if statement is not None else []
    pairs: list[list[ast.expr]] = [
        [n.left, n.right] for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, kind)
    ]
    pairs += [n.args[:2] for n in nodes if isinstance(n, ast.Call) and len(n.args) >= 2]
    for pair in pairs:
        if any(holders.value_of(node, frame) is value for node, value in zip(pair, args, strict=False)):
            return pair[column]
    return pairs[0][column] if len(pairs) == 1 else None
