"""Random generators of virtual GPUs: `torch.Generator("cuda")`, the default ones, and that each keeps to its kind.

The default generators of all virtual GPUs *are* the CPU's default generator: a program draws the same numbers in the
same order as it would with the CPU for its device. Never imitates CUDA's Philox stream.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from trimtab.virtual.state import Machine, Patch, machine

_Native: type[torch._C.Generator] = torch._C.Generator
# C++ hands a generator to the dispatcher in a fresh Python object; the address of the generator itself is the same.
_known: weakref.WeakValueDictionary[int, VirtualGenerator] = weakref.WeakValueDictionary()


def _address(generator: torch._C.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


class VirtualGenerator(torch._C.Generator):
    """A CPU generator that says it belongs to a GPU."""

    _index: int
    _stands_for: torch._C.Generator | None

    def __new__(cls, index: int, stands_for: torch._C.Generator | None = None) -> VirtualGenerator:
        made = super().__new__(cls)
        made._index = index
        made._stands_for = stands_for
        _known[_address(made)] = made
        return made

    def __init__(self, index: int, stands_for: torch._C.Generator | None = None) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    @property
    def source(self) -> torch._C.Generator:
        """The CPU generator that the numbers come from."""
        return self._stands_for if self._stands_for is not None else self

    # The native methods, on the generator that the numbers come from: itself, or the one that it stands for.
    def get_state(self) -> torch.Tensor:
        return _Native.get_state(self.source)

    def set_state(self, state: torch.Tensor) -> VirtualGenerator:
        _Native.set_state(self.source, state)
        return self

    def manual_seed(self, seed: int) -> VirtualGenerator:
        _Native.manual_seed(self.source, seed)
        return self

    def seed(self) -> int:
        return _Native.seed(self.source)

    def initial_seed(self) -> int:
        return _Native.initial_seed(self.source)

    def clone_state(self) -> VirtualGenerator:
        twin = VirtualGenerator(self._index)
        twin.set_state(self.get_state())
        return twin

    graphsafe_get_state = clone_state

    def graphsafe_set_state(self, state: torch._C.Generator) -> VirtualGenerator:
        return self.set_state(state.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._index, self.get_state())


def _rebuild(index: int, state: torch.Tensor) -> torch._C.Generator:
    generator = VirtualGenerator(index) if machine() is not None else _Native()
    return generator.set_state(state)


class _GeneratorType(type):
    """`torch.Generator` while virtual GPUs are in force: makes the right kind, and is the class of both kinds."""

    def __call__(cls, device: Any = "cpu") -> torch._C.Generator:
        in_force = machine()
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
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


def virtual_of(generator: torch._C.Generator) -> VirtualGenerator | None:
    """The virtual generator behind a generator that came through C++, if it is one."""
    if type(generator) is VirtualGenerator:
        return generator
    return _known.get(_address(generator))


def source_of(generator: torch._C.Generator) -> torch._C.Generator:
    """The CPU generator to draw from when the operation runs on payloads."""
    virtual = virtual_of(generator)
    return virtual.source if virtual is not None else generator


def patches(machine: Machine) -> list[Patch]:
    defaults = tuple(VirtualGenerator(d.index, torch.default_generator) for d in machine.devices)
    return [(torch, "Generator", Generator), (torch.cuda, "default_generators", defaults)]
