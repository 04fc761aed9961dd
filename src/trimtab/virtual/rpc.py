"""torch.distributed.rpc around virtual GPUs: calls with CPU tensors work; one that carries a GPU tensor says that this
is not simulated, also where another worker met it, and so do device maps. TensorPipe reads tensors in C++, where a
virtual one has no values. (The functions that are called run on threads of RPC: see threads.py.)"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.virtual.state import NotSimulated, Patch
from trimtab.virtual.tensor import VIRTUAL

_NOT_SENT = re.compile(r"RPC with a tensor on \S+ is not simulated by virtual GPUs\.")
_PYTHON_ELSEWHERE = re.compile(r"Error on Node \d+: python_error")
_IN_C = ("_invoke_rpc_builtin", "_invoke_remote_builtin", "_invoke_rpc_torchscript")


def patches() -> list[Patch]:
    """What to replace while virtual GPUs are in force."""
    rpc, internal = (sys.modules.get(f"torch.distributed.rpc{part}") for part in ("", ".internal"))
    api = sys.modules.get("torch.distributed.rpc.api")
    if rpc is None or internal is None or api is None or not rpc.is_available():
        return []
    pickler = internal._internal_rpc_pickler
    table = {**pickler._dispatch_table, **dict.fromkeys(VIRTUAL, _refuse)}
    return [
        (pickler, "_dispatch_table", table),
        (rpc, "init_rpc", _without_maps(rpc.init_rpc)),
        (torch._C.Future, "wait", _told(torch._C.Future.wait)),
        *_patches_of_autograd(),
        *((api, name, _on_the_host(getattr(api, name))) for name in _IN_C),
    ]


def _refuse(tensor: Any) -> Any:
    raise NotSimulated(f"RPC with a tensor on {tensor.device} is not simulated by virtual GPUs.")


def _told(real: Callable[..., Any]) -> Callable[..., Any]:
    """An answer that the other worker could not send comes as text: it is no fault of the program here either."""

    @functools.wraps(real)
    def wait(self: Any) -> Any:
        try:
            return real(self)
        except RuntimeError as error:
            met = _NOT_SENT.search(str(error))
            if met is None or isinstance(error, NotSimulated):
                raise
            raise NotSimulated(met.group()) from error

    return wait


def _patches_of_autograd() -> list[Patch]:
    """The part of a backward pass on another worker runs in C++ alone, on a thread where no mode can be switched on."""
    autograd: Any = sys.modules.get("torch.distributed.autograd")
    if autograd is None or not autograd.is_available():
        return []
    real = autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            real(*args, **kwargs)
        except RuntimeError as error:
            if not _PYTHON_ELSEWHERE.match(str(error)):
                raise
            raise NotSimulated(
                "Distributed autograd stopped in Python on another worker, which does not say why: its backward pass "
                "through a GPU of that worker is not simulated by virtual GPUs."
            ) from error

    return [(autograd, "backward", backward)]


def _without_maps(real: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(real)
    def init_rpc(
        name: str,
        backend: Any = None,
        rank: int = -1,
        world_size: int | None = None,
        rpc_backend_options: Any = None,
    ) -> None:
        if getattr(rpc_backend_options, "device_maps", None) or getattr(rpc_backend_options, "devices", None):
            raise NotSimulated("RPC between GPUs (device_maps, devices) is not simulated by virtual GPUs.")
        real(name, backend, rank, world_size, rpc_backend_options)

    return init_rpc


def _on_the_host(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def invoke(*args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if leaf.__class__ in VIRTUAL:
                _refuse(leaf)
        return real(*args, **kwargs)

    return invoke
