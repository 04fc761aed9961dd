"""The virtual tensor: Python sees a CUDA tensor, C++ sees a meta tensor, the values are in a CPU tensor.

The payload never requires a gradient and is never handed out: autograd runs on the wrapper, above it.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import faults, origin, state
from trimtab.virtual.amp import KEY as AUTOCAST
from trimtab.virtual.memory import Block, host_address
from trimtab.virtual.processes import virtual_device
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.storage import address, label_storage

_make, _in_inference_mode, _STRIDED = (
    torch.Tensor._make_wrapper_subclass,
    torch.is_inference_mode_enabled,
    torch.strided,
)
INTERNAL = ("payload", "_slot", "_block", origin.ATTRIBUTE, origin.EXTENTS, origin.SHAPE)


class _Above:
    """What stands above this module, which it cannot import without a circle: each puts its part here."""

    work: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # dispatch.py: carries out an operation
    give_out: Callable[[Any, str], Any]  # unknown.py: answers for values that were not computed
    assign: Callable[[Tensor, Tensor], None]  # assignment.py: `tensor.data = new`


ABOVE = _Above()


def _number(native: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A tensor as a Python number, also for C++ that builds a tensor of a list, past the dispatcher."""

    @functools.wraps(native)
    def number(self: VirtualTensor) -> Any:
        try:
            return native(self)
        except RuntimeError as error:
            if "meta tensors" not in str(error) or self.payload.is_meta:
                raise
        with torch._C.DisableTorchFunction():
            return native(self.payload)

    return number


class VirtualTensor(torch.Tensor):
    """A tensor on a virtual GPU."""

    payload: Tensor
    _slot: VirtualDevice
    _block: Block

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Rebuild from data as `type(p)(data, requires_grad=…)` does; the device is that of the data."""
        requires_grad = kwargs.pop("requires_grad", args[0] if args else issubclass(cls, nn.Parameter))
        if data is None:
            data = torch.empty(0)
        if issubclass(cls, nn.Parameter):
            return nn.Parameter(data, requires_grad)
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
    def device(self) -> torch.device:  # type: ignore[override]
        return self._slot.device

    is_cuda = True
    is_cpu = False
    is_meta = False

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
        self.__class__ = parameter_class(self) if value else HostTensor if is_host(self) else VirtualTensor

    def get_device(self) -> int:
        return self._slot.index

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return moved(torch.Tensor.to, (self, *args), kwargs)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
        return moved_to_gpu(torch.Tensor.cuda, (self, device), {})

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return f"torch.cuda.{torch.Tensor.type(self.payload).removeprefix('torch.')}"
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        plain = name.replace("torch.cuda.", "torch.")
        target = self.to(torch.empty(0).type(plain).dtype)
        return target if ".cuda." in name else target.cpu()

    def as_subclass(self, cls: Any) -> Any:
        refuse_own_class(cls, self)
        return self.view_as(self)

    def record_stream(self, stream: Any) -> None:
        """Nothing runs asynchronously here, so there is nothing to keep alive."""

    def data_ptr(self) -> int:
        payload = self.payload
        if payload.is_meta:
            # No memory is there; who compares addresses sees which tensors share one.
            return self._start() + int(payload.storage_offset()) * payload.element_size()
        return payload.data_ptr()

    def _start(self) -> int:
        return address(self.payload.untyped_storage())

    def untyped_storage(self) -> torch.UntypedStorage:
        storage = label_storage(self.payload.untyped_storage(), self._slot.device)
        storage._virtual_block = self._block  # type: ignore[attr-defined]
        return storage

    def _typed_storage(self) -> torch.TypedStorage:
        return torch.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)

    storage = _typed_storage

    def is_shared(self) -> bool:
        return True

    def share_memory_(self) -> VirtualTensor:
        return self

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> Tensor:
        message = f"cannot pin '{self.type()}' only dense CPU tensors can be pinned"
        faults.report("pin-of-gpu-tensor", message, "Tensor.pin_memory", [("self", self)], RuntimeError)
        return self.cpu()

    def tolist(self) -> Any:
        return ABOVE.give_out(self, "tolist") if _is_unknown(self) else self.payload.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            self._refuse_gradient()
            message = (
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
            faults.report("device-mismatch", message, "Tensor.numpy", [("self", self)], TypeError)
        return self._array()

    def _refuse_gradient(self) -> None:
        if self.requires_grad:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )

    def _array(self) -> Any:
        return ABOVE.give_out(self, "numpy") if _is_unknown(self) else self.payload.numpy(force=True)

    __float__ = _number(torch.Tensor.__float__)
    __int__ = _number(torch.Tensor.__int__)
    __index__ = _number(torch.Tensor.__index__)
    __bool__ = _number(torch.Tensor.__bool__)
    __complex__ = _number(torch.Tensor.__complex__)

    def __dlpack__(self, **_: Any) -> Any:
        raise state.NotSimulated(
            "DLPack of a CUDA tensor is not simulated by virtual GPUs: there is no GPU memory."
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if _is_unknown(self):
            return f"tensor(?, size={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"
        text = torch.Tensor.__repr__(self.payload)
        start = text.rfind(", dtype=")
        cut = start if start >= 0 else len(text) - 1
        text = f"{text[:cut]}, device='{self.device}'{text[cut:]}"
        if self.grad_fn is not None:
            text = f"{text[:-1]}, grad_fn=<{type(self.grad_fn).__name__}>)"
        elif self.requires_grad:
            text = f"{text[:-1]}, requires_grad=True)"
        return text

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
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickle and torch.save write: the CUDA tensor that this one stands for."""
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
        untyped = label_storage(self.payload.untyped_storage(), self._slot.device)
        storage = torch.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)
        place = (self.payload.storage_offset(), tuple(self.payload.size()), self.payload.stride())
        return torch._utils._rebuild_tensor_v2, (storage, *place, self.requires_grad, OrderedDict())


class VirtualParameter(VirtualTensor, nn.Parameter):
    """A parameter on a virtual GPU: made by nn.Parameter(virtual) or by moving a parameter."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Parameter containing:\n" + VirtualTensor.__repr__(self)


class HostTensor(VirtualTensor):
    """A tensor on the CPU that has a shape and no values: there are some where shapes only are rehearsed."""

    is_cuda = False
    is_cpu = True

    def get_device(self) -> int:
        return -1

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(self._slot.meta if _means_cpu(value) else value for value in args)
        if _means_cpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._slot.meta}
        return moved(torch.Tensor.to, (self, *args), kwargs)

    def cpu(self, memory_format: Any = None) -> Tensor:
        return self

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return torch.Tensor.type(torch.empty(0, dtype=self.dtype))
        return super().type(dtype, non_blocking, **kwargs)

    def _start(self) -> int:
        return host_address(self._block)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a tensor of stand-ins: what is written to a file has to have bytes."""
        values = ABOVE.give_out(self, "__reduce_ex__")
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (values, self.requires_grad, OrderedDict())
        return values.__reduce_ex__(protocol)

    def pin_memory(self, device: Any = None) -> Tensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            self._refuse_gradient()
        return self._array()


class HostParameter(HostTensor, nn.Parameter):
    """A parameter on the CPU that has a shape and no values."""


PARAMETERS = frozenset((VirtualParameter, HostParameter))
VIRTUAL = frozenset((VirtualTensor, HostTensor)) | PARAMETERS


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


def _means_cpu(device: Any) -> bool:
    kind = device.type if device.__class__ is torch.device else device if device.__class__ is str else None
    return kind is not None and kind.startswith("cpu")


def _is_unknown(tensor: VirtualTensor) -> bool:
    return tensor.payload.is_meta or tensor._block.unknown


def wrap(payload: Tensor, slot: VirtualDevice, block: Block | None = None) -> VirtualTensor:
    """A virtual tensor over a payload. Without a block the payload's storage is counted as a new allocation."""
    inference = payload.is_inference()
    if inference is not _in_inference_mode():
        # A view is an inference tensor when its base is one, whatever the mode in which it is taken.
        with torch._C._InferenceMode(inference):
            return wrap(payload, slot, block)
    made: Any
    if payload.layout is _STRIDED:
        made = _make(
            VirtualTensor,
            payload.shape,
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=payload.dtype,
            device=slot.meta,
            _extra_dispatch_keys=AUTOCAST,
        )
        if block is None:
            block = Block(slot, payload.untyped_storage().nbytes())
    else:
        made = _without_strides(payload, slot)
        if block is None:
            block = Block(slot, payload.numel() * payload.element_size())
    made.payload = payload
    made._slot = slot
    made._block = block
    if slot.index == state.HOST:
        made.__class__ = HostTensor
    return made  # type: ignore[no-any-return]


def moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Tensor.to, whose device may be the first positional argument."""
    if len(args) > 1:
        target = virtual_device(args[1])
        if target is not None:
            args = (args[0], target, *args[2:])
    elif kwargs:
        target = virtual_device(kwargs.get("device"))
        if target is not None:
            kwargs = {**kwargs, "device": target}
    result: Tensor = torch.Tensor.to(*args, **kwargs)
    return result


def moved_to_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Tensor.cuda(device=None, …): None is the current device."""
    device = args[1] if len(args) > 1 else kwargs.get("device")
    if device is not None and device.__class__ is not int and torch.device(device).type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device, got {device}")
    target = virtual_device("cuda" if device is None else device)
    if target is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return torch.Tensor.to(args[0], target)


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
