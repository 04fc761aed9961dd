"""Forward passes with changed weights, several at once, without a write to any weight.

A pass carries lanes, stacked in the batch dimension: rows 0..R-1 are lane 0, the next R lane 1, and so on. While it
runs, each module that owns tuned tensors has another forward, which makes the tensors of each lane in scratch and uses
them for that lane's rows. A frozen module is left alone and runs once for all lanes. When the pass ends, by an error
too, every module is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trimtab.errors import RequestError
from trimtab.zeroth.parameters import Tuned
from trimtab.zeroth.sweep import Change, Directions, Sweep

# These read their children's weights themselves, past the children's forward.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Rows of a large layer that are multiplied at a time, in multiples of this: matmul libraries block by powers of two.
_ROW_BLOCK = 512
# Scratch for changed weights: this share of the tuned elements at most, but never less than the floor.
_SCRATCH_SHARE = 64
_SCRATCH_FLOOR = 1 << 21


@dataclass(frozen=True, eq=False)
class _Unit:
    """A module that owns tuned tensors: itself, or in children that have no forward of their own."""

    name: str
    module: nn.Module
    slots: list[tuple[nn.Module, str, Tuned]]

    def tuned(self, parameter: str) -> Tuned | None:
        return next((t for owner, n, t in self.slots if owner is self.module and n == parameter), None)


@dataclass
class _Pass:
    change: Change
    lanes: tuple[int, ...]
    """The lanes whose rows are in the batch just now: one alone inside a module that runs lane by lane."""
    leading: frozenset[int] = frozenset()
    """Sizes that the first dimension may have: rows, or rows times positions."""

    def note_shape(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        first = next(_tensors((args, kwargs)), None)
        if first is not None and first.dim() > 0:
            rows = first.shape[0]
            self.leading = frozenset((rows, rows * first.shape[1]) if first.dim() > 1 else (rows,))


class LaneModules:
    """The modules of a model that own its tuned tensors, and the passes through them."""

    def __init__(self, model: nn.Module, tuned: Sequence[Tuned], sweep: Sweep) -> None:
        self.model, self.sweep = model, sweep
        self.units = _units(model, tuned)
        self.called: set[str] = set()
        self._limit = max(_SCRATCH_FLOOR, sum(t.parameter.numel() for t in tuned) // _SCRATCH_SHARE)

    @contextmanager
    def running(self, change: Change, lanes: Sequence[int]) -> Iterator[None]:
        """Inside, a forward of the model is a pass with these lanes of the change."""
        state = _Pass(change, tuple(lanes))
        with ExitStack() as undo:
            hook = self.model.register_forward_pre_hook(state.note_shape, with_kwargs=True)
            undo.callback(hook.remove)
            for unit in self.units:
                if not any(change.moves(t) for _, _, t in unit.slots):
                    continue
                # Accelerate's hook sits in `forward` and calls the module's own through `_old_forward`.
                name = "_old_forward" if "_old_forward" in unit.module.__dict__ else "forward"
                own = getattr(unit.module, name)
                undo.callback(_put_back, unit.module, name, unit.module.__dict__.get(name))
                unit.module.__dict__[name] = self._forward_of(unit, own, state)
            yield

    def _forward_of(self, unit: _Unit, own: Callable[..., Any], state: _Pass) -> Callable[..., Any]:
        weight = unit.tuned("weight")
        table = isinstance(unit.module, nn.Embedding) and unit.module.max_norm is None
        linear = type(unit.module).forward is nn.Linear.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called.add(unit.name)
            if linear:
                return self._linear(unit, state, *args, **kwargs)
            if table and weight is not None and isinstance(state.change, Directions):
                with _LookUp(self, unit, weight, state) as look_up:
                    made = own(*args, **kwargs)
                if look_up.done:
                    return made
                # A forward that reads its table in another way has read it as it is, not as the lanes have it.
            return self._lane_by_lane(unit, own, state, args, kwargs)

        return forward

    def _linear(self, unit: _Unit, state: _Pass, input: Tensor) -> Tensor:
        module: Any = unit.module
        lanes, shares = state.lanes, self._shares(unit, state, input)
        weight, bias = unit.tuned("weight"), unit.tuned("bias")
        biases = [module.bias] * len(lanes)
        if bias is not None and state.change.moves(bias):
            biases = self.sweep.copies(bias, state.change, lanes, keep=True)
        if weight is None or not state.change.moves(weight):
            return torch.cat([F.linear(x, module.weight, b) for x, b in zip(shares, biases, strict=True)])
        height, width = module.weight.shape
        rows = max(1, self._limit // (len(lanes) * width))
        rows = rows // _ROW_BLOCK * _ROW_BLOCK or rows
        if rows >= height:
            weights = self.sweep.copies(weight, state.change, lanes)
            made = [F.linear(x, w, b) for x, w, b in zip(shares, weights, biases, strict=True)]
            return made[0] if len(made) == 1 else torch.cat(made)
        out: Tensor | None = None
        for first in range(0, height, rows):
            some = slice(first, min(first + rows, height))
            weights = self.sweep.copies(weight, state.change, lanes, some)
            for i, (x, w, b) in enumerate(zip(shares, weights, biases, strict=True)):
                part = F.linear(x, w, None if b is None else b[some])
                if out is None:
                    out = part.new_empty(*input.shape[:-1], height)
                target = out if len(lanes) == 1 else out[i * x.shape[0] : (i + 1) * x.shape[0]]
                target[..., some] = part
        assert out is not None
        return out

    def look_up(self, unit: _Unit, tuned: Tuned, state: _Pass, ids: Tensor) -> Tensor:
        """Rows of each lane's perturbed table; only those that are looked up are made."""
        assert isinstance(state.change, Directions)
        shares = self._shares(unit, state, ids)
        rows, place = torch.unique(ids, return_inverse=True)
        tables = self.sweep.row_copies(tuned, state.change, state.lanes, rows)
        places = place.chunk(len(shares)) if len(shares) > 1 else [place]
        return torch.cat([F.embedding(p, table) for p, table in zip(places, tables, strict=True)])

    def _lane_by_lane(
        self, unit: _Unit, own: Callable[..., Any], state: _Pass, args: Any, kwargs: Any
    ) -> Any:
        """Any module: its own forward on each lane's share of the batch, with that lane's tensors in place."""
        lanes, size = state.lanes, -1
        if len(lanes) > 1:
            size = self._rows(unit, state, next(_tensors((args, kwargs)), None))
        moved = [(owner, name, t) for owner, name, t in unit.slots if state.change.moves(t)]
        elements = sum(t.parameter.numel() for _, _, t in moved)
        at_once = len(lanes) if elements * len(lanes) <= self._limit else 1
        made: list[Any] = []
        try:
            for first in range(0, len(lanes), at_once):
                group = lanes[first : first + at_once]
                copies = [self.sweep.copies(t, state.change, group, keep=True) for _, _, t in moved]
                for i, lane in enumerate(group):
                    state.lanes = (lane,)
                    share = _share((args, kwargs), size, first + i, len(lanes))
                    with _swapped(
                        unit.module, [(o, n, c[i]) for (o, n, _), c in zip(moved, copies, strict=True)]
                    ):
                        made.append(own(*share[0], **share[1]))
        finally:
            state.lanes = lanes
        return _join(made, unit.name)

    def _shares(self, unit: _Unit, state: _Pass, input: Tensor) -> Sequence[Tensor]:
        if len(state.lanes) == 1:
            return [input]
        self._rows(unit, state, input)
        return input.chunk(len(state.lanes))

    def _rows(self, unit: _Unit, state: _Pass, input: Tensor | None) -> int:
        """How many rows of all lanes the input holds. What does not split into the lanes is an error."""
        shape = None if input is None else tuple(input.shape)
        if shape and shape[0] % len(state.lanes) == 0 and (not state.leading or shape[0] in state.leading):
            return shape[0]
        rows = f" of {min(state.leading) // len(state.lanes)} rows" if state.leading else ""
        raise RequestError.of(
            f"{unit.name or type(unit.module).__name__}: an input of shape {shape} does not split into "
            f"{len(state.lanes)} lanes{rows}",
            "it would not be known which rows belong to which perturbation",
            "set lanes: 1, so that the passes run one after the other",
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, no dropout; afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def lanes_by_default(model: nn.Module, tuned: Sequence[Tuned], passes: int) -> tuple[int, str]:
    """How many lanes to stack where nobody said, and why."""
    if {t.parameter.device.type for t in tuned} == {"cpu"}:
        # Two at once would save one drawing of the noise, and need the activations of both.
        return 1, "on the CPU one after the other, in the memory of inference"
    if not any(p.dim() >= 2 and not p.requires_grad for p in model.parameters()):
        # Each lane of a whole model has its own activations and weights in scratch; a pair keeps memory small.
        why = "two ends of a line at once" if passes == 2 else "in pairs, to keep memory small"
        return min(passes, 2), why
    return passes, "all at once"


class _LookUp(TorchFunctionMode):
    """Inside, a look-up in this module's table goes to each lane's changed rows; subclasses keep their own forward."""

    def __init__(self, modules: LaneModules, unit: _Unit, tuned: Tuned, state: _Pass) -> None:
        super().__init__()
        self._modules, self._unit, self._tuned, self._state = modules, unit, tuned, state
        self.done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and len(args) > 1 and args[1] is self._tuned.parameter:
            self.done = True
            return self._modules.look_up(self._unit, self._tuned, self._state, args[0])
        return func(*args, **(kwargs or {}))


def _units(model: nn.Module, tuned: Sequence[Tuned]) -> list[_Unit]:
    by_id = {id(t.parameter): t for t in tuned}
    units: list[_Unit] = []
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():  # parents come before their children
        if module in seen:
            continue
        owners = [module, *_read_by(module)]
        seen.update(owners)
        slots = [
            (owner, n, by_id[id(p)])
            for owner in owners
            for n, p in owner._parameters.items()
            if id(p) in by_id
        ]
        if slots:
            units.append(_Unit(name, module, slots))
    return units


def _read_by(module: nn.Module) -> Iterator[nn.Module]:
    """The modules below this one whose tensors it reads itself, past their forward if they have one."""
    if isinstance(module, _WHOLE):
        yield from list(module.modules())[1:]
        return
    # PEFT computes with whole adapter matrices for three-dimensional weights, and for DoRA's norms.
    adapter_as_a_whole = type(module).__name__ == "ParamWrapper" or getattr(
        module, "lora_magnitude_vector", None
    )
    for name, child in module.named_children():
        if type(child).forward is nn.Module.forward:  # a ParameterDict and such
            yield child
            yield from child.modules() if adapter_as_a_whole and name.startswith("lora_") else _read_by(child)


def _put_back(module: nn.Module, name: str, own: Any) -> None:
    if own is None:
        del module.__dict__[name]
    else:
        module.__dict__[name] = own


@contextmanager
def _swapped(module: nn.Module, tensors: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Other tensors under the parameters' names; the parameters themselves are not touched."""
    before = [(owner, name, owner._parameters[name]) for owner, name, _ in tensors]
    flat = module.__dict__.get("_flat_weights")
    try:
        for owner, name, tensor in tensors:
            owner._parameters[name] = tensor  # type: ignore[assignment]
        if flat is not None:  # recurrent modules read their weights from a list
            module.__dict__["_flat_weights"] = [getattr(module, n) for n in module._flat_weights_names]  # type: ignore[union-attr]
        yield
    finally:
        for owner, name, parameter in before:
            owner._parameters[name] = parameter
        if flat is not None:
            module.__dict__["_flat_weights"] = flat


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _share(value: Any, size: int, i: int, count: int) -> Any:
    """Lane i's part of every tensor whose first dimension is the batch; the rest as it is."""
    if count == 1:
        return value
    if isinstance(value, Tensor):
        return value.chunk(count)[i] if value.dim() and value.shape[0] == size else value
    if isinstance(value, dict):
        return {key: _share(item, size, i, count) for key, item in value.items()}
    if isinstance(value, tuple | list):
        parts = [_share(item, size, i, count) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _join(parts: list[Any], name: str) -> Any:
    """The lanes' outputs as one: tensors end to end, structures by their members."""
    first = parts[0]
    if len(parts) == 1 or first is None:
        return first
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(parts)
    if isinstance(first, dict):  # also the outputs of transformers, which are built from keywords
        joined = {key: _join([part[key] for part in parts], name) for key in first}
        return joined if type(first) is dict else type(first)(**joined)
    if isinstance(first, tuple | list):
        members = [_join(list(group), name) for group in zip(*parts, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if not isinstance(first, Tensor) and all(part == first for part in parts):
        return first
    raise RequestError.of(
        f"{name} returns a {type(first).__name__} that is different in each lane",
        "it cannot be put together along the batch",
        "set lanes: 1, so that the passes run one after the other",
    )
