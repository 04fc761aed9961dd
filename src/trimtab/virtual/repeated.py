"""A compiled piece that was met before is not run again where shapes alone are rehearsed: what it takes is known.

While a piece runs for the first time it is noted what it looks at: its arguments, and every attribute of its modules.
Where all of that is as it was, its results have the same shapes, its memory is counted by the same plan, and its
gradients come as they came. Anything that is not understood (a value, a tensor from elsewhere, something that it left
behind) has it run again. Nothing of this is in force with values, nor unless a machine is told so (`Machine.repeats`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trimtab.virtual import pieces, unknown
from trimtab.virtual.kinds import remember
from trimtab.virtual.looked_at import (
    SIMPLE,
    Looking,
    Not,
    Seen,
    compared,
    held_at,
    inside_of,
    modules_of,
    places_of,
)
from trimtab.virtual.pieces import Made, Piece, Plan
from trimtab.virtual.state import Machine, VirtualDevice
from trimtab.virtual.tensor import INTERNAL, VIRTUAL


@dataclass(frozen=True)
class _Argument:
    """A tensor that was handed in, by its place among all that was."""

    place: int


@dataclass(frozen=True)
class _Attribute:
    """A tensor that a module holds, by the module's place in its tree."""

    module: int
    name: str


@dataclass(eq=False)
class Repeat:
    """One way of a piece, as it was met: what it looked at, and what came of it."""

    outside: Seen
    """Arguments and settings, as they were."""
    form: Any
    kinds: tuple[type, ...]
    """The classes of its modules."""
    looked: list[tuple[int | nn.Module, str]]
    """Attributes that it read: the place of its module, or a module that is not its own, and the name."""
    inside: Seen
    """What was there."""
    plan: Plan
    sources: dict[int, _Argument | _Attribute]
    """Where each tensor comes from that takes part in the backward pass, by its number in the record."""
    trained: list[int]
    """The numbers of those that get a gradient."""
    results: list[Any]
    """What comes out: a `_Result`, an `_Argument`, or a value that is no tensor."""
    returned: Any
    """The form of all that comes out."""

    def like(self, other: Repeat) -> bool:
        """Whether they are the same but for the sizes of the arguments, or for a pass that is computed again."""
        return (
            (self.form, self.outside.forms, self.kinds) == (other.form, other.outside.forms, other.kinds)
            and self.looked == other.looked
            and self.inside.tokens == other.inside.tokens
        )


@dataclass(frozen=True)
class _Result:
    """A tensor that the piece makes."""

    made: Made
    buffer: int
    trained: bool


class Met:
    """What is known of one compiled function."""

    def __init__(self, function: Any, kind: Any) -> None:
        self._own: list[Repeat] = []
        self._function, self._kind = function, kind

    def find(self, given: list[Any], form: Any, device: VirtualDevice) -> tuple[Repeat | None, bool]:
        """What came of it where all that it looks at was as it is now; and whether it has run itself, then or on
        arguments of other sizes, or only a layer like it."""
        if unknown.some_stand:
            return None, False
        others = [met for met in _alike.get(self._kind, ()) if met not in self._own]
        if not self._own and not others:
            return None, False
        with torch._C.DisableTorchFunction():
            try:
                outside, modules = compared(given, device), modules_of(self._function)
                for repeat in (*self._own, *others):
                    if repeat.form == form and repeat.outside.stands_for(outside) and _same(repeat, modules):
                        return repeat, any(own is repeat or own.like(repeat) for own in self._own)
            except Not:
                pass
        return None, False

    def learn(self, repeat: Repeat) -> None:
        self._own.append(repeat)
        _alike.setdefault(self._kind, weakref.WeakSet()).add(repeat)

    def again(self, machine: Machine, device: VirtualDevice, repeat: Repeat, given: list[Any]) -> Any:
        """The results, without running it."""
        return _again(machine, device, repeat, given, modules_of(self._function))


_alike: dict[Any, weakref.WeakSet[Repeat]] = {}
"""What is known of functions of one kind; it belongs to those that have run so, and goes with them."""


@dataclass
class Ran:
    """A piece that has run: all of what it was given and gave."""

    function: Any
    device: VirtualDevice
    given: list[Any]
    entered: list[Any]
    """The arguments as the piece saw them."""
    form: Any
    inputs: dict[int, Any]
    fresh: list[Any]
    """The results that it made, each once."""
    returned: list[Any]
    form_returned: Any
    plan: Plan
    trained: list[Any]


def learnt(ran: Ran, outside: Seen, looking: Looking) -> Repeat | None:
    """What is to be known to do without the next run; None where this run shows too little."""
    with torch._C.DisableTorchFunction():
        try:
            return _learnt(ran, outside, looking)
        except Not:
            return None


def _learnt(ran: Ran, outside: Seen, looking: Looking) -> Repeat:
    plan = ran.plan
    if looking.changed() or (ran.trained and plan.gradients is None):
        raise Not
    modules = modules_of(ran.function)
    index = places_of(modules)
    looked: list[tuple[int | nn.Module, str]] = []
    places: dict[int, _Argument | _Attribute] = {
        id(twin): _Argument(place) for place, twin in enumerate(ran.entered) if isinstance(twin, Tensor)
    }
    for module, name in looking.attributes():
        own = index.get(id(module))
        looked.append((module if own is None else own, name))
        if own is not None and isinstance(value := held_at(module, name), Tensor):
            places.setdefault(id(value), _Attribute(own, name))
    trained = [number for number, value in ran.inputs.items() if value.requires_grad] if ran.trained else []
    needed = {*trained, *plan.kept_inputs}
    sources: dict[int, _Argument | _Attribute] = {}
    for number in needed:
        place = places.get(id(ran.inputs[number]))
        if place is None:
            raise Not
        sources[number] = place
    results = [_result(value, ran, places) for value in ran.returned]
    made = {result for result in results if isinstance(result, _Result)}
    if len(made) != len({result.buffer for result in made}):
        raise Not  # parts of one buffer
    return Repeat(
        outside=outside,
        form=ran.form,
        kinds=tuple(map(type, modules)),
        looked=looked,
        inside=inside_of(looked, modules),
        plan=plan,
        sources=sources,
        trained=trained,
        results=results,
        returned=ran.form_returned,
    )


def _result(value: Any, ran: Ran, places: dict[int, _Argument | _Attribute]) -> Any:
    if value.__class__ in SIMPLE:
        return value
    place = places.get(id(value))
    if isinstance(place, _Argument):
        return place
    number = next((n for n, one in enumerate(ran.fresh) if one is value), None)
    buffer = ran.plan.forward.results[number] if number is not None else None
    if buffer.__class__ is not int:
        raise Not
    return _Result(described(value), buffer, value.requires_grad)


def described(value: Any) -> Made:
    """What is to be known of a tensor without values to make another like it."""
    if value.__class__ not in VIRTUAL or not value.payload.is_meta or value.payload.layout != torch.strided:
        raise Not
    if any(name not in INTERNAL and name != "_number" for name in value.__dict__) or value.payload.__dict__:
        raise Not  # somebody has said something of it
    return Made.of(value)


def gradients_of(found: Sequence[Any], plan: Plan) -> Plan:
    """The plan with what its backward pass gives, where that can be made again."""
    assert plan.backward is not None
    with torch._C.DisableTorchFunction():
        try:
            made = tuple(None if value is None else described(value) for value in found)
        except Not:
            return plan
    pairs = zip(made, plan.backward.results, strict=True)
    if any(one is not None and buffer.__class__ is not int for one, buffer in pairs):
        return plan
    return plan.with_gradients(made)


def _again(
    machine: Machine, device: VirtualDevice, repeat: Repeat, given: list[Any], modules: list[nn.Module]
) -> Any:
    """The results of a piece that is known, counted as its plan says."""
    for module in modules:
        # As if it was called: what it holds are weights.
        remember(module)
        if machine.teller is not None:
            machine.teller.moved(module)
    plan = repeat.plan
    blocks = pieces.run_through(plan.forward, device, {})
    made: dict[int, Any] = {}
    for result in repeat.results:
        if isinstance(result, _Result) and result.buffer not in made:
            made[result.buffer] = result.made.tensor(device, blocks[result.buffer], {})
    trained = {r.buffer: made[r.buffer] for r in repeat.results if isinstance(r, _Result) and r.trained}
    if trained:
        found = {number: _found(source, given, modules) for number, source in repeat.sources.items()}
        piece = Piece(plan, device)
        tensors = pieces.kept_tensors(machine, piece, blocks)
        outs = pieces.Node.apply(
            piece,
            tensors,
            [found[number] for number in plan.kept_inputs],
            list(trained.values()),
            *(found[number] for number in repeat.trained),
        )
        made |= dict(zip(trained, outs, strict=True))
        blocks.clear()  # what nobody keeps goes with the list, as in compiled.py
    returned = [
        made[result.buffer]
        if isinstance(result, _Result)
        else given[result.place]
        if isinstance(result, _Argument)
        else result
        for result in repeat.results
    ]
    return pytree.tree_unflatten(returned, repeat.returned)


def _found(source: _Argument | _Attribute, given: list[Any], modules: list[nn.Module]) -> Any:
    if isinstance(source, _Argument):
        return given[source.place]
    return held_at(modules[source.module], source.name)


def _same(repeat: Repeat, modules: list[nn.Module]) -> bool:
    """Whether all that was looked at is as it was."""
    return repeat.kinds == tuple(map(type, modules)) and repeat.inside.stands_for(
        inside_of(repeat.looked, modules)
    )
