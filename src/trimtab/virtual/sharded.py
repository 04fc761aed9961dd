"""Sharded tensors (DTensor) on virtual GPUs: FSDP2, tensor parallelism and what builds on them.

A DTensor is a wrapper of torch's own around a shard, and C++ takes its device from the shard: meta, for a virtual one.
While virtual GPUs are in force it answers what its shard answers. DTensor is imported only by programs that use
processes, so it is changed when they join a group.

Random numbers of a sharded tensor are those of each rank's own generator: DTensor would count the offsets of CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trimtab.virtual import state
from trimtab.virtual.tensor import VIRTUAL

SHARDED: set[type] = set()
"""DTensor, once it has been changed."""
# Makes a tensor of its first operand's shape: of a sharded one, shard by shard.
_ALIKE = frozenset(
    ("aten::_to_copy", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")
)


def answer_for_shards() -> None:
    """Make DTensors say where their shards are, until the outermost machine is taken out of force."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor, _dispatch, _op_schema, _random

    if DTensor in SHARDED or not state._stack:
        return
    undo = state._stack[0].undo
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        state.replace(undo, DTensor, name, property(_of_shard(name)))
    state.replace(undo, DTensor, "get_device", lambda tensor: tensor.device.index if tensor.is_cuda else -1)
    # Nothing runs asynchronously here, so a result is waited for at once.
    state.replace(undo, functional, "_maybe_wrap_tensor", functional.wait_tensor)
    for module in (_random, _dispatch):
        state.replace(undo, module, "is_rng_supported_mesh", lambda mesh: False)
    state.replace(undo, _op_schema, "_rebuild_tensor_from_dtensor_meta", _shape_only)
    SHARDED.add(DTensor)
    undo.callback(SHARDED.clear)


def _of_shard(name: str) -> Callable[[Any], Any]:
    own = getattr(torch._C.TensorBase, name)

    def answer(tensor: Any) -> Any:
        shard = tensor._local_tensor
        return getattr(shard, name) if type(shard) in VIRTUAL else own.__get__(tensor)

    return answer


def _shape_only(spec: Any) -> torch.Tensor:
    """What DTensor tries an operation on to learn the shape of its result, under fake mode: there is no CUDA for it."""
    known = spec.tensor_meta
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="cpu")


@cache
def has_own_rules(kind: type) -> bool:
    """Whether a class of tensors wraps others and says itself what an operation does to them, as DTensor does."""
    none = torch._C._disabled_torch_dispatch_impl
    return getattr(kind, "__torch_dispatch__", none) is not none


def by_its_class(work: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on such tensors: what it does to those inside comes back to the dispatcher, if they are virtual.

    A shard that is not virtual yet would not: one that is moved to a GPU, or made on one in the shape of another.
    """
    whole: Any = args[0] if args else None
    alike = func._schema.name in _ALIKE and type(whole) in SHARDED
    if not (alike and state.is_virtual_device(kwargs.get("device"))):
        return func(*args, **kwargs)
    shard = work(func, (whole._local_tensor, *args[1:]), kwargs)
    return whole.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
