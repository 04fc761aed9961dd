"""A layer's column of n numbers that meets a row of n, where no gradient tells which side was predicted: advantages,
bootstrapped targets, weights of rows. They become a square of all with all, and the loss its mean.

A column counts that a layer gave (also detached, scaled or joined), never one that the program made of a row. Speaks
where the square goes on number by number, meets a row or column again or has the loss' own graph, and is averaged as a
whole into what is sent backward, twice. A mask, a softmax or a sum along one side is somebody's purpose.
"""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import graphs, mends_losses, source
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, backward_hub, plain_values, same_values
from trimtab.rehearse.checks.losses import held_by_modules, operand
from trimtab.virtual import functions

_COLUMN, _SQUARE = "_trimtab_column", "_trimtab_square"
_SIGNS: dict[str, type[ast.operator]] = {"sub": ast.Sub, "add": ast.Add, "mul": ast.Mult, "div": ast.Div}
_EACH = {"neg", "pow", "abs", "square", "exp", "log", "clamp", "min", "max", "minimum", "maximum", "relu"}
_EACH |= {"detach", "clone", "to", "float", "rsub", "radd", "rmul", "rdiv", *_SIGNS}
_WHOLE = frozenset(("mean", "sum", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
_KEPT = 16


class Squares(BaseCheck):
    """Follows columns that layers give, and the squares that they become."""

    def install(self) -> None:
        self._met: dict[tuple[str, int], Finding] = {}
        """What is to be told of each line at which a column met a row, if it comes to that."""
        self._reached: Counter[tuple[str, int]] = Counter()
        self._sums: list[tuple[Any, tuple[str, int]]] = []
        self._listens = False
        nn.modules.module.register_module_forward_hook(self._layer)
        backward_hub().before.append(self._backward)

    def _layer(self, module: nn.Module, args: Any, result: Any) -> None:
        layer = type(module).__module__.startswith("torch.nn.modules") and module._parameters
        if layer and isinstance(result, torch.Tensor) and _is_column(result):
            result.__dict__[_COLUMN] = True
            if not self._listens:
                self._listens = True
                functions.AFTER.append(self._after)

    def _after(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not isinstance(result, torch.Tensor):
            return
        parts = args[0] if args and isinstance(args[0], list | tuple) else args
        given = [a for a in parts if isinstance(a, torch.Tensor)]
        squares = [a.__dict__[_SQUARE] for a in given if _SQUARE in a.__dict__]
        name = getattr(func, "__name__", "").strip("_").replace("truediv", "div")
        if squares:
            self._goes_on(name, given, squares, result)
        elif any(_COLUMN in a.__dict__ for a in given):
            if _is_column(result):
                if all(_is_column(a) or a.numel() == 1 for a in given):
                    result.__dict__[_COLUMN] = True
            elif name in _SIGNS and len(given) == 2:
                self._meet(name, args, result)

    def _meet(self, name: str, args: tuple[Any, ...], result: torch.Tensor) -> None:
        at = 0 if _COLUMN in args[0].__dict__ else 1
        column, row = args[at], args[1 - at]
        if row.shape != column.shape[:1] or len(row) < 2 or held_by_modules(row):
            return
        if same_values(plain_values(column.flatten()), plain_values(row)):
            return  # its own numbers: each is compared with every other on purpose
        frame = next(places.frames(), None)
        if frame is None:
            return
        key = (frame.f_code.co_filename, frame.f_lineno)
        if key not in self._met:
            place = source.place(*key)
            node = operand(place, frame, args, at, _SIGNS[name])
            fix, edits = mends_losses.squeezed(place, node)
            n = len(row)
            text = f"A layer's column [{n}, 1] meets a row [{n}]: the loss is the mean of all with all, [{n}, {n}]."
            cause = cause_at(place, "one side is a column and the other a row, which broadcast to a square")
            self._met[key] = Finding("wrong-loss", "fault", text, place, cause, fix, "broadcast", edits=edits)
        # A difference of which both sides, or the column alone, have a graph may be meant, or `Losses` tells it.
        own = name in ("mul", "div") if column.requires_grad else row.requires_grad
        result.__dict__[_SQUARE] = (key, own)

    def _goes_on(self, name: str, given: list[Any], squares: list[Any], result: torch.Tensor) -> None:
        key, n = squares[0][0], next(len(a) for a in given if _SQUARE in a.__dict__)
        others = [a for a in given if _SQUARE not in a.__dict__ and a.numel() > 1]
        if any(tuple(a.shape) not in ((n,), (n, 1)) for a in others):
            return
        own = bool(others) or any(one[1] for one in squares)
        if tuple(result.shape) == (n, n) and name in _EACH:
            result.__dict__[_SQUARE] = (key, own)
        elif result.dim() == 0 and name in _WHOLE and result.requires_grad and own:
            self._sums = [*self._sums[1 - _KEPT :], (result.grad_fn, key)]

    def _backward(self, roots: list[torch.Tensor], place: Place | None) -> None:
        sums, self._sums = self._sums, []
        near = {node for root in roots for node in graphs.distances(root.grad_fn, 256)} if sums else set()
        for key in {key for node, key in sums if node in near}:
            self._reached[key] += 1
            if self._reached[key] == 2:
                self.process.report(self._met[key])


def _is_column(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[1] == 1
