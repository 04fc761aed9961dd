"""What a compiled piece looks at, so that it can be told whether it would do the same again (repeated.py).

Its arguments, the settings of torch, and every attribute of its modules that it reads while it runs. Tensors are
compared by their shapes, other things by their value, or by being the same. What cannot be compared is said (`Not`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import state
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import VIRTUAL

SIMPLE = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))
)
_FEW, _DEEP = 64, 4
"""What is compared by its parts: containers of at most so many, so deep; others are only equal to themselves."""
_PLUMBING = frozenset(("__dict__", "__class__"))
"""By these Python finds other attributes, each of which is looked at by its own name."""


class Not(Exception):
    """What was met cannot be compared: the piece is run."""


def outside_of(given: list[Any], device: VirtualDevice) -> Seen | None:
    """Arguments and settings, comparable; None where there is something that cannot be compared."""
    with torch._C.DisableTorchFunction():
        try:
            return compared(given, device)
        except Not:
            return None


def compared(given: list[Any], device: VirtualDevice) -> Seen:
    seen = Seen({})
    arguments = [seen.argument(value) for value in given]
    settings = [
        device.index,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
    ]
    seen.tokens = [arguments, *settings, _hooks()]
    seen.forms += settings
    return seen


def _hooks() -> str:
    """Who is handed what autograd keeps: nobody, or a checkpoint, which knows it by its order."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return ""
    if hooks[0].__module__ != "torch.utils.checkpoint":
        raise Not
    named: str = hooks[0].__qualname__
    return named


class Seen:
    """What is compared of all that was looked at."""

    def __init__(self, index: dict[int, int]) -> None:
        """`index`: the places of the modules in their tree."""
        self.tokens: list[Any] = []
        self.forms: list[Any] = []
        """The same without sizes and values, and without who is handed what autograd keeps."""
        self.unknown: list[bool] = []
        """Of each tensor, whether it has no values."""
        self.held: list[Any] = []
        """What is told apart by its identity."""
        self._index = index
        self._blocks: dict[int, int] = {}

    def stands_for(self, now: Seen) -> bool:
        """Whether what came of this comes of that too. Less may be known of it: what is unknown stays so."""
        return self.tokens == now.tokens and all(
            after or not before for before, after in zip(self.unknown, now.unknown, strict=True)
        )

    def argument(self, value: Any) -> Any:
        """An argument; tensors that share their memory are told by that."""
        if value.__class__ in VIRTUAL:
            self.forms.append((value.__class__, value._slot.index, value.payload.dtype, value.requires_grad))
            return self._shape(value), self._blocks.setdefault(id(value._block), len(self._blocks))
        if isinstance(value, Tensor):
            self.forms.append((value.__class__, value.dtype, value.requires_grad))
            return _values(value)
        if value.__class__ in SIMPLE:
            self.forms.append(value.__class__)
            return value.__class__, value
        raise Not

    def attribute(self, value: Any, depth: int = 0) -> Any:
        """What a module holds by a name."""
        kind = value.__class__
        if kind in SIMPLE:
            return kind, value
        if kind in VIRTUAL:
            return self._shape(value)
        if isinstance(value, Tensor):
            return _values(value)
        if isinstance(value, nn.Module) and id(value) in self._index:
            return "part", self._index[id(value)]
        if isinstance(value, (dict, list, tuple, set, frozenset)) and len(value) <= _FEW and depth < _DEEP:
            return kind, self._parts(value, depth + 1)
        if isinstance(value, types.MethodType):
            return id(value.__func__), self.attribute(value.__self__, depth + 1)
        self.held.append(value)
        settings = getattr(value, "__dict__", None)
        if settings.__class__ is dict and not isinstance(value, (type, nn.Module, types.FunctionType)):
            return id(value), [(name, v) for name, v in settings.items() if v.__class__ in SIMPLE]
        return id(value), None

    def _parts(self, value: Any, depth: int) -> list[Any]:
        if isinstance(value, dict):
            return [
                (key if key.__class__ in SIMPLE else id(key), self.attribute(item, depth))
                for key, item in value.items()
            ]
        parts = [self.attribute(item, depth) for item in value]
        return parts if isinstance(value, (list, tuple)) else sorted(map(str, parts))

    def _shape(self, value: Any) -> Any:
        payload = value.payload
        self.unknown.append(payload.is_meta or value._block.unknown)
        return (
            value.__class__,
            value._slot.index,
            payload.size(),
            payload.stride(),
            payload.storage_offset(),
            payload.dtype,
            value.requires_grad,
            payload.__dict__.get("_hint"),
        )


def _values(value: Tensor) -> Any:
    """A tensor of the host, which a piece may read as it likes."""
    if value.__class__ not in (Tensor, nn.Parameter) or value.is_meta or value.numel() > _FEW:
        raise Not
    return value.dtype, tuple(value.shape), value.requires_grad, tuple(value.detach().flatten().tolist())


class Looking:
    """Notes what a piece looks at while it runs, and what it changes."""

    def __init__(self, function: Any) -> None:
        self.read: dict[tuple[int, str], nn.Module] = {}
        self.written: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        """With what was there before."""
        self._modules = modules_of(function)
        self._before = self._all()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen to every module."""
        read, written = self.read, self.written
        assign = nn.Module.__setattr__

        def look(module: Any, name: str) -> Any:
            key = id(module), name
            if key not in written:
                read.setdefault(key, module)
            return object.__getattribute__(module, name)

        def note(module: Any, name: str, value: Any) -> None:
            key = id(module), name
            if key not in written:
                written[key] = module, held_at(module, name)
            assign(module, name, value)

        with ExitStack() as undo:
            state.replace(undo, nn.Module, "__getattribute__", look)
            state.replace(undo, nn.Module, "__setattr__", note)
            yield

    def attributes(self) -> Iterator[tuple[nn.Module, str]]:
        """What was read, but for what is told by the class of a module: its functions, and its properties, which read
        other attributes."""
        for (_, name), module in self.read.items():
            kind: Any = type(module)
            if name not in _PLUMBING and (name in module.__dict__ or not _of_class(kind, name)):
                yield module, name

    def changed(self) -> bool:
        """Whether something is not as it was: set to something else, or changed in its place (a list that grows)."""
        if any(held_at(module, name) is not old for (_, name), (module, old) in self.written.items()):
            return True
        return self._before is None or self._before != self._all()

    def _all(self) -> Any:
        """What the modules hold that is no tensor; None where that cannot be compared."""
        seen = Seen(places_of(self._modules))
        with torch._C.DisableTorchFunction():
            try:
                for module in self._modules:
                    held = {n: v for n, v in module.__dict__.items() if not isinstance(v, Tensor)}
                    seen.tokens += [(name, seen.attribute(value)) for name, value in held.items()]
            except Not:
                return None
        return seen.tokens


def modules_of(function: Any) -> list[nn.Module]:
    owner = getattr(function, "__self__", function)
    return list(owner.modules()) if isinstance(owner, nn.Module) else []


def inside_of(looked: list[tuple[int | nn.Module, str]], modules: list[nn.Module]) -> Seen:
    seen = Seen(places_of(modules))
    for owner, name in looked:
        seen.tokens.append(seen.attribute(held_at(modules[owner] if isinstance(owner, int) else owner, name)))
    return seen


def places_of(modules: list[nn.Module]) -> dict[int, int]:
    return {id(module): place for place, module in enumerate(modules)}


_ABSENT = object()


def held_at(module: nn.Module, name: str) -> Any:
    """What a module has by a name; also that it has nothing there."""
    own = module.__dict__
    if name in own:
        return own[name]
    for part in ("_parameters", "_buffers", "modules_of"):
        if name in own.get(part, ()):
            return own[part][name]
    return getattr(module, name, _ABSENT)


@cache
def _of_class(kind: Any, name: str) -> bool:
    found = getattr(kind, name, None)
    return isinstance(found, (property, types.FunctionType, classmethod, staticmethod))
