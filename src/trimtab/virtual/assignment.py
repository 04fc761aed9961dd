"""A tensor object that takes on another's data: `tensor.data = new`, between any devices; resizing; lazy parameters.

The object stays the same one, as on hardware: whoever holds it (a module, an optimizer) sees the change. Never copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import origin, state
from trimtab.virtual.face import ABOVE
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.tensor import (
    INTERNAL,
    VIRTUAL,
    HostTensor,
    VirtualTensor,
    is_host,
    over,
    parameter_class,
)


def sync(tensor: VirtualTensor) -> None:
    """Make the wrapper's shape that of its payload again, after an operation that changed it in place."""
    payload = tensor.payload
    if payload.layout is not torch.strided:
        return
    size, stride, offset = payload.size(), payload.stride(), payload.storage_offset()
    if tensor.size() != size or tensor.stride() != stride or tensor.storage_offset() != offset:
        filling = torch._C._get_deterministic_fill_uninitialized_memory()
        # Under deterministic algorithms torch would fill what it grows: here are no values to fill.
        torch._C._set_deterministic_fill_uninitialized_memory(False)
        try:
            with past_dispatch():
                # Grow the wrapper's own (empty) storage first: as_strided_ checks that the view lies inside it.
                torch.ops.aten.resize_.default(
                    tensor, [payload.untyped_storage().nbytes() // payload.element_size()]
                )
                torch.ops.aten.as_strided_.default(tensor, size, stride, offset)
        finally:
            torch._C._set_deterministic_fill_uninitialized_memory(filling)


_HOME = "_virtual_home"


def materialize(
    tensor: Any, shape: Any, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:
    """UninitializedParameter.materialize, on the device to which the parameter was moved before it had a shape."""
    home, kind = tensor.__dict__.pop(_HOME, (tensor.data.device, tensor.data.dtype))
    tensor.__class__ = tensor.cls_to_become
    tensor.data = torch.empty(shape, device=device or home, dtype=dtype or kind)


def set_data(tensor: Tensor, new: Tensor) -> None:
    """`tensor.data = new` between any two devices; the tensor object stays the same one."""
    if nn.parameter.is_lazy(tensor):
        # Nothing is there to move yet: it is made at home when it gets its shape (`materialize`).
        tensor.__dict__[_HOME] = (new.device, new.dtype)
        return
    home, kind, before = tensor.device, tensor.dtype, origin.trace_of(tensor)
    if type(tensor) in VIRTUAL and type(new) in VIRTUAL and tensor.is_inference() is new.is_inference():
        torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.payload, tensor._slot, tensor._block = new.payload, new._slot, new._block  # type: ignore[attr-defined]
        if is_host(new) is not issubclass(type(tensor), HostTensor):  # type: ignore[arg-type]
            tensor._is_param = isinstance(tensor, nn.Parameter)
    else:
        replacement = new.detach()
        if replacement is new:
            replacement = new.view_as(new)
        become(tensor, replacement)
    machine = state.machine()
    if machine is not None and machine.observer is not None:
        after = origin.trace_of(new)
        born = (before.born if before is not None else None) or (after.born if after is not None else None)
        if home == tensor.device and before is not None:
            tensor.__dict__[origin.ATTRIBUTE] = before
        else:
            # A trace of its own: the data that was assigned may live on under another name.
            trace = tensor.__dict__[origin.ATTRIBUTE] = origin.Trace(born, origin.here())
            trace.cast = before.cast if before is not None else None
        if kind is not tensor.dtype:
            origin.note_cast(tensor, origin.trace_of(tensor))


def become(tensor: Tensor, new: Tensor) -> None:
    """Turn a tensor object into another tensor, keeping its identity, gradient flag, class and attributes.

    A CPU tensor and a virtual one are different kinds of object for C++, so the implementations change places.
    """
    requires_grad, grad, kind = tensor.requires_grad, tensor.grad, type(tensor)
    extra = {name: value for name, value in tensor.__dict__.items() if name not in INTERNAL}
    hooks, after_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, new)  # first: it may refuse, and then nothing has changed
    tensor.__class__, new.__class__ = new.__class__, tensor.__class__
    tensor.__dict__, new.__dict__ = new.__dict__, tensor.__dict__
    tensor.__dict__.update(extra)
    if issubclass(kind, nn.Parameter):
        tensor.__class__ = over(kind, parameter_class(tensor))
    if tensor.is_leaf and tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    if hooks:
        tensor._backward_hooks = hooks
    if after_hooks:
        tensor._post_accumulate_grad_hooks = after_hooks
    if grad is not None and grad.device == tensor.device:
        tensor.grad = grad
    elif grad is not None and grad.shape == tensor.shape:
        # Hardware would leave a gradient behind, and every program moves it in the next line: bring it along.
        tensor.grad = grad.detach().to(tensor.device, tensor.dtype)


ABOVE.assign = set_data
