"""torch.distributed on virtual GPUs: groups that ask for NCCL get gloo, and collectives run on the payloads.

`get_backend` goes on to answer `nccl`. A group that was asked for with NCCL alone takes GPU tensors only, as on
hardware. It never simulates NCCL itself: no topology, no asynchronous errors, no time-outs of its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.virtual import ending, faults, futures, lone_rank, met_ranks, origin, rpc, sharded, state
from trimtab.virtual.state import Machine, Patch
from trimtab.virtual.tensor import VIRTUAL

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
}
_MESSAGES = met_ranks.SENDS | met_ranks.RECEIVES
_POINT_TO_POINT = _MESSAGES | {"monitored_barrier_"}
_PAIRED = frozenset(("send", "recv_"))
"""Messages of which both ends are known: who takes from anybody names nobody."""
# What a rank gives, by the names of the schemas: an output list says nothing that the ranks must agree on.
_GIVEN = ("input_tensors", "input_list", "input_tensor", "input", "inputs", "tensors", "tensor")
# NCCL counts elements here and looks at no shape; gloo compares shapes.
_FLAT = frozenset(("_allgather_base_", "_reduce_scatter_base_"))
# Sizes that may differ between ranks: only the order of the calls has to agree.
_UNEQUAL = frozenset(("alltoall_", "alltoall_base_", "gather_", "scatter_", "barrier"))


def collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out one c10d operation on the payloads of its tensors, which may be nested in lists of lists."""
    schema = func._schema
    name = schema.name.removeprefix("c10d::")
    held: dict[int, torch.Tensor] = {}
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    machine = state.machine()
    if machine is not None:
        if "barrier" not in name:
            on_gpus(_NAMES.get(name, name), _group(named), named)
        if machine.observer is not None:
            group = _group(named)
            whole = group.size() == dist.get_world_size() if dist.is_initialized() else True
            machine.observer.exchange(_NAMES.get(name, name), tensors(list(named.values())), whole)
            if name not in _POINT_TO_POINT:
                machine.observer.collective(_record(name, named))
            elif name in _PAIRED:
                machine.observer.message(_message(name, named))
        if machine.stands_for_all:
            return lone_rank.collective(func, name, named, _group(named))
        if machine.shapes and _without_values(name, func, named):
            if name in _MESSAGES:
                return met_ranks.message(func, name, named)
            met_ranks.forget(_written(name, func, named), f"c10d.{_NAMES.get(name, name)}")
            return met_ranks.answered(func, named)

    def payload(value: Any) -> Any:
        if value.__class__ not in VIRTUAL:
            return value
        held[id(value.payload)] = value
        return value.payload

    payloads, rest = tree_map(payload, (list(args), kwargs))
    if name in _FLAT:
        payloads = [_flat(value, held) for value in payloads]
    made = _exchanged(*payloads[:3]) if name == "alltoall_" else func(*payloads, **rest)
    work = made[-1] if isinstance(made, tuple) else made
    if isinstance(work, torch.ScriptObject):
        ending.watch(work, payloads)
    # The results of a collective are its own arguments, written in place.
    return tree_map(lambda value: held.get(id(value), value), made)


def _without_values(name: str, func: Any, named: dict[str, Any]) -> bool:
    """Whether some rank lacks values that this collective needs."""
    if name in _MESSAGES:
        return True
    written = met_ranks.written(func, named)
    given = _given(named)
    if name == "broadcast_" and _group(named).rank() != named["root_rank"]:
        given = []
    return not met_ranks.all_have_values(name, given, written, _group(named))


def _written(name: str, func: Any, named: dict[str, Any]) -> list[torch.Tensor]:
    """What this rank gets from a collective."""
    root, rank = named.get("root_rank"), _group(named).rank()
    keeps = (name == "broadcast_" and rank == root) or (name == "reduce_" and rank != root)
    return [] if keeps else met_ranks.written(func, named)


def _exchanged(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any) -> tuple[Any, Any]:
    """all_to_all as one exchange of flat tensors, done when this returns.

    NCCL takes tensors of unequal sizes; gloo takes them in this form only, and has no other before torch 2.12.
    """
    given = torch.cat([tensor.reshape(-1) for tensor in inputs])
    sizes, parts = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
    flat = given.new_empty(sum(sizes))
    work = torch.ops.c10d.alltoall_base_(flat, given, group, sizes, parts)
    dist.Work.unbox(work).wait()
    for output, part in zip(outputs, flat.split(sizes), strict=True):
        output.copy_(part.view_as(output))
    return outputs, work


def _flat(value: Any, held: dict[int, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return value
    flat = value.view(-1)
    if id(value) in held:
        held[id(flat)] = held[id(value)]
    return flat


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _group(named: dict[str, Any]) -> Any:
    return torch._C._distributed_c10d.ProcessGroup.unbox(named["process_group"])


def _given(named: dict[str, Any]) -> list[torch.Tensor]:
    return tensors(next((named[key] for key in _GIVEN if key in named), None))


def _record(name: str, named: dict[str, Any]) -> dict[str, Any]:
    group, given = _group(named), _given(named)
    return {
        **record(_NAMES.get(name, name), group, given, name in _UNEQUAL),
        "gpu": _gpu(name, named, given) if _gpu_only(group) else None,
        "root": named.get("root_rank") if name in ("broadcast_", "reduce_", "gather_", "scatter_") else None,
        "parts": _parts(name, named, group.size()),
    }


def _message(name: str, named: dict[str, Any]) -> dict[str, Any]:
    """What both ends of a message have to agree on. NCCL knows no tags: it goes by the order."""
    group, sends = _group(named), name in met_ranks.SENDS
    peer = named["dst"] if sends else named["src"]
    return {
        **record("send" if sends else "recv", group, named["tensors"], unequal=False),
        "peer": peer,
        "tag": 0 if _gpu_only(group) else named.get("tag", 0),
    }


def _parts(name: str, named: dict[str, Any], size: int) -> dict[str, Any] | None:
    """What a rank gives each of the others in an exchange of all with all, and what it expects of each, in elements."""
    if name == "alltoall_base_":
        whole = {"gives": (named["input"], named["input_split_sizes"])}
        whole["takes"] = (named["output"], named["output_split_sizes"])
        return {key: split(tensor, rows, size) for key, (tensor, rows) in whole.items()}
    if name == "alltoall_":
        lists = {"gives": named["input_tensors"], "takes": named["output_tensors"]}
        return {key: [tensor.numel() for tensor in given] for key, given in lists.items()}
    return None


def split(tensor: torch.Tensor, rows: list[int] | None, size: int) -> list[int]:
    """The elements of each part of a tensor: of so many rows, or of equal size."""
    if not rows:
        return [tensor.numel() // size] * size
    wide = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return [int(count) * wide for count in rows]


def record(op: str, group: Any, given: list[torch.Tensor], unequal: bool) -> dict[str, Any]:
    """What the ranks have to agree on, and what is told of it."""
    elements = sum(tensor.numel() for tensor in given)
    return {
        "op": op,
        "group": group.group_name,
        "rank": group.rank(),
        "size": group.size(),
        "numel": None if unequal else elements,
        "dtype": None if unequal or not given else str(given[0].dtype).removeprefix("torch."),
        "shape": list(given[0].shape) if len(given) == 1 else None,
        "born": origin.born_of(given[0]) if given else None,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in given),
        "gives": [elements, str(given[0].dtype).removeprefix("torch.")] if given else None,
    }


def _gpu(name: str, named: dict[str, Any], given: list[torch.Tensor]) -> str | None:
    """The GPU on which NCCL runs it. Of a barrier only what the program says: NCCL takes the group's own, or one by the
    rank's number, not the current device on which torch makes the tensor for it."""
    if name == "barrier":
        chosen = named.get("device_ids")
        return f"cuda:{chosen[0]}" if chosen else None
    return str(given[0].device) if given else None


_asked: dict[str, str] = {}
"""What groups that have gloo were asked for with, by their names; each machine has its own (see `patches`)."""


_named: dict[str, str] = {}
"""What groups that connect to nobody were asked for with."""


def _gpu_only(group: Any) -> bool:
    """Whether it was asked for with a GPU backend alone. A bare backend, as RPC uses, has no name and was not."""
    return ":" not in _asked.get(getattr(group, "group_name", ""), ":")


def on_gpus(name: str, group: Any, named: dict[str, Any]) -> None:
    """NCCL has no kernels for tensors in host memory."""
    if not _gpu_only(group):
        return
    operands = [(key, tensor) for key, value in named.items() for tensor in tensors(value)]
    plain = [(key, tensor) for key, tensor in operands if tensor.__class__ not in VIRTUAL]
    if plain:
        message = "No backend type associated with device type cpu"
        faults.report("device-mismatch", message, f"c10d.{name}", plain, RuntimeError)


def _mapped(backend: Any) -> tuple[Any, str | None]:
    """The backend to use, and the one to name: any mention of NCCL becomes gloo."""
    text = str(backend or "").lower()
    return ("gloo", text or None) if not text or "nccl" in text else (backend, None)


def patches(in_force: Machine) -> list[Patch]:
    """What to replace while virtual GPUs are in force."""
    if not dist.is_available():
        return []
    c10d = dist.distributed_c10d

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        real_backend, asked = _mapped(backend)
        kwargs.pop("device_id", None)
        if asked is not None:
            kwargs.pop("pg_options", None)
        _asked.clear()
        _named.clear()
        ending.settle_at_exit()
        if in_force.stands_for_all:
            lone_rank.init_group(native_init, args, kwargs)
            _named[c10d._get_default_group().group_name] = str(backend or "nccl").lower()
        else:
            native_init(real_backend, *args, **kwargs)
        if asked is not None:
            _asked[c10d._get_default_group().group_name] = asked
        sharded.answer_for_shards()

    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        real_backend, asked = _mapped(backend) if backend is not None else (None, None)
        kwargs.pop("device_id", None)
        if in_force.stands_for_all:
            real_backend = None  # that of the whole group, which connects to nobody
        elif in_force.observer is not None and not kwargs.get(
            "use_local_synchronization", bool(args[:1] and args[0])
        ):
            everybody = range(dist.get_world_size())
            in_force.observer.group_made(sorted(everybody if ranks is None else ranks))
        group = native_new(ranks, timeout, real_backend, None if asked else pg_options, *args, **kwargs)
        if backend is None:
            asked = _asked.get(c10d._get_default_group().group_name)
        if asked is not None and isinstance(group, dist.ProcessGroup):
            _asked[group.group_name] = asked
        if in_force.stands_for_all and isinstance(group, dist.ProcessGroup):
            whole = _named.get(c10d._get_default_group().group_name, "")
            _named[group.group_name] = str(backend).lower() if backend is not None else whole
        return group

    def get_backend(group: Any = None) -> Any:
        answer = native_backend(group)
        name = getattr(group or c10d._get_default_group(), "group_name", "")
        asked = _asked.get(name, "") or _named.get(name, "")
        return dist.Backend("nccl" if "nccl" in asked else asked) if asked else answer

    def object_device(group: Any = None) -> str:
        return "cuda" if _gpu_only(group or c10d._get_default_group()) else "cpu"

    def start_coalescing(group: Any, device: Any = None) -> None:
        # NCCL sends out what follows together; here each is done when it returns.
        if "nccl" not in get_backend(group):
            native_start(group, device)

    def end_coalescing(group: Any, device: Any = None) -> Any:
        if "nccl" not in get_backend(group):
            return native_end(group, device)
        return dist.Work.unbox(met_ranks.done([]))

    native_start, native_end = dist.ProcessGroup._start_coalescing, dist.ProcessGroup._end_coalescing
    native_init, native_new = c10d.init_process_group, c10d.new_group
    native_backend = c10d.get_backend
    replacements: list[tuple[str, Callable[..., Any]]] = [
        ("init_process_group", functools.wraps(native_init)(init_process_group)),
        ("new_group", functools.wraps(native_new)(new_group)),
        ("get_backend", functools.wraps(native_backend)(get_backend)),
        ("is_nccl_available", lambda: True),
    ]
    # torch.distributed re-exports these names, and parts of it (device meshes) have taken them by name.
    owners = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed")]
    return [
        *(
            (owner, name, new)
            for name, new in replacements
            for owner in owners
            if vars(owner).get(name) is vars(c10d)[name]
        ),
        (c10d, "_get_object_coll_device", object_device),
        (c10d, "_get_pg_default_device", lambda group=None: torch.device(object_device(group))),
        (sys.modules[__name__], "_asked", dict(_asked)),
        (sys.modules[__name__], "_named", dict(_named)),
        (dist.ProcessGroup, "_start_coalescing", start_coalescing),
        (dist.ProcessGroup, "_end_coalescing", end_coalescing),
        *futures.patches(),
        *rpc.patches(),
    ]
