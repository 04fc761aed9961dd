"""torch.distributed.rpc around virtual GPUs: calls with CPU tensors work; one that carries a GPU tensor says that this
is not simulated, and so do device maps. TensorPipe reads tensors in C++, where a virtual one has no values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_leaves

from trimtab.virtual.state import NotSimulated, Patch
from trimtab.virtual.tensor import VIRTUAL

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
        *((api, name, _on_the_host(getattr(api, name))) for name in _IN_C),
    ]


def _refuse(tensor: Any) -> Any:
    raise NotSimulated(f"RPC with a tensor on {tensor.device} is not simulated by virtual GPUs.")


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
