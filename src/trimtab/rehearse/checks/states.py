"""Weights that are kept or loaded to no effect: a state that is no copy, weights that are drawn anew after a load, ties
that a load or a move breaks.

A state_dict() gives the model's own tensors: one that is kept while training goes on holds the last weights, not those
of that moment. Speaks of a load only when all that it brings is the model's own memory, or is overwritten by one
drawing before anything has read it; of a tie only when both sides are trained apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from trimtab.diagnose import holders, mends_states, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, plain_values, same_values, shown

_DRAWN = (
    *("normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_"),
    *("kaiming_normal_", "orthogonal_"),
)


@dataclass(eq=False)
class _Loaded:
    module: ref[nn.Module]
    place: Place
    values: dict[str, torch.Tensor]
    """A sample of what was loaded, by name."""
    parts: set[int]
    """The ids of its modules: every call of a layer asks for them."""
    drawn: dict[int, list[Place]] = field(default_factory=dict)
    """The lines that drew a parameter anew before it was used, by its id."""


@dataclass(eq=False)
class _Tie:
    names: list[str]
    module: ref[nn.Module]
    place: Place
    steps: int = 0


class States(BaseCheck):
    """Follows states from where they are taken, and weights from where they are loaded, to their use."""

    def install(self) -> None:
        self._taken: Any = WeakIdKeyDictionary()
        """Where a state was taken and after how many steps, by its first tensor."""
        self._moments: dict[Place, set[int]] = {}
        """After how many steps a line has taken states that were not loaded in the same breath."""
        self._steps = 0
        self._loads: list[_Loaded] = []
        self._ties: list[_Tie] = []
        self._inside = 0
        around(nn.Module, "state_dict", self._state, outermost=True)
        around(nn.Module, "load_state_dict", self._load)
        around(nn.Module, "_apply", self._applied)
        for name in _DRAWN:
            around(nn.init, name, self._draw)
        nn.modules.module.register_module_forward_pre_hook(self._forward)
        register_optimizer_step_pre_hook(self._step)

    def _state(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._inside += 1
        try:
            state = real(module, *args, **kwargs)
        finally:
            self._inside -= 1
        if not self._inside and isinstance(state, Mapping) and (place := places.here()) is not None:
            first = next((v for v in state.values() if isinstance(v, torch.Tensor) and v.numel()), None)
            if first is not None and not isinstance(first, nn.Parameter):
                self._taken[first] = (place, self._steps)
                self._moments.setdefault(place, set()).add(self._steps)
        return state

    def _load(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", args[0] if args else None)
        before = _shared(module) if not self._inside else []
        if not self._inside and isinstance(given, Mapping):
            own = itertools.chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
            self._own_memory(dict(own), given)
        self._inside += 1
        try:
            result = real(module, *args, **kwargs)
        finally:
            self._inside -= 1
        place = places.here() if not self._inside else None
        if place is not None and isinstance(given, Mapping):
            self._broken(module, before, place)
            self._loads = [load for load in self._loads if load.module() is not module]
            some = (
                (name, plain_values(p))
                for name, p in module.named_parameters()
                if p.dim() > 1 and name in given
            )
            kept = {name: values.clone() for name, values in list(some)[:64] if values is not None}
            if kept:
                self._loads.append(_Loaded(ref(module), place, kept, {id(part) for part in module.modules()}))
        return result

    def _own_memory(self, own: dict[str, torch.Tensor], given: Mapping[str, Any]) -> None:
        """A load of a model's own tensors, taken before they were trained on."""
        tensors = [(own.get(k), v) for k, v in given.items() if isinstance(v, torch.Tensor) and v.numel()]
        if not tensors or not all(o is not None and holders.same(o, v) for o, v in tensors):
            return
        taken = next((self._taken[v] for _, v in tensors if v in self._taken), None)
        here = places.here()
        # Taken and loaded in one breath it does no harm, unless the same line has kept states of other moments.
        if taken is not None and taken[1] == self._steps:
            self._moments[taken[0]].discard(self._steps)
        if taken is None or here is None or (taken[1] == self._steps and not self._moments[taken[0]]):
            return
        if taken[0] == here:
            self._one_module(here)
            return
        fix, edits = mends_states.copied(taken[0])
        self.report(
            "no-effect",
            f"This loads a model's own weights into it: the state that was kept at line {taken[0].line} is no copy, "
            "and changes with the model.",
            here,
            cause_at(
                taken[0], "state_dict() gives the model's own tensors, which training goes on to change"
            ),
            fix=fix,
            op="load_state_dict",
            once=f"{taken[0].file}:{taken[0].line}",
            edits=edits,
        )

    def _one_module(self, here: Place) -> None:
        """`target.load_state_dict(policy.state_dict())` of two names for one module."""
        if (found := mends_states.one_module(here)) is None:
            return
        place, names, fix = found
        self.report(
            "no-effect",
            f"{names} are one module: what this line loads is what is there already.",
            here,
            cause_at(place, "this gives the same module a second name, and makes no copy"),
            fix=fix,
            op="load_state_dict",
            once=f"{place.file}:{place.line}",
        )

    def _draw(self, real: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(tensor, *args, **kwargs)
        for load in self._loads:
            lines = [source.place(f.f_code.co_filename, f.f_lineno) for f in places.frames()]
            if isinstance(tensor, torch.Tensor) and lines:
                load.drawn.setdefault(id(tensor), lines)
        return result

    def _forward(self, module: nn.Module, args: Any) -> None:
        for load in [load for load in self._loads if id(module) in load.parts]:
            self._loads.remove(load)
            whole = load.module()
            named = dict(whole.named_parameters()) if whole is not None else {}
            lost = [
                n for n, values in load.values.items() if not same_values(values, plain_values(named.get(n)))
            ]
            drawn = [load.drawn[id(named[n])] for n in lost if n in named and id(named[n]) in load.drawn]
            # A head that is made anew is meant; a whole model that is drawn again is not.
            if len(drawn) != len(load.values) or len(drawn) < 2:
                continue
            change, fix, edits = mends_states.drawn_before(load.place, drawn[-1])
            self.report(
                "no-effect",
                f"All weights that were loaded at line {load.place.line} are drawn at random again before they are "
                f"used: {shown(lost, 4)}.",
                load.place,
                cause_at(change, "this draws the weights anew, after they were loaded"),
                fix=fix,
                op="load_state_dict",
                edits=edits,
            )

    def _applied(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return real(module, *args, **kwargs)
        before = _shared(module)
        self._inside += 1
        try:
            result = real(module, *args, **kwargs)
        finally:
            self._inside -= 1
        if before and (place := places.here()) is not None:
            self._broken(module, before, place)
        return result

    def _broken(self, module: nn.Module, before: list[list[str]], place: Place) -> None:
        for names in before:
            if len({id(p) for p in _slots(module, names)}) > 1:
                self._ties.append(_Tie(names, ref(module), place))

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        for tie in list(self._ties):
            module = tie.module()
            slots = _slots(module, tie.names) if module is not None else []
            if len({id(p) for p in slots}) < 2:
                self._ties.remove(tie)  # tied again
                continue
            tie.steps += all(p.grad is not None for p in slots)
            if tie.steps == 2:
                fix, edits = mends_states.tied_again(tie.place, tie.names)
                self.report(
                    "no-effect",
                    f"{' and '.join(tie.names)} were one parameter before line {tie.place.line} and are two since, "
                    "trained apart.",
                    tie.place,
                    cause_at(tie.place, "this puts a new tensor in each place, and so breaks the tie"),
                    fix=fix,
                    op="tie",
                    edits=edits,
                )


def _shared(module: nn.Module) -> list[list[str]]:
    """The names of parameters that are one tensor; of modules without a hash nothing can be asked."""
    found: dict[int, list[str]] = {}
    if not _has_hash(module):
        return []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _has_hash(module: nn.Module) -> bool:
    parts = (part for part in module._modules.values() if part is not None)
    return type(module).__hash__ is not None and all(map(_has_hash, parts))


def _slots(module: nn.Module, names: list[str]) -> list[torch.Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    return [named[name] for name in names if name in named]
