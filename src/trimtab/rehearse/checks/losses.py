"""Losses that are given what they take for something else: probabilities for scores, a column against a row of numbers.

Nothing raises, and the loss even falls. What a loss was given is read from the graph behind it (the last operation that
is no mere view) and from shapes, never from names; two calls from one line, in training, are needed to speak. A square
of differences is a fault where the loss is its mean or sum: of a grid, a kernel or a ranking something else is asked.
"""

from __future__ import annotations

import ast
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.diagnose import graphs, holders, mends_losses, owners, source
from trimtab.diagnose.finding import Edit, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, backward_hub, watch_function
from trimtab.virtual import deeds, origin, state
from trimtab.virtual.wording import words

_VIEWS = words(
    """
    View Reshape UnsafeView Squeeze Unsqueeze Transpose Permute Alias Expand T Slice Select ToCopy Clone Index
    MaskedSelect Split Flatten
    """
)
_LAYERS = ("Addmm", "Mm", "Bmm", "Linear", "Convolution")
_MARK = "trimtab made"
_SOFT = (torch.softmax, torch.Tensor.softmax, F.softmax)
_SIGMOID = (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid)
_PLAIN_DIFFERENCES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_ERRORS = ("Pow", "Abs", "Mul", "Div", "Neg", "Add", "Sub", "Maximum", "Where", "Clamp", "Sqrt", "ToCopy")
"""What is done to differences on the way to their mean; whoever compares all with all takes a minimum, or an exp."""
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
        self._seen: dict[Place, int] = {}
        self._squares: list[tuple[Any, Place, str, str, list[Edit]]] = []
        """Differences of all with all since the last backward pass: their node, and what is to be said of them."""
        backward_hub().before.append(self._backward)
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
        if frame is None or made is None or not self._again(places.here()):
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
        place = places.here()
        if place is None or not self._again(place):
            return
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
        frame, place = next(places.frames(), None), places.here()
        if frame is None or place is None or self._seen.get(place, 0) > 1 or len(self._squares) > 63:
            return
        node = operand(place, frame, args, column)
        message = (
            f"Tensors of the shapes {list(args[0].shape)} and {list(args[1].shape)} are compared: each of the "
            f"{len(one)} predictions with the targets of all {len(one)} rows, so the model learns their mean."
        )
        made = result.grad_fn if result.dim() else None
        self._squares.append((made, place, message, *mends_losses.squeezed(place, node)))

    def _backward(self, roots: list[torch.Tensor], at: Place | None) -> None:
        squares, self._squares = self._squares, []
        users = graphs.users(roots, 512) if squares else {}
        for node, place, message, fix, edits in squares:
            if not _is_averaged(node, users) or not self._again(place):
                continue
            why = "one side is a column and the other a row, which broadcast to a square"
            once = f"{place.file}:{place.line}"
            self.report(
                "wrong-loss", message, place, cause_at(place, why), fix, "sub", once=once, edits=edits
            )

    def _again(self, place: Place | None) -> bool:
        """Whether this is the second time that a line does so."""
        if place is None:
            return False
        self._seen[place] = self._seen.get(place, 0) + 1
        return self._seen[place] == 2


def _is_averaged(node: Any, users: dict[Any, list[Any]]) -> bool:
    """Whether all that comes of differences (no node: a loss took it already) is the mean or sum of their sizes."""
    names = {user: user.name() for user in users.get(node, ())}
    inner = [user for user in names if names[user] not in ("MeanBackward0", "SumBackward0")]
    sizes = all(names[user].startswith((*_ERRORS, "Mean", "Sum")) for user in inner)
    return node is None or (bool(names) and sizes and all(_is_averaged(user, users) for user in inner))


def held_by_modules(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a buffer or parameter."""
    here = state.machine()
    held = (m._buffers.values() for m in (here.modules if here is not None else ()))
    return isinstance(tensor, nn.Parameter) or any(tensor is one for buffers in held for one in buffers)


def _activation(frame: FrameType) -> bool:
    return isinstance(frame.f_locals.get("self"), nn.Softmax | nn.Softmax2d | nn.Sigmoid)


def _placed(module: nn.Module, frame: FrameType) -> tuple[Place, nn.Module, str] | None:
    """The line that put an activation into a model, the module that holds it and under which name."""
    for owner in owners.modules_seen(frame):
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
    return name.startswith(tuple(_VIEWS))


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
