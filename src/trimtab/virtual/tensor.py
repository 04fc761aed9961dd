"""The virtual tensor: Python sees a CUDA tensor, C++ sees a meta tensor, the values are in a CPU tensor.

The payload never requires a gradient and is never handed out: autograd runs on the wrapper, above it.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import origin, state
from trimtab.virtual.amp import HOST_KEY, KEY
from trimtab.virtual.face import ABOVE, Face, HostFace
from trimtab.virtual.memory import Block
from trimtab.virtual.moving import means_cpu, moved, moved_to_gpu
from trimtab.virtual.state import VirtualDevice

_make, _in_inference_mode, _STRIDED = (
    torch.Tensor._make_wrapper_subclass,
    torch.is_inference_mode_enabled,
    torch.strided,
)
AUTOCAST = KEY | HOST_KEY
"""One set for all of them, on the host too: torch gives a tensor the data of another only where these are the same."""
INTERNAL = ("payload", "_slot", "_block", origin.ATTRIBUTE, origin.EXTENTS, origin.SHAPE)


class VirtualTensor(Face):
    """A tensor on a virtual GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Rebuild from data as `type(p)(data, requires_grad=…)` does; the device is that of the data."""
        requires_grad = kwargs.pop("requires_grad", args[0] if args else issubclass(cls, nn.Parameter))
        if data is None:
            data = torch.empty(0)
        if issubclass(cls, nn.Parameter):
            return (own_class(cls) or nn.Parameter)(data, requires_grad)
        if not isinstance(data, Tensor):
            return torch.Tensor(data, *args)
        return data.detach().requires_grad_(bool(requires_grad))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached on threads where the dispatch mode is not on.
        return ABOVE.work(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        # Unlike detach(), it has a version of its own: what is changed through it is no change that autograd sees.
        detached = self.detach()
        made = wrap(detached.payload, self._slot, self._block)  # type: ignore[attr-defined]
        for name, value in detached.__dict__.items():
            made.__dict__.setdefault(name, value)
        return made

    @data.setter
    def data(self, new: Tensor) -> None:
        ABOVE.assign(self, new)

    @property
    def _is_param(self) -> bool:
        return isinstance(self, (VirtualParameter, HostParameter))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # nn.Parameter(virtual) marks its result thus; the class makes the mark last through every test of it.
        if value:
            self.__class__ = over(type(self), parameter_class(self))
        else:
            self.__class__ = HostTensor if is_host(self) else VirtualTensor

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return moved(torch.Tensor.to, (self, *args), kwargs)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
        return moved_to_gpu(torch.Tensor.cuda, (self, device), {})

    def as_subclass(self, cls: Any) -> Any:
        refuse_own_class(cls, self)
        return self.view_as(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn.utils."
                "weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
            )
        payload = copy.deepcopy(self.payload, memo)
        key = ("virtual block", payload.untyped_storage()._cdata)
        block = memo.get(key)  # type: ignore[call-overload]
        new = wrap(payload, self._slot, block)
        memo[key] = new._block  # type: ignore[index]
        memo[id(self)] = new
        new.requires_grad_(self.requires_grad)
        new.__class__ = self.__class__
        for name, value in self.__dict__.items():
            if name not in INTERNAL or name == origin.EXTENTS:
                new.__dict__[name] = copy.deepcopy(value, memo)
        if origin.ATTRIBUTE in self.__dict__:
            new.__dict__[origin.ATTRIBUTE] = origin.Trace(origin.here())  # made here, where it is copied
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new


class VirtualParameter(VirtualTensor, nn.Parameter):
    """A parameter on a virtual GPU: made by nn.Parameter(virtual) or by moving a parameter."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Parameter containing:\n" + VirtualTensor.__repr__(self)


class HostTensor(HostFace, VirtualTensor):
    """A tensor on the CPU that has a shape and no values: there are some where shapes only are rehearsed."""

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(self._slot.meta if means_cpu(value) else value for value in args)
        if means_cpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._slot.meta}
        return moved(torch.Tensor.to, (self, *args), kwargs)

    def cpu(self, memory_format: Any = None) -> Tensor:
        return self


class HostParameter(HostTensor, nn.Parameter):
    """A parameter on the CPU that has a shape and no values."""


PARAMETERS: set[type[VirtualTensor]] = {VirtualParameter, HostParameter}
VIRTUAL: set[type[VirtualTensor]] = {VirtualTensor, HostTensor, *PARAMETERS}
"""Both grow: a class of parameters that a program has of its own gets one here (`over`)."""


def own_class(kind: type) -> type[nn.Parameter] | None:
    """The class of parameters of a program's own behind a class, as bitsandbytes has for quantized weights.

    None for torch's own classes, and for those with rules of their own for every operation.
    """
    found: type[nn.Parameter] | None = getattr(kind, "_class_of_the_program", None)
    if found is not None or kind in VIRTUAL or kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        return found
    lazy = issubclass(kind, nn.parameter.UninitializedTensorMixin)  # type: ignore[attr-defined]
    own_rules = kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return None if lazy or own_rules else kind


def over(before: type, kind: type) -> type:
    """`kind`, a class of parameters, as the program's own class where `before` was one of those."""
    own = own_class(before)
    if own is None:
        return kind
    return own if kind is nn.Parameter else _joined(own, kind)


@functools.cache
def _joined(own: type[nn.Parameter], kind: type) -> type:
    metaclass: Any = type(own)
    made: type[Any] = metaclass(
        own.__name__, (own, kind), {"__module__": own.__module__, "_class_of_the_program": own}
    )
    PARAMETERS.add(made)
    VIRTUAL.add(made)
    return made


def of_own_class(kind: type, data: Tensor, requires_grad: bool) -> Any:
    """A virtual tensor's data as a parameter of a class of the program's own."""
    made: Any = data.detach()
    made.__class__ = over(kind, parameter_class(made))
    return made.requires_grad_(requires_grad)


def refuse_own_class(kind: type, data: Any = None) -> None:
    """A virtual tensor cannot be of a class of the program's: say so."""
    if data.__class__ in VIRTUAL and kind is not Tensor and kind is not nn.Parameter and kind not in VIRTUAL:
        raise state.NotSimulated(
            f"A tensor on a GPU of the program's own class {kind.__name__} is not simulated by virtual GPUs."
        )


def is_host(tensor: VirtualTensor) -> bool:
    """Whether it is one of the tensors on the CPU that have a shape only."""
    return tensor._slot.index == state.HOST


def parameter_class(tensor: Any) -> type:
    """The class of a parameter that is made of a tensor."""
    if not isinstance(tensor, VirtualTensor):
        return nn.Parameter
    return HostParameter if is_host(tensor) else VirtualParameter


def wrap(payload: Tensor, slot: VirtualDevice, block: Block | None = None) -> VirtualTensor:
    """A virtual tensor over a payload. Without a block the payload's storage is counted as a new allocation."""
    inference = payload.is_inference()
    if inference is not _in_inference_mode():
        # A view is an inference tensor when its base is one, whatever the mode in which it is taken.
        with torch._C._InferenceMode(inference):
            return wrap(payload, slot, block)
    made: Any
    if payload.layout is _STRIDED:
        # By position, which takes a fifth less: size, stride, offset, memory format, dtype, layout, device, whether
        # pinned and with a gradient, who answers for sizes, device and layout, keys.
        made = _make(
            VirtualTensor,
            payload.shape,
            payload.stride(),
            payload.storage_offset(),
            None,
            payload.dtype,
            _STRIDED,
            slot.meta,
            False,
            False,
            None,
            False,
            False,
            AUTOCAST,
        )
        if block is None:
            block = Block(slot, payload.untyped_storage().nbytes())
    else:
        made = _without_strides(payload, slot)
        if block is None:
            block = Block(slot, _parts_bytes(payload))
    made.payload = payload
    made._slot = slot
    made._block = block
    if slot.index == state.HOST:
        made.__class__ = HostTensor
    return made  # type: ignore[no-any-return]


LAYOUTS: set[torch.layout] = set()
"""Layouts other than strides that were met: as long as there is none, nobody has to look for one."""


def _parts_bytes(payload: Tensor) -> int:
    """The bytes of a tensor that is stored as the places and values of what is not zero."""
    LAYOUTS.add(payload.layout)
    if payload.layout is torch.sparse_coo:
        parts = [payload._indices(), payload._values()]
    elif payload.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [payload.crow_indices(), payload.col_indices(), payload.values()]
    elif payload.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [payload.ccol_indices(), payload.row_indices(), payload.values()]
    else:
        parts = [payload]
    return sum(part.numel() * part.element_size() for part in parts)


def _without_strides(payload: Tensor, slot: VirtualDevice) -> Any:
    return _make(
        VirtualTensor,
        payload.size(),
        dtype=payload.dtype,
        layout=payload.layout,
        device=slot.meta,
        _extra_dispatch_keys=AUTOCAST,
    )


def is_virtual(tensor: Any) -> bool:
    """Whether a tensor is on a virtual GPU."""
    return type(tensor) in VIRTUAL


def device_of(tensor: Tensor) -> torch.device:
    """The device of a tensor as the program sees it."""
    return tensor._slot.device if type(tensor) in VIRTUAL else tensor.device  # type: ignore[attr-defined]


def payload_of(tensor: Tensor) -> Tensor:
    """The CPU tensor that holds the values (the tensor itself when it is not virtual)."""
    return tensor.payload if type(tensor) in VIRTUAL else tensor  # type: ignore[attr-defined]
