"""Trainable parameters that never receive a gradient, and the line that cuts them off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.diagnose import flow, frozen, mends_graph, mends_leaf, source
from trimtab.diagnose.finding import Cause, Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, place_born, shown, trained_by
from trimtab.rehearse.checks.cuts import Cuts, leaves
from trimtab.rehearse.checks.freezes import freezes
from trimtab.virtual import origin
from trimtab.virtual.origin import Origin

_CONNECTED = (
    "Keep the loss connected to parameters that are trained: build it from the model's outputs (torch.stack and sums, "
    "no torch.tensor, .detach() or .item() on the way), and leave some parameter trainable."
)
_UNUSED = (
    "Keep the loss connected to these parameters (no .detach(), .item(), .data or torch.tensor(...) on the way, no "
    "torch.no_grad() around it), or leave them out of the optimizer."
)
_LOOKED_AT = 3
"""Backward passes whose graphs are searched for their leaves."""


@dataclass
class _Parameter:
    held: ref[torch.Tensor]
    number: int
    """Its id, which outlives it."""
    name: str = ""
    got: bool = False
    had: bool = False
    """Whether it had a gradient after some backward pass, though perhaps none at a step."""
    moved: Origin | None = None

    def has_gradient(self) -> bool:
        """Whether it is there, with a gradient."""
        return (parameter := self.held()) is not None and parameter.grad is not None


@dataclass
class _Optimizer:
    made: Place | None
    parameters: list[_Parameter] = field(default_factory=list)
    steps: int = 0
    stepped: Place | None = None


class Gradients(BaseCheck):
    """Follows optimizers and the leaves of the loss."""

    def install(self) -> None:
        self._optimizers: dict[int, _Optimizer] = {}
        self._ran: WeakSet[nn.Module] = WeakSet()
        self._passes = 0
        self._broken: Cause | None = None
        """Why a loss reaches no parameter."""
        self._mend: mends_graph.Mend | None = None
        """How that is mended, where the line shows it."""
        self._detached_at: Place | None = None
        self._reached = False
        self._cleared: Place | None = None
        self._told = False
        """Whether an error was already laid to a loss that reaches nothing."""
        self._cuts = Cuts()
        self._freezes = freezes()
        around(torch.optim.Optimizer, "add_param_group", self._add_group)
        around(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        around(nn.Module, "zero_grad", self._zero_grad)
        register_optimizer_step_pre_hook(self._step)
        # A closure given to step() computes the gradients inside it.
        register_optimizer_step_post_hook(self._look)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        hub = backward_hub()
        hub.before.append(self._before)
        hub.after.append(self._after)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._ran.add(module)

    def _zero_grad(self, real: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        self._cleared = places.here() or self._cleared
        return real(owner, *args, **kwargs)

    def _add_group(
        self, real: Callable[..., Any], optimizer: torch.optim.Optimizer, group: dict[str, Any]
    ) -> Any:
        result = real(optimizer, group)
        entry = self._optimizers.setdefault(id(optimizer), _Optimizer(places.here()))
        entry.parameters += [_Parameter(ref(p), id(p)) for p in optimizer.param_groups[-1]["params"]]
        return result

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        entry = self._optimizers.get(id(optimizer))
        if entry is None:
            return
        entry.steps += 1
        entry.stepped = entry.stepped or places.here()
        self._look(optimizer, args, kwargs)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        entry = self._optimizers.get(id(optimizer))
        if entry is None:
            return
        held = trained_by(optimizer)
        if [id(p) for p in held] != [known.number for known in entry.parameters]:
            # Libraries that shard a model put the sharded parameters in the place of those that were given.
            before = {known.number: known for known in entry.parameters}
            entry.parameters = [before.get(id(p)) or _Parameter(ref(p), id(p)) for p in held]
        names: dict[int, str] | None = None
        for known in entry.parameters:
            parameter = known.held()
            if known.got or parameter is None:
                continue
            # Of a flattened and sharded model, a rank may hold nothing of a parameter.
            if parameter.grad is not None or not parameter.requires_grad or not parameter.numel():
                known.got = True
            elif not known.name:
                names = self._names() if names is None else names
                known.name = names.get(id(parameter), "")
                known.moved = origin.moved_of(parameter)

    def _names(self) -> dict[int, str]:
        """For each parameter of a module that ran: its full name."""
        ran = list(self._ran)
        inner = {id(child) for module in ran for child in module.modules() if child is not module}
        return {
            id(parameter): name
            for module in ran
            if id(module) not in inner
            for name, parameter in module.named_parameters()
        }

    def _before(self, roots: list[torch.Tensor], place: Place | None) -> None:
        self._passes += 1
        if self._passes > _LOOKED_AT or not self._optimizers or self._reached:
            return
        trained = {known.number for known in self._known()}
        reached = [leaf for root in roots for leaf in leaves(root)]
        if any(isinstance(leaf, nn.Parameter) or id(leaf) in trained for leaf in reached):
            self._reached = True
        elif reached and self._broken is None:
            self._detached_at = place
            self._broken = self._why_broken(reached[0], place)
            if self._broken is not None and self._broken.line not in {
                place.line for place in self._made_at()
            }:
                self._mend = self._mend or mends_graph.of_cut(self._broken)

    def _made_at(self) -> list[Place]:
        """The lines that made optimizers: where one of them is the cause, there is no cut to mend."""
        return [entry.made for entry in self._optimizers.values() if entry.made is not None]

    def _known(self) -> list[_Parameter]:
        return [known for entry in self._optimizers.values() for known in entry.parameters]

    def _why_broken(self, leaf: torch.Tensor, place: Place | None) -> Cause | None:
        born = place_born(leaf)
        if not any((p := known.held()) is not None and p.requires_grad for known in self._known()):
            return self._why_frozen()
        if (made := self._for_another_model()) is not None:
            return cause_at(made, "none of the parameters given to this optimizer is in the model that ran")
        cut = self._cuts.last
        if leaf.requires_grad:
            trained = {known.number for known in self._known()}
            if cut and born and cut.behind & trained and mends_leaf.flagged_later(born):
                self._mend = mends_leaf.mend(cut.place, born, place)
                return cause_at(cut.place, "the graph ends here: what comes of it is made a leaf afterwards")
            return cause_at(
                born, "the loss is rebuilt here as a new leaf: no gradient reaches the parameters behind it"
            )
        if born is not None and (switch := flow.switch_around(born.file, born.line)) is not None:
            return cause_at(switch, "gradients are switched off here, and the loss is computed inside")
        if cut is not None and not (born is not None and cut.place.line > born.line):
            return cause_at(cut.place, "the graph of the loss ends here: only its value goes on")
        if dead := next(iter(self._cuts.without_grad.values()), None):
            return cause_at(dead, "gradients are switched off here, in front of the loss")
        compared = self._cuts.compared
        if compared is not None and compared.behind & {known.number for known in self._known()}:
            return cause_at(
                compared.place, "a comparison gives yes or no and has no gradient: the graph ends here"
            )
        return cause_at(born, "this has no graph: nothing that it is made from requires a gradient")

    def _for_another_model(self) -> Place | None:
        """Where the optimizer was made, if there is one alone and no module that ran has a parameter of it."""
        entries = list(self._optimizers.values())
        used = self._names()
        if len(entries) != 1 or not used or any(known.number in used for known in entries[0].parameters):
            return None
        return entries[0].made

    def _why_frozen(self) -> Cause | None:
        """No parameter of any optimizer is trainable: the last line that froze one, else the one that took them so."""
        held = [(p, known) for known in self._known() if (p := known.held()) is not None]
        deeds = [(deed, known) for p, known in held if (deed := self._freezes.of(p)) and not deed.trainable]
        last = max(deeds, key=lambda pair: pair[0].time, default=None)
        if last is not None and last[0].place is not None:
            place = frozen.said_by(last[0].place)
            names = self._names()
            self._mend = frozen.mend(place, [names.get(known.number, "") for _, known in deeds])
            if self._mend[0].startswith("No parameter is called") and (chosen := frozen.condition(place)):
                place = source.place(place.file, chosen.lineno)
            return cause_at(place, "this leaves no parameter trainable")
        made = next((entry.made for entry in self._optimizers.values() if entry.made is not None), None)
        return cause_at(made, "none of the parameters given to this optimizer is trainable")

    def _after(self) -> None:
        if self._passes <= _LOOKED_AT:
            for known in self._known():
                known.had |= known.has_gradient()

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """An error of the scaler or of backward often comes from a loss that was rebuilt as a new leaf."""
        if finding.kind not in {"scaler-misuse", "no-gradient"} or finding.edits:
            return finding
        if not self._reached and self._broken is not None:
            self._told = True
            fix, edits = self._mend or (_CONNECTED, [])
            return replace(finding, cause=self._broken, fix=fix, edits=edits)
        if finding.kind == "scaler-misuse" and finding.vague:
            for entry in self._optimizers.values():
                if entry.parameters and not any(known.had for known in entry.parameters):
                    why = "the loss reaches none of the parameters that this optimizer was given"
                    return replace(finding, cause=cause_at(entry.made, why) or finding.cause)
        return finding

    def finish(self) -> None:
        explained = self.process.explained
        trained = {p.number for optimizer in self._optimizers.values() for p in optimizer.parameters if p.got}
        for optimizer in self._optimizers.values():
            dead = [p for p in optimizer.parameters if not p.got and p.number not in explained]
            if len(dead) < len(optimizer.parameters):
                # Another optimizer trains them: losses that are stepped in turn share layers.
                dead = [p for p in dead if p.number not in trained]
            if self._told and len(dead) == len(optimizer.parameters):
                continue
            if dead and optimizer.steps:
                self._report_optimizer(optimizer, dead)

    def _made_anew(self, optimizer: _Optimizer, dead: list[_Parameter]) -> Cause | None:
        """What was given to the optimizer is in no module that ran: its name was bound to another one afterwards."""
        again = mends_graph.bound_again(optimizer.made) if not any(known.name for known in dead) else None
        if again is None or optimizer.made is None:
            return None
        edits = mends_graph.move_behind(again.file, optimizer.made, again)
        self._mend = f"Make the optimizer after line {again.line} ({again.code}).", edits
        self._broken = cause_at(
            optimizer.made,
            f"line {again.line} puts another model in the place of the one whose parameters this holds",
        )
        return self._broken

    def _report_optimizer(self, optimizer: _Optimizer, dead: list[_Parameter]) -> None:
        """Parameters that are merely unused can be meant; a fault is a loss that reaches nothing, or a cut graph."""
        cause, where = None, optimizer.stepped
        message = "Parameters in the optimizer never received a gradient, the loss does not use them"
        numbers = {known.number for known in dead}
        cut = self._cuts.in_front_of(numbers)
        # Evaluating or sampling in training mode says nothing of layers that ran with gradients as well.
        with_grad = {id(p) for module in self._ran for p in module._parameters.values()}
        off = self._cuts.without_grad
        switch = next((off[number] for number in numbers - with_grad if number in off), None)
        if len(dead) == len(optimizer.parameters):
            where = self._detached_at or where
            message = f"No parameter of the optimizer ever received a gradient in {optimizer.steps} steps"
            if any(known.had for known in dead) and self._cleared is not None:
                cause = cause_at(self._cleared, "this clears the gradients between backward and step")
            elif self._reached and dead[0].name and dead[0].moved is not None:
                why = "the parameters are moved here, while the graph of a loss still holds them as they were"
                cause = source.cause(dead[0].moved.file, dead[0].moved.line, why)
            elif cut is not None and self._broken is None:
                cause = cause_at(cut.place, "the graph is cut here, in front of these layers")
            else:
                cause = self._broken or cause_at(
                    optimizer.made, "none of the parameters given to this optimizer is reached by the loss"
                )
                cause = self._made_anew(optimizer, dead) or cause
        elif switch is not None:
            message = "Trainable parameters ran without gradients only, so they are never trained"
            cause = cause_at(switch, "gradients are switched off here, and these layers run inside")
        elif cut is not None and cut.goes_on:
            steps = optimizer.steps
            message = (
                f"Trainable parameters never received a gradient in {steps} steps, though their layers ran"
            )
            cause = cause_at(cut.place, "the graph is cut here, in front of these layers")
        cutting = cause is not None and cause.line not in {place.line for place in self._made_at()}
        fix, edits = (mends_graph.of_cut(cause) if cutting else None) or (_UNUSED, [])
        if cause is not None and cause == self._broken and self._mend is not None:
            fix, edits = self._mend
        self.report(
            "no-gradient",
            f"{message}: {shown([known.name or '(unnamed)' for known in dead])}.",
            where,
            cause,
            fix=fix,
            op="optimizer.step",
            edits=edits,
            severity="fault" if len(dead) == len(optimizer.parameters) or cause is not None else "warning",
        )
