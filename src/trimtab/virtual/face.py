"""What Python sees of a virtual tensor: its device, its memory, its values as numbers, arrays, text and pickle.

Here a tensor is only read; tensor.py makes and moves them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import faults, state
from trimtab.virtual.memory import Block, host_address
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.storage import address, label_storage


class _Above:
    """What stands above this module, which it cannot import without a circle: each puts its part here."""

    work: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # dispatch.py: carries out an operation
    give_out: Callable[[Any, str], Any]  # unknown.py: answers for values that were not computed
    assign: Callable[[Tensor, Tensor], None]  # assignment.py: `tensor.data = new`
    read: Callable[[str], None]  # compiled.py: values are taken past the dispatcher, by a method of this name


ABOVE = _Above()


def _is_unknown(tensor: Face) -> bool:
    return tensor.payload.is_meta or tensor._block.unknown


def _number(native: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A tensor as a Python number, also for C++ that builds a tensor of a list, past the dispatcher."""

    @functools.wraps(native)
    def number(self: Face) -> Any:
        try:
            return native(self)
        except RuntimeError as error:
            if "meta tensors" not in str(error) or self.payload.is_meta:
                raise
        with torch._C.DisableTorchFunction():
            return native(self.payload)

    return number


class Face(torch.Tensor):
    """The side of a tensor on a virtual GPU that answers questions."""

    payload: Tensor
    _slot: VirtualDevice
    _block: Block

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._slot.device

    is_cuda = True
    is_cpu = False
    is_meta = False

    def get_device(self) -> int:
        return self._slot.index

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            kind = torch.Tensor.type(self.payload).removeprefix("torch.").removeprefix("meta.")
            return f"torch.cuda.{kind}"
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        plain = name.replace("torch.cuda.", "torch.")
        target = self.to(torch.empty(0).type(plain).dtype)
        return target if ".cuda." in name else target.cpu()

    def record_stream(self, stream: Any) -> None:
        """Nothing runs asynchronously here; but the allocator asks at the next request whether the stream is done."""
        if self._block.nbytes:
            self._slot.ledger.settle()
            self._slot.pool.use(self._block.serial, stream.stream_id)

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

    def share_memory_(self) -> Face:
        return self

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def pin_memory(self, device: Any = None) -> Tensor:
        message = f"cannot pin '{self.type()}' only dense CPU tensors can be pinned"
        faults.report("pin-of-gpu-tensor", message, "Tensor.pin_memory", [("self", self)], RuntimeError)
        return self.cpu()

    def tolist(self) -> Any:
        ABOVE.read("tolist")
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
        ABOVE.read("numpy")
        return ABOVE.give_out(self, "numpy") if _is_unknown(self) else self.payload.numpy(force=True)

    __float__ = _number(torch.Tensor.__float__)
    __int__ = _number(torch.Tensor.__int__)
    __index__ = _number(torch.Tensor.__index__)
    _as_bool = _number(torch.Tensor.__bool__)
    __complex__ = _number(torch.Tensor.__complex__)

    def __bool__(self) -> bool:
        ABOVE.read("bool")
        return bool(self._as_bool())

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What pickle and torch.save write: the CUDA tensor that this one stands for."""
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
        storage = self._typed_storage()
        place = (self.payload.storage_offset(), tuple(self.payload.size()), self.payload.stride())
        return torch._utils._rebuild_tensor_v2, (storage, *place, self.requires_grad, OrderedDict())


class HostFace(Face):
    """The same of a tensor on the CPU that has a shape and no values."""

    is_cuda = False
    is_cpu = True

    def get_device(self) -> int:
        return -1

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            return torch.Tensor.type(torch.empty(0, dtype=self.dtype))
        return super().type(dtype, non_blocking, **kwargs)

    def _start(self) -> int:
        return host_address(self._block)

    def pin_memory(self, device: Any = None) -> Tensor:
        return self

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            self._refuse_gradient()
        return self._array()
