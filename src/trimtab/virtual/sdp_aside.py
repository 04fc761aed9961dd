"""Attention that CUDA computes by one kernel and the CPU by its definition: the values of one, the memory of the other.

The definition runs on a device aside, which nobody counts; its graph gives the gradients. What CUDA's kernel would
leave behind, keep and take is counted on the device itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.virtual import sdp_memory
from trimtab.virtual.course import Course
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.state import VirtualDevice
from trimtab.virtual.tensor import wrap

_ROOM = 1 << 60


def attend(
    backend: int, work: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Any
) -> Tensor:
    """The result of `work`, which takes these operands, as that of a kernel of CUDA's."""
    return _Aside.apply(backend, work, query, key, value, mask)  # type: ignore[no-any-return]


class _Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: int, work: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        slot: VirtualDevice = query._slot
        aside = VirtualDevice(slot.index, slot.name, _ROOM, slot.capability)
        operands = query, key, value, mask
        copies = [
            None if tensor is None else wrap(tensor.payload, aside).requires_grad_(wanted)
            for tensor, wanted in zip(operands, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            found: Any = work(*copies)
        made = wrap(found.payload, slot)
        with past_dispatch():
            sums = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(*operands, made, wrap(sums, slot))
        ctx.aside, ctx.backend, ctx.copies, ctx.found = aside, backend, copies, found
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, _, out, _ = ctx.saved_tensors
        slot = query._slot
        course = Course(sdp_memory.backward(ctx.backend, (grad, query, key, value, out), slot), slot)
        wanted = [copy for copy in ctx.copies if copy is not None and copy.requires_grad]
        found = torch.autograd.grad(ctx.found, wanted, wrap(grad.payload, ctx.aside), retain_graph=True)
        made = dict(zip(map(id, wanted), (wrap(tensor.payload, slot) for tensor in found), strict=True))  # type: ignore[attr-defined]
        course.end()
        return None, None, *(made.get(id(copy)) for copy in ctx.copies)
