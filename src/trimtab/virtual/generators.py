"""Random generators of virtual GPUs: `torch.Generator("cuda")`, the default ones, and that each keeps to its kind.

The default generators of all virtual GPUs *are* the CPU's default generator: a program draws the same numbers in the
same order as it would with the CPU for its device. Never imitates CUDA's Philox stream.

By shapes a model's weights on the host are not drawn, and the CPU's generators still come to stand where the run has
them, for on that hangs the order of shuffled rows: each counts what it owes (owed_draws.py) and makes up for it when
somebody asks where it stands. There virtual GPUs have numbers of their own, as GPUs have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.virtual import mersenne
from trimtab.virtual.state import Machine, Patch, VirtualDevice, machine

_Native: type[torch._C.Generator] = torch._C.Generator
# C++ hands a generator to the dispatcher in a fresh Python object; the address of the generator itself is the same.
_known: weakref.WeakValueDictionary[int, _Watched] = weakref.WeakValueDictionary()


def _address(generator: torch._C.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


class _Watched(torch._C.Generator):
    """A CPU generator whose place is asked for here: its own, or that of the one it stands for."""

    _stands_for: torch._C.Generator | None
    owed: int
    """How many numbers of 32 bits the run has drawn of it that were not drawn here."""

    def __new__(cls, *args: Any) -> Any:
        made = super().__new__(cls)
        made._stands_for, made.owed = None, 0
        _known[_address(made)] = made
        return made

    @property
    def source(self) -> torch._C.Generator:
        """The CPU generator that the numbers come from."""
        return self._stands_for if self._stands_for is not None else self

    def settle(self) -> None:
        """Come to stand where the run has it."""
        if self.owed:
            owed, self.owed = self.owed, 0
            mersenne.set_forward(self.source, owed)

    # The native methods, on the generator that the numbers come from.
    def get_state(self) -> torch.Tensor:
        self.settle()
        return _Native.get_state(self.source)

    def set_state(self, state: torch.Tensor) -> Any:
        _Native.set_state(self.source, state)
        self.owed = 0
        return self

    def manual_seed(self, seed: int) -> Any:
        _Native.manual_seed(self.source, seed)
        self.owed = 0
        return self

    def seed(self) -> int:
        self.owed = 0
        return _Native.seed(self.source)

    def initial_seed(self) -> int:
        return _Native.initial_seed(self.source)

    def _twin(self) -> Any:
        return HostGenerator()

    def clone_state(self) -> Any:
        return self._twin().set_state(self.get_state())

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: torch._C.Generator) -> Any:
        return self.set_state(state.get_state())


class HostGenerator(_Watched):
    """A generator of the CPU, by shapes."""

    def __init__(self, stands_for: torch._C.Generator | None = None) -> None:
        super().__init__()
        self._stands_for = stands_for

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (None, self.get_state())


class VirtualGenerator(_Watched):
    """A CPU generator that says it belongs to a GPU."""

    def __init__(self, index: int, stands_for: torch._C.Generator | None = None) -> None:
        super().__init__()
        self._index = index
        self._stands_for = stands_for

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    def _twin(self) -> VirtualGenerator:
        return VirtualGenerator(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._index, self.get_state())


def _rebuild(index: int | None, state: torch.Tensor) -> torch._C.Generator:
    in_force = machine()
    if index is None:
        made = HostGenerator() if in_force is not None and in_force.shapes else _Native()
    else:
        made = VirtualGenerator(index) if in_force is not None else _Native()
    return made.set_state(state)


class _GeneratorType(type):
    """`torch.Generator` while virtual GPUs are in force: makes the right kind, and is the class of both kinds."""

    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        in_force = machine()
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if in_force is not None and in_force.shapes and wanted.type == "cpu":
            return HostGenerator()
        if in_force is None or wanted.type != "cuda":
            return _Native(wanted)
        torch.cuda._lazy_init()
        return VirtualGenerator(in_force.at(wanted.index).index)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Native)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Native)


class Generator(metaclass=_GeneratorType):
    """Stands in for `torch.Generator`."""


def watched(generator: torch._C.Generator) -> _Watched | None:
    """The generator of ours behind one that came through C++, if it is one."""
    return generator if isinstance(generator, _Watched) else _known.get(_address(generator))


def virtual_of(generator: torch._C.Generator) -> VirtualGenerator | None:
    """The virtual generator behind a generator that came through C++, if it is one."""
    found = watched(generator)
    return found if isinstance(found, VirtualGenerator) else None


def source_of(generator: torch._C.Generator) -> torch._C.Generator:
    """The CPU generator to draw from when the operation runs on payloads."""
    found = watched(generator)
    return found.source if found is not None else generator


def host_generator(named: dict[str, Any]) -> HostGenerator | None:
    """By shapes: the CPU's generator that an operation draws from, None for one that was made before."""
    given = named.get("generator") or torch._C.default_generator
    default = _address(given) == _address(torch._C.default_generator)
    found = torch.default_generator if default else watched(given)
    return found if isinstance(found, HostGenerator) else None


@contextmanager
def drawing_on(device: VirtualDevice) -> Iterator[None]:
    """By shapes: what a GPU draws is its own, and the CPU's default generator stays where it is."""
    default = torch._C.default_generator
    own = torch.cuda.default_generators[device.index].source  # type: ignore[attr-defined]
    before = _Native.get_state(default)
    _Native.set_state(default, _Native.get_state(own))
    try:
        yield
    finally:
        _Native.set_state(own, _Native.get_state(default))
        _Native.set_state(default, before)


@contextmanager
def undrawn() -> Iterator[None]:
    """What a block draws of the CPU's default generator is not drawn in the run."""
    default, shown = torch._C.default_generator, torch.default_generator
    before, owed = _Native.get_state(default), getattr(shown, "owed", 0)
    try:
        yield
    finally:
        _Native.set_state(default, before)
        if isinstance(shown, HostGenerator):
            shown.owed = owed


def patches(machine: Machine) -> list[Patch]:
    native = torch._C.default_generator
    shared = None if machine.shapes else native
    defaults = tuple(VirtualGenerator(device.index, shared) for device in machine.devices)
    found: list[Patch] = [(torch, "Generator", Generator), (torch.cuda, "default_generators", defaults)]
    if machine.shapes:
        shown = HostGenerator(native)
        found += [(torch, "default_generator", shown), (torch.random, "default_generator", shown)]
    return found
