"""Training that goes on in eval mode after an evaluation, and dropout that goes on in an evaluation.

A model that is trained in eval mode from the start, or layers that are put into it one by one (frozen batch norm), are
meant so. A fault is a model that was trained in training mode, was put into eval mode as a whole, ran without
gradients, and is trained on as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import dead_lines, flow, holders, rewrite, source
from trimtab.diagnose.finding import Edit, Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import (
    BaseCheck,
    around,
    plain_values,
    same_values,
    trained_by,
    watch_function,
)

_DROPOUTS = (F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)
_ENOUGH = 2
"""Steps in eval mode."""


@dataclass
class _Evaluation:
    """A call that put a whole module into eval mode."""

    model: ref[nn.Module]
    place: Place | None
    ran: bool = False
    """Whether something of it ran without gradients since."""


@dataclass
class _Layer:
    """A layer that works otherwise in training."""

    stepped_in_training: bool = False
    last: bool | None = None
    """The mode in which it last ran with gradients since the last step."""
    evaluation: _Evaluation | None = None
    steps: int = 0


class Modes(BaseCheck):
    """Follows the mode in which such layers run before each step."""

    def install(self) -> None:
        self._layers: WeakKeyDictionary[nn.Module, _Layer] = WeakKeyDictionary()
        self._switching = False
        self._found: tuple[_Evaluation, Place | None, str, list[Edit]] | None = None
        self._recurrent: tuple[_Evaluation, str, list[Edit]] | None = None
        """The evaluation from which a recurrent layer came back to training, and what is missing."""
        around(nn.Module, "train", self._train)
        for function in _DROPOUTS:
            watch_function(function, self._dropped)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)

    def _train(self, real: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
        if self._switching:
            return real(module, mode)
        self._switching = True
        try:
            result = real(module, mode)
        finally:
            self._switching = False
        switched = _Evaluation(ref(module), places.here())
        for layer in (child for child in module.modules() if child is not module and _is_followed(child)):
            self._layers.setdefault(layer, _Layer()).evaluation = None if mode else switched
        if mode and self._found is not None and self._found[0].model() is module:
            self._found = None
        return result

    def _forward(self, module: nn.Module, args: Any) -> None:
        if not _is_followed(module):
            return
        layer = self._layers.setdefault(module, _Layer())
        if not _differs(module):
            if torch.is_grad_enabled() and not module.training and layer.evaluation is not None:
                self._recurrent = layer.evaluation, *self._mend(layer.evaluation)
            return
        if torch.is_grad_enabled():
            layer.last = module.training
        elif layer.evaluation is not None and not module.training:
            layer.evaluation.ran = True

    def _dropped(self, caller: FrameType, args: tuple[Any, ...], result: Any) -> None:
        """`F.dropout(x)` is on unless it is told the mode: also in an evaluation of a module in eval mode."""
        frame = next(places.frames(), None) if not torch.is_grad_enabled() else None
        owner = frame.f_locals.get("self") if frame is not None else None
        if frame is None or not isinstance(owner, nn.Module) or owner.training:
            return
        # What is kept is scaled: where nothing changed it drops nothing (a layer in eval mode, a rate of 0).
        if same_values(plain_values(args[0]), plain_values(result)):
            return
        file, line = frame.f_code.co_filename, frame.f_lineno
        names = {function.__name__ for function in _DROPOUTS}
        calls = [c for c in source.call_on(file, line) if source.called_name(c) in names]
        calls = [c for c in calls if not isinstance(holders.value_of(c.func, frame), nn.Module)]
        told = len(calls) != 1 or len(calls[0].args) > 2
        if told or any(k.arg in ("training", None) for k in calls[0].keywords):
            return
        place = source.place(file, line)
        self.report(
            "eval-mode",
            f"{type(owner).__name__} is in eval mode, and this dropout drops all the same.",
            place,
            cause_at(place, "a dropout function is on unless it is given the mode of the module"),
            fix="Give it the mode: training=self.training.",
            op="dropout",
            once=f"{file}:{line}",
            edits=[rewrite.add_keyword(file, calls[0], "training", "self.training")],
        )

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for layer in list(self._layers.values()):
            ran, layer.last = layer.last, None
            if ran:
                layer.stepped_in_training, layer.steps = True, 0
            elif ran is False and layer.stepped_in_training:
                evaluation = layer.evaluation
                if evaluation is None or not evaluation.ran or not _trains(optimizer, evaluation.model()):
                    continue
                layer.steps += 1
                if layer.steps == _ENOUGH and self._found is None:
                    self._found = evaluation, places.here(), *self._mend(evaluation)

    def _mend(self, evaluation: _Evaluation) -> tuple[str, list[Edit]]:
        """The call that is missing, in the words of the function that steps, before its loop over the batches."""
        model = evaluation.model()
        for frame in places.frames():
            name = holders.expression_for(model, frame)
            if name is not None and (at := _before_rounds(frame)) is not None:
                code = f"{name}.train()"
                return code, [rewrite.before(frame.f_code.co_filename, at, code)]
        return "model.train()", []

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """cuDNN's refusal to go back through a recurrent layer in eval mode."""
        if self._recurrent is None or "cudnn RNN backward" not in str(error):
            return finding
        evaluation, code, edits = self._recurrent
        cause = cause_at(evaluation.place, "this puts the model into eval mode, and training goes on in it")
        fix = f"Switch back before training goes on: {code}."
        return replace(finding, kind="eval-mode", cause=cause or finding.cause, fix=fix, edits=edits)

    def finish(self) -> None:
        if self._found is None:
            return
        evaluation, stepped, code, edits = self._found
        if stepped is not None and dead_lines.uncalled(stepped.file, "train"):
            return  # that line is told of (`no_effect`)
        self.report(
            "eval-mode",
            "After an evaluation the model is trained on in eval mode: its dropout is off, and batch norm uses its "
            "running statistics and no longer learns them.",
            stepped,
            cause_at(evaluation.place, "this puts the model into eval mode, and nothing puts it back"),
            fix=f"Put it back before the next batches: {code}.",
            op="optimizer.step",
            edits=edits,
        )


def _trains(optimizer: Any, model: nn.Module | None) -> bool:
    """Whether an optimizer steps something of a model; another one may train what goes through it (an input)."""
    own = {id(p) for p in model.parameters()} if model is not None else set()
    return any(id(p) in own for p in trained_by(optimizer))


def _is_followed(module: nn.Module) -> bool:
    return _differs(module) or isinstance(module, nn.RNNBase)


def _differs(module: nn.Module) -> bool:
    """Whether a layer computes something else in training."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm) and module.track_running_stats


def _before_rounds(frame: FrameType) -> Any:
    """The statement before which a mode that holds for all batches is set: the loop over them, if another one is
    around it; else the first statement inside."""
    file = frame.f_code.co_filename
    loop = flow.loop_at(source.place(file, frame.f_lineno))
    if loop is None:
        return None
    return loop if flow.loop_at(source.place(file, loop.lineno)) is not None else loop.body[0]
