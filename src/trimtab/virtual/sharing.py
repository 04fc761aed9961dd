"""CUDA IPC: a virtual tensor that is handed to another process (mp.Process, a Queue, mp.spawn) shares its memory.

The payload is put into shared memory and opened in the other process, so what one writes the other sees, as with
hogwild training. Nothing is simulated of the sender's duty to keep the tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions

from trimtab.virtual import processes, state
from trimtab.virtual.memory import Block
from trimtab.virtual.tensor import VirtualParameter, VirtualTensor, wrap


def enter() -> Callable[[], None]:
    """Let processes share virtual tensors; returns the undo."""
    known: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    before = {kind: known.get(kind) for kind in (VirtualTensor, VirtualParameter)}
    for kind in before:
        ForkingPickler.register(kind, _reduce)

    def leave() -> None:
        for kind, reducer in before.items():
            known.pop(kind, None)
            if reducer is not None:
                known[kind] = reducer

    return leave


def _reduce(tensor: VirtualTensor) -> Any:
    payload = tensor.payload
    if payload.is_meta or payload.layout is not torch.strided:
        return tensor.__reduce_ex__(2)  # there is no memory to share, or not one piece of it
    if tensor.requires_grad and not tensor.is_leaf:
        return reductions.reduce_tensor(tensor)  # which refuses
    place = (payload.dtype, payload.storage_offset(), tuple(payload.size()), payload.stride())
    kind = isinstance(tensor, nn.Parameter)
    return _rebuild, (_shared(payload), place, tensor._slot.index, kind, tensor.requires_grad)


def _shared(payload: torch.Tensor) -> Any:
    """What torch sends of a CPU tensor's storage, which may say that it is on a virtual GPU."""
    storage: Any = payload.untyped_storage()
    said, storage.__class__ = storage.__class__, torch.UntypedStorage
    try:
        return reductions.reduce_storage(storage)
    finally:
        storage.__class__ = said


def _rebuild(shared: Any, place: Any, index: int, parameter: bool, requires_grad: bool) -> torch.Tensor:
    machine = state.machine()
    if machine is None:
        raise RuntimeError("A tensor on a virtual GPU came to a process that has none.")
    slot = processes.used(machine, index)
    open_storage, arguments = shared
    dtype, *rest = place
    with torch._C.DisableTorchFunction():
        payload = torch.empty(0, dtype=dtype, device="cpu").set_(open_storage(*arguments), *rest)
    # The memory is the sender's: this process has allocated nothing.
    tensor = wrap(payload, slot, Block(slot, 0))
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)
