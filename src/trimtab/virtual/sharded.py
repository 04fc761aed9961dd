"""Sharded tensors (DTensor) on virtual GPUs: FSDP2, tensor parallelism and what builds on them.

A DTensor is a wrapper of torch's own around a shard, and C++ takes its device from the shard: meta, for a virtual one.
While virtual GPUs are in force it answers what its shard answers. DTensor is imported only by programs that use
processes, so it is changed when they join a group.

What a class of tensors does inside an operation is Python that makes tensors of its own (a mask, a scalar): it runs
with both modes on, or C++ would make them on meta, where values are lost. DTensor's way is C++ that calls back into
Python.

Random numbers of a sharded tensor are those of each rank's own generator: DTensor would count the offsets of CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.virtual import held_modes, state
from trimtab.virtual.storage import ShellStorage, label_storage
from trimtab.virtual.tensor import VIRTUAL

SHARDED: set[type] = set()
"""DTensor, once it has been changed."""
# Makes a tensor of its first operand's shape: of a sharded one, shard by shard.
_ALIKE = frozenset(
    ("aten::_to_copy", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")
)

# Operations on lists of tensors, as optimizers use them.
_LISTS = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad_")
_PIECE = 8
"""How many tensors of such lists DTensor is asked about at once: its time grows with the square of their number."""

_MIXED = (
    "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed "
    "operators! Please see https://docs.pytorch.org/docs/main/distributed.tensor.html"
    "#mixed-tensor-and-dtensor-operations for more details."
)
"""What torch says of them."""

# dispatch.py, which stands above, puts here what switches its modes on.
_modes: Callable[[], AbstractContextManager[object]]
_mode: type


def set_modes(modes: Callable[[], AbstractContextManager[object]], mode: type) -> None:
    """Say how the modes are switched on, and by which class of dispatch mode it is seen that they are."""
    global _modes, _mode
    _modes, _mode = modes, mode


def answer_for_shards() -> None:
    """Make DTensors say where their shards are, until the outermost machine is taken out of force."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor, _dispatch, _op_schema, _random

    if DTensor in SHARDED or not state._stack:
        return
    undo = state._stack[0].undo
    for name in ("device", "is_cuda", "is_cpu", "is_meta"):
        state.replace(undo, DTensor, name, property(_of_shard(name)))
    state.replace(undo, DTensor, "untyped_storage", _shell)
    state.replace(undo, DTensor, "get_device", lambda tensor: tensor.device.index if tensor.is_cuda else -1)
    # Nothing runs asynchronously here, so a result is waited for at once.
    state.replace(undo, functional, "_maybe_wrap_tensor", functional.wait_tensor)
    for module in (_random, _dispatch):
        state.replace(undo, module, "is_rng_supported_mesh", lambda mesh: False)
    state.replace(undo, _op_schema, "_rebuild_tensor_from_dtensor_meta", _shape_only)
    for name, value in list(vars(_dispatch.OpDispatcher).items()):
        if isinstance(value, staticmethod):
            state.replace(undo, _dispatch.OpDispatcher, name, staticmethod(_seen(value.__func__)))
        elif isinstance(value, FunctionType) and name != "__init__":
            state.replace(undo, _dispatch.OpDispatcher, name, _seen(value))
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._custom_op_handlers
    state.replace(undo, dispatcher, "_custom_op_handlers", _Seen(before))
    SHARDED.add(DTensor)
    undo.callback(SHARDED.clear)


def _seen(original: Callable[..., Any]) -> Callable[..., Any]:
    """Python that C++ calls where the modes are off: they are on while it runs."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, _mode) for mode in _get_current_dispatch_mode_stack()):
            return original(*args, **kwargs)
        with _modes():
            return original(*args, **kwargs)

    return call


class _Seen(dict[Any, Any]):
    """Handlers of single operations, which C++ reads from this dict; loss_parallel puts others in later."""

    def __init__(self, handlers: dict[Any, Any]) -> None:
        super().__init__()
        self.update(handlers)

    def __setitem__(self, operation: Any, handler: Any) -> None:
        super().__setitem__(operation, _seen(handler))

    def update(self, handlers: Any = (), **_: Any) -> None:  # type: ignore[override]
        for operation, handler in dict(handlers).items():
            self[operation] = handler


def _of_shard(name: str) -> Callable[[Any], Any]:
    own = getattr(torch._C.TensorBase, name)

    def answer(tensor: Any) -> Any:
        shard = tensor._local_tensor
        return getattr(shard, name) if type(shard) in VIRTUAL else own.__get__(tensor)

    return answer


def _shell(tensor: Any) -> torch.UntypedStorage:
    storage = torch._C.TensorBase.untyped_storage(tensor)
    if type(tensor._local_tensor) in VIRTUAL:
        label_storage(storage, tensor.device).__class__ = ShellStorage
    return storage


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
    """An operation on such tensors: what it does to those inside comes back to the dispatcher.

    A shard that is not virtual yet would not: one that is moved to a GPU, or made on one in the shape of another.
    """
    if held_modes.sees_no_classes():
        with held_modes.past_dispatch():
            return func(*args, **kwargs)
    if not _get_current_dispatch_mode_stack() and (mixed := _mixed(func, args, kwargs)) is not None:
        return _replicated(work, func, mixed, args, kwargs)
    whole: Any = args[0] if args else None
    if whole.__class__ is list and len(whole) > _PIECE and _in_pieces(func):
        return _piece_by_piece(work, func, args, kwargs)
    alike = func._schema.name in _ALIKE and type(whole) in SHARDED
    if not (alike and state.is_virtual_device(kwargs.get("device"))):
        kinds = _kinds(args, kwargs)
        if SHARDED & kinds.keys() or _get_current_dispatch_mode_stack():
            # DTensor's way is C++; a mode below this one (fake tensors: shapes only) comes before any class.
            return func(*args, **kwargs)
        return _by_python(func, kinds, args, kwargs)
    shard = work(func, (whole._local_tensor, *args[1:]), kwargs)
    return whole.from_local(
        shard, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A DTensor among the arguments, behind a tensor that is none, or in one list with such; else None.

    On hardware a plain tensor has no class of its own: C++ would never ask it before the DTensor, as it does here.
    """
    kinds = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) in VIRTUAL or type(leaf) in SHARDED]
    if not kinds or not (type(kinds[0]) in VIRTUAL or _in_pieces(func)):
        return None
    plain = any(type(leaf) in VIRTUAL for leaf in kinds)
    return next((leaf for leaf in kinds if type(leaf) in SHARDED), None) if plain else None


def _replicated(work: Callable[..., Any], func: Any, beside: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on a DTensor and other tensors, as torch takes it: by a handler of its own (loss_parallel); a single
    number is the same on every rank, and so is anything under `implicit_replication`; all else is refused."""
    from torch.distributed.tensor import Replicate

    dispatcher, mesh = type(beside)._op_dispatcher, beside.device_mesh
    if (handler := dispatcher._custom_op_handlers.get(func)) is not None:
        return handler(func, args, kwargs)

    def whole(value: Any) -> Any:
        if type(value) not in VIRTUAL:
            return value
        if value.numel() != 1 and not dispatcher._allow_implicit_replication:
            raise RuntimeError(f"{func} {_MIXED}")
        return beside.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    positional, named = tree_map(whole, (args, kwargs))
    return by_its_class(work, func, positional, named)


@cache
def _in_pieces(func: Any) -> bool:
    return func._schema.name.startswith(_LISTS) and len(func._schema.returns) < 2


def _piece_by_piece(work: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on long lists as several on short ones: each tensor has its own result."""
    count = len(args[0])
    made: list[Any] = []
    for start in range(0, count, _PIECE):
        piece = slice(start, start + _PIECE)

        def short(value: Any, piece: slice = piece) -> Any:
            return value[piece] if value.__class__ is list and len(value) == count else value

        found = work(func, tuple(map(short, args)), {name: short(value) for name, value in kwargs.items()})
        made += found or []
    return made if func._schema.returns else None


def _kinds(args: Any, kwargs: dict[str, Any]) -> dict[type, None]:
    """The classes with rules of their own among the operands, in the order in which torch asks them."""
    found: dict[type, None] = {}
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and type(value) not in VIRTUAL and has_own_rules(type(value)):
            found[type(value)] = None
    return dict.fromkeys(sorted(found, key=lambda kind: -len(kind.__mro__)))


def _by_python(func: Any, kinds: dict[type, None], args: Any, kwargs: dict[str, Any]) -> Any:
    with _modes():
        for kind in kinds:
            made = kind.__torch_dispatch__(func, tuple(kinds), args, kwargs)  # type: ignore[attr-defined]
            if made is not NotImplemented:
                return made
    names = ", ".join(kind.__name__ for kind in kinds)
    raise TypeError(
        f"Multiple dispatch failed for '{func}'; all __torch_dispatch__ handlers returned NotImplemented: {names}"
    )
