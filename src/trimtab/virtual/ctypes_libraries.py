"""Libraries that reach the GPU past torch, by ctypes: bitsandbytes.

Its operations for CUDA are Python around functions of its library. That Python runs, and so takes the memory that it
takes on a GPU; the functions do nothing; then the values are those of the operation's kernel for the CPU. Such a
function that anybody else calls is refused: a real GPU beside the virtual ones must not be touched, and without one the
library ends the process. Of its paged memory (CUDA's managed one, which moves to the host where a GPU is full, and of
which torch's allocator knows nothing) the tensors are made, and counted nowhere.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.virtual import rules, state, unknown
from trimtab.virtual.pieces import aside, on_host
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.state import NotSimulated
from trimtab.virtual.tensor import VIRTUAL, payload_of

OPERATIONS = "bitsandbytes::"
_FOR_CUDA: bool = torch._C._has_cuda  # before virtual GPUs say otherwise


class _Launches(threading.local):
    allowed = False
    seen = False


_launches = _Launches()
"""Of each thread: whether an operation's kernel may call the library now, and whether it has."""


def set_in_its_specs(undo: ExitStack) -> None:
    """Have a torch that was built for the CPU take the library for it: that for CUDA cannot even be opened."""
    if not _FOR_CUDA:
        state.replace(undo, sys.modules["bitsandbytes.cuda_specs"], "get_cuda_specs", lambda: None)


def set_in_bitsandbytes(undo: ExitStack) -> None:
    """Take the functions of its library, but for those on the CPU."""
    module = sys.modules["bitsandbytes.cextension"]
    for name in ("BNBNativeLibrary", "ErrorHandlerMockBNBNativeLibrary"):
        owner = getattr(module, name, None)
        if owner is not None and "__getattr__" in vars(owner):
            state.replace(undo, owner, "__getattr__", _of_the_cpu(vars(owner)["__getattr__"]))


def set_in_its_functions(undo: ExitStack) -> None:
    """Have paged tensors made without CUDA."""
    module = sys.modules["bitsandbytes.functional"]
    for name, new in (("get_paged", _paged), ("prefetch_tensor", _left), ("fill", _filled)):
        if hasattr(module, name):
            state.replace(undo, module, name, new)


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = "cuda:0") -> Any:
    index = torch.device(device).index or 0
    machine = state.machine()
    assert machine is not None  # what is set here is taken back with it
    with aside(machine.at(index)):
        made: Any = torch.zeros(shape, dtype=dtype, device=f"cuda:{index}")
    made.is_paged, made.page_deviceid = True, index
    return made


def _filled(tensor: Tensor, value: float, *_: Any, **__: Any) -> None:
    tensor.fill_(value)


def _left(*_: Any, **__: Any) -> None:
    """A prefetch moves nothing here."""


def _of_the_cpu(native: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattr__(self: Any, name: str) -> Any:
        return native(self, name) if "cpu" in name or name.startswith("_") else _launch(name)

    return __getattr__


def _launch(name: str) -> Callable[..., int]:
    def launch(*_: Any, **__: Any) -> int:
        if not _launches.allowed:
            raise NotSimulated(
                f"bitsandbytes' function {name} works on the memory of a GPU itself and is not simulated by virtual "
                "GPUs"
            )
        _launches.seen = True
        return 0  # no error

    return launch


@contextmanager
def _launching() -> Iterator[Callable[[], bool]]:
    """The library's functions do nothing meanwhile; says whether one was called."""
    before = _launches.allowed, _launches.seen
    _launches.allowed, _launches.seen = True, False
    try:
        yield lambda: _launches.seen
    finally:
        _launches.allowed, _launches.seen = before


def carry(kernel: Callable[[], Any], plan: Plan, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """One of the library's operations on a GPU: the memory by its kernel for CUDA, the values by that for the CPU."""
    with _launching() as launched:
        made = kernel()
        if not launched():
            return made  # all of it was torch's, and so came by here
    operands = [
        (name, tensor) for name, tensor in rules.operands(plan, args, kwargs) if tensor.__class__ in VIRTUAL
    ]
    if any(unknown.is_unknown(tensor) for _, tensor in operands):
        for tensor in (*tree_leaves(made), *(tensor for name, tensor in operands if name in plan.writes)):
            unknown.forget(tensor)
        return made
    on_cpu: Any = tree_map(
        lambda value: payload_of(value) if isinstance(value, Tensor) else value, (args, kwargs)
    )
    with on_host():
        values = func(*on_cpu[0], **on_cpu[1])
    for tensor, value in zip(tree_leaves(made), tree_leaves(values), strict=True):
        if tensor.__class__ in VIRTUAL:
            tensor.payload.copy_(value)
    return made
