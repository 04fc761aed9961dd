"""Trainable parameters that never receive a gradient, and the line that cuts them off."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose.finding import Cause, Finding, Place
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, place_born, shown
from trimtab.virtual import functions

_LOOKED_AT = 3
"""Backward passes whose graphs are searched for their leaves."""


@dataclass
class _Parameter:
    held: ref[torch.Tensor]
    name: str = ""
    got: bool = False
    ran: bool = False
    """Whether a torch layer that surely uses it ran with gradients on."""


@dataclass
class _Optimizer:
    made: Place | None
    parameters: list[_Parameter] = field(default_factory=list)
    steps: int = 0
    stepped: Place | None = None


@dataclass
class _Checkpoint:
    """A re-entrant checkpoint none of whose inputs needs a gradient."""

    place: Place | None
    parameters: list[_Parameter]


class Gradients(BaseCheck):
    """Follows optimizers, re-entrant checkpoints and the leaves of the loss."""

    def install(self) -> None:
        self._optimizers: dict[int, _Optimizer] = {}
        self._checkpoints: dict[Place | None, _Checkpoint] = {}
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._passes = 0
        self._leaf: Place | None = None
        self._detached_at: Place | None = None
        self._reached = False
        self._cuts: dict[tuple[str, int], set[int]] = {}
        """Lines of the user's code that detach a tensor, with the ids of the parameters behind it."""
        around(torch.optim.Optimizer, "add_param_group", self._add_group)
        register_optimizer_step_pre_hook(self._step)
        around(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        for function in (torch.Tensor.detach, torch.Tensor.data.__get__):  # type: ignore[attr-defined]
            functions.HANDLERS[function] = self._detach(functions.HANDLERS.get(function, functions.call))
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._ran.add(module)

    def _detach(self, real: functions.Handler) -> functions.Handler:
        def detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # One frame up is the function mode, two up the line that asked.
            caller = sys._getframe(2)
            if args[0].grad_fn is not None and places.is_user_file(caller.f_code.co_filename):
                key = (caller.f_code.co_filename, caller.f_lineno)
                if key not in self._cuts:
                    self._cuts[key] = {id(leaf) for leaf in _leaves(args[0])}
            return real(func, args, kwargs)

        return detach

    def _add_group(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def add(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Any:
            result = real(optimizer, group)
            entry = self._optimizers.setdefault(id(optimizer), _Optimizer(places.here()))
            entry.parameters += [_Parameter(ref(p)) for p in optimizer.param_groups[-1]["params"]]
            return result

        return add

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        entry = self._optimizers.get(id(optimizer))
        if entry is None:
            return
        entry.steps += 1
        entry.stepped = entry.stepped or places.here()
        owners: dict[int, tuple[str, bool]] | None = None
        for known in entry.parameters:
            parameter = known.held()
            if known.got or parameter is None:
                continue
            if parameter.grad is not None or not parameter.requires_grad:
                known.got = True
            elif not known.name or not known.ran:
                owners = self._owners() if owners is None else owners
                known.name, known.ran = owners.get(id(parameter), (known.name, False))

    def _owners(self) -> dict[int, tuple[str, bool]]:
        """For each parameter of a module that ran: its full name, and whether a layer of torch's own uses it."""
        ran = list(self._ran)
        inner = {id(child) for module in ran for child in module.modules() if child is not module}
        found: dict[int, tuple[str, bool]] = {}
        for module in ran:
            if id(module) in inner:
                continue
            for path, owner in module.named_modules():
                used = owner in self._ran and type(owner).__module__.startswith("torch.nn")
                for name, parameter in owner._parameters.items():
                    if parameter is not None:
                        found[id(parameter)] = (f"{path}.{name}" if path else name, used)
        return found

    def _checkpoint(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
            if kwargs.get("use_reentrant") is not False and torch.is_grad_enabled() and not needed:
                self._cut_off(function)
            return real(function, *args, **kwargs)

        return checkpoint

    def _cut_off(self, function: Any) -> None:
        trainable = [
            _Parameter(ref(parameter), name)
            for module in _modules_of(function)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]
        place = places.here()
        if trainable and place not in self._checkpoints:
            self._checkpoints[place] = _Checkpoint(place, trainable)

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._passes += 1
        if self._passes > _LOOKED_AT or not self._optimizers or self._reached:
            return
        leaves = [leaf for root in roots for leaf in _leaves(root)]
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            self._reached = True
        elif leaves:
            self._leaf = self._leaf or place_born(leaves[0])
            self._detached_at = self._detached_at or place

    def _after(self) -> None:
        for cut in self._checkpoints.values():
            for known in cut.parameters:
                parameter = known.held()
                known.got |= parameter is not None and parameter.grad is not None

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """An error of the scaler or of backward often comes from a loss that was rebuilt as a new leaf."""
        if finding.kind in {"scaler-misuse", "no-gradient"} and self._leaf is not None and not self._reached:
            return replace(finding, cause=self._leaf_cause())
        return finding

    def _leaf_cause(self) -> Cause | None:
        return places.cause_at(
            self._leaf, "the loss is rebuilt here as a new leaf: no gradient reaches the parameters behind it"
        )

    def finish(self) -> None:
        explained = self.process.explained
        for cut in self._checkpoints.values():
            dead = [known for known in cut.parameters if not known.got]
            if dead and self._passes:
                explained |= {id(known.held()) for known in dead if known.held() is not None}
                self._report_checkpoint(cut, dead)
        for optimizer in self._optimizers.values():
            dead = [
                known for known in optimizer.parameters if not known.got and id(known.held()) not in explained
            ]
            if dead and optimizer.steps:
                self._report_optimizer(optimizer, dead)

    def _report_checkpoint(self, cut: _Checkpoint, dead: list[_Parameter]) -> None:
        self.process.report(
            Finding(
                kind="no-gradient",
                message="None of the inputs of a re-entrant checkpoint requires a gradient, so the trainable "
                f"parameters inside never receive one: {shown([known.name for known in dead])}.",
                where=cut.place,
                cause=places.cause_at(
                    cut.place, "re-entrant checkpointing passes gradients on only if an input requires one"
                ),
                fix="Use checkpoint(..., use_reentrant=False), or make the input require a gradient: "
                "x.requires_grad_(True) (model.enable_input_require_grads() for transformers).",
                op="torch.utils.checkpoint",
            )
        )

    def _cut_at(self, dead: set[int]) -> Cause | None:
        for (file, line), behind in self._cuts.items():
            if dead & behind:
                return places.cause_at(
                    places.place_of(file, line), "the graph is cut here, in front of these layers"
                )
        return None

    def _report_optimizer(self, optimizer: _Optimizer, dead: list[_Parameter]) -> None:
        everything = len(dead) == len(optimizer.parameters)
        certain = [known for known in dead if known.ran]
        names = shown([known.name or "(unnamed)" for known in (certain or dead)])
        if everything:
            cause = self._leaf_cause() or places.cause_at(
                optimizer.made, "none of the parameters given to this optimizer is reached by the loss"
            )
            message = (
                f"No parameter of the optimizer ever received a gradient in {optimizer.steps} steps: {names}."
            )
        elif certain:
            cause = self._cut_at({id(known.held()) for known in certain})
            message = (
                f"Trainable parameters never received a gradient in {optimizer.steps} steps, though their layers "
                f"ran: {names}."
            )
        else:
            cause = None
            message = f"Parameters in the optimizer never received a gradient and are not used: {names}."
        self.process.report(
            Finding(
                kind="no-gradient",
                severity="fault" if everything or certain else "warning",
                message=message,
                where=(self._detached_at if everything else None) or optimizer.stepped,
                cause=cause,
                fix="Keep the loss connected to these parameters (no .detach(), .item(), .data or torch.tensor(...) "
                "on the way, no torch.no_grad() around it), or leave them out of the optimizer.",
                op="optimizer.step",
            )
        )


def _leaves(root: torch.Tensor, most: int = 4000) -> Iterator[torch.Tensor]:
    """The leaves that a backward pass from here would reach."""
    if root.grad_fn is None:
        yield root
        return
    queue, seen = deque([root.grad_fn]), {root.grad_fn}
    while queue and len(seen) < most:
        node: Any = queue.popleft()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


def _modules_of(function: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules that a function to be checkpointed would call."""
    if isinstance(function, nn.Module):
        yield function
        return
    if depth == 0 or function is None:
        return
    if isinstance(function, functools.partial):
        for thing in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(thing, depth - 1)
        return
    yield from _modules_of(getattr(function, "__self__", None), depth - 1)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            contents = cell.cell_contents
        except ValueError:
            continue
        if isinstance(contents, nn.Module) or callable(contents):
            yield from _modules_of(contents, depth - 1)
