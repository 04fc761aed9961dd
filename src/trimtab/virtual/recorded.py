"""Writes down the operations of a piece of a program as they are carried out: what a compiler would be given of it.

Tensors are numbers, in the order in which they are met. The list can be carried out again on other tensors
(`Record.replay`), and pieces of which a compiler would make one graph have equal keys. Changes no operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.virtual.plans import Args, Kwargs
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import VIRTUAL
from trimtab.virtual.wording import words

_serials = count(1)
_META = torch.device("meta")
_ASKING = frozenset(
    f"aten::{name}"
    for name in words("_local_scalar_dense is_nonzero equal nonzero masked_select _unique2 unique_dim")
)
"""Operations of whose result a compiler knows too little: a number for the program, or a tensor of unknown size."""
_DECIDING = ("bool", "aten::is_nonzero", "aten::equal")


_TORCHS = frozenset(("aten", "prims", "prim", "c10d", "_c10d_functional"))


class Ref(NamedTuple):
    """A tensor, by its number."""

    number: int


class Kernel(NamedTuple):
    """A launch of a kernel that is no operation of torch: it reads tensors and writes to some of them."""

    name: str
    written: tuple[int, ...]
    """Places, among the tensors of the launch."""


class Entry(NamedTuple):
    """One operation."""

    func: Any
    args: Any
    kwargs: Any
    made: Any
    """The numbers of its results; None for what is no tensor on a GPU."""
    inside: int
    """The bytes that it takes while it runs, besides its results."""
    region: int | None = None
    """Which checkpoint it runs under, if any: what it makes is to be computed again in the backward pass."""


Launch = Callable[[Kernel, list[Any]], list[Any]]


@dataclass
class Record:
    """What was written down."""

    inputs: dict[int, Any] = field(default_factory=dict)
    """What came from outside."""
    entries: list[Entry] = field(default_factory=list)

    def key(self) -> Any:
        """Equal for pieces of which a compiler would make one graph."""
        with torch._C.DisableTorchFunction():  # nobody is to be told of these questions
            shapes = tuple((number, *_shape(value)) for number, value in self.inputs.items())
        return tuple(self.entries), shapes

    def replay(
        self, inputs: Mapping[int, Any], launch: Launch, told: Callable[[Entry], Any]
    ) -> dict[int, Any]:
        """Carry it out on other tensors; `told` gives a context around each operation."""
        values = dict(inputs)
        for entry in self.entries:
            args = put(entry.args, values)
            with told(entry):
                if isinstance(entry.func, Kernel):
                    for place, new in zip(entry.func.written, launch(entry.func, args), strict=True):
                        args[place].copy_(new)
                    continue
                made = entry.func(*args, **{name: put(value, values) for name, value in entry.kwargs})
            for number, value in _pairs(entry.made, made):
                values.setdefault(number, value)
        return values


class Recorder(TorchDispatchMode):
    """While it is on, every operation on virtual tensors is written down.

    `device` counts what the operations take, apart from the program's own memory. `on_break` is told why a compiler
    could not take the piece as a whole, and whether dynamo ends its graph there; nothing is written down from there on.
    """

    supports_higher_order_operators = True

    def __init__(
        self, device: VirtualDevice, on_break: Callable[[str, bool], None], backend: Any = "inductor"
    ) -> None:
        super().__init__()
        self.backend = backend
        self.record = Record()
        self.on = True
        self._inside = False
        self._device, self._on_break = device, on_break
        self._serial = next(_serials)
        self._numbers = count()
        self._made: list[weakref.ReferenceType[Any]] = []
        self._of_host: dict[int, int] = {}
        self._regions: dict[Any, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if self.on and isinstance(func, HigherOrderOperator):
            self.stop(f"it calls {func.name()}", breaks=False)
        elif self.on and func._schema.name in _ASKING and _on_gpu(args):
            self.read(func._schema.name)
        if not self.on:
            return func(*args, **kwargs)
        device = self._device
        before = device.allocated
        device.pool.both.allocated_peak = before
        self._inside = True
        try:
            made = func(*args, **kwargs)
        finally:
            self._inside = False
        if _on_gpu(made) or _on_gpu(args) or _on_gpu(tuple(kwargs.values())):
            after = device.allocated
            inside = max(0, device.pool.both.allocated_peak - max(after, before))
            if _only_writes(func):
                self._wrote(func, args, kwargs, inside)
                return made
            named = tuple((name, self._mapped(value)) for name, value in kwargs.items())
            entry = Entry(func, self._mapped(args), named, self._numbered(made), inside, self._region())
            self.record.entries.append(entry)
        return made

    def launched(self, name: str, tensors: list[Tensor], written: tuple[int, ...]) -> None:
        """A kernel was launched; by an operation itself, it is none of a compiler's business."""
        if self.on and not self._inside:
            refs = tuple(map(self._mapped, tensors))
            self.record.entries.append(Entry(Kernel(name, written), refs, (), None, 0, self._region()))

    def _wrote(self, func: Any, args: Args, kwargs: Kwargs, inside: int) -> None:
        """An operation of a program's own that writes to what it is given: a compiler looks into it no more."""
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        tensors: list[Tensor] = []
        written: list[int] = []
        for argument in func._schema.arguments:
            found = [t for t in tree_leaves(given.get(argument.name)) if isinstance(t, Tensor)]
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += range(len(tensors), len(tensors) + len(found))
            tensors += found
        refs = tuple(map(self._mapped, tensors))
        kernel = Kernel(func.name(), tuple(written))
        self.record.entries.append(Entry(kernel, refs, (), None, inside, self._region()))

    def _region(self) -> int | None:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None or not getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
            return None
        return self._regions.setdefault(hooks[0], len(self._regions))

    def stop(self, why: str, *, breaks: bool = True) -> None:
        """Nothing is written down from here on. `breaks`: because dynamo ends a graph here, whoever compiles it."""
        self.on = False
        self._on_break(why, breaks)

    def read(self, name: str) -> None:
        """The program takes values, or a size that hangs on them. In a whole graph dynamo makes symbols of numbers, and
        ends where the program's way hangs on one."""
        self.stop(f"it asks a tensor for its values ({name})", breaks=name in _DECIDING)

    def alive(self) -> Iterator[Any]:
        """What was made and lives."""
        return (tensor for weak in self._made if (tensor := weak()) is not None)

    def knows(self, tensor: Any) -> bool:
        """Whether a virtual tensor has a number by now."""
        return bool(getattr(tensor, "_number", (0, None))[0] == self._serial)

    def number(self, tensor: Any) -> int:
        """The number of a tensor; one that is not known comes from outside."""
        if tensor.__class__ not in VIRTUAL:
            known = self._of_host.get(id(tensor))
        else:
            serial, known = getattr(tensor, "_number", (0, None))
            known = known if serial == self._serial else None
        if known is None:
            known = self._number(tensor)
            self.record.inputs[known] = tensor
        return known

    def _number(self, tensor: Any) -> int:
        number = next(self._numbers)
        if tensor.__class__ in VIRTUAL:
            tensor.__dict__["_number"] = self._serial, number
        else:
            self._of_host[id(tensor)] = number
        return number

    def _mapped(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.number(value))
        if value.__class__ is tuple or value.__class__ is list:
            return tuple([self._mapped(item) for item in value])
        if isinstance(value, torch.device):
            return _META
        return None if isinstance(value, torch.Generator) else value

    def _numbered(self, made: Any) -> Any:
        if made.__class__ in VIRTUAL:
            serial, known = getattr(made, "_number", (0, None))
            if serial == self._serial:
                return known
            self._made.append(weakref.ref(made))
            return self._number(made)
        if made.__class__ is tuple or made.__class__ is list:
            return tuple([self._numbered(item) for item in made])
        return None


def _only_writes(func: Any) -> bool:
    """Whether an operation is no one of torch's, and gives nothing but what it writes: torch cannot say it anew."""
    return not func._schema.returns and func._schema.is_mutable and func.namespace not in _TORCHS


def _on_gpu(value: Any) -> bool:
    if value.__class__ is tuple or value.__class__ is list:
        return any(map(_on_gpu, value))
    return value.__class__ in VIRTUAL


def _shape(value: Any) -> tuple[Any, ...]:
    shown = value.payload if value.__class__ in VIRTUAL else value
    return (
        tuple(shown.shape),
        tuple(shown.stride()),
        shown.dtype,
        value.requires_grad,
        value.__class__ in VIRTUAL,
    )


def _pairs(numbers: Any, made: Any) -> Iterator[tuple[int, Any]]:
    if numbers.__class__ is int:
        yield numbers, made
    elif numbers.__class__ is tuple:
        for number, value in zip(numbers, made, strict=True):
            yield from _pairs(number, value)


def put(value: Any, values: Mapping[int, Any]) -> Any:
    """Arguments with tensors in the place of their numbers."""
    if value.__class__ is Ref:
        return values[value.number]
    if value.__class__ is tuple:
        return [put(item, values) for item in value]
    return value
