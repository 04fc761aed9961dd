"""Carries out every operation: rules over the operands, the op on the payloads, the result on its device.

This is the hot path. The schema of an op is read once (plans.py); arguments are walked by hand, since they nest one
level at most. It never decides what is legal: see rules.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.virtual import (
    amp,
    functions,
    generators,
    kernels,
    memory,
    processes,
    ranks,
    rules,
    sharded,
    state,
    traces,
)
from trimtab.virtual.memory import Block
from trimtab.virtual.plans import FRESH, INPLACE, PLANS, VIEW, Plan, plan_of
from trimtab.virtual.state import VirtualDevice, is_virtual_device
from trimtab.virtual.tensor import VIRTUAL, VirtualTensor, set_worker, sync, wrap

aten = torch.ops.aten

_PLAIN = frozenset(
    (int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)

# Operations with a result that CUDA leaves on the CPU, and its place among the results.
_HOST_RESULTS = {"aten::_pack_padded_sequence": 1}


def work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out one operation."""
    plan = PLANS.get(func) or plan_of(func)
    if plan.collective:
        return ranks.collective(func, args, kwargs)
    slot: VirtualDevice | None = None
    mixed = False
    payloads: list[Any] = []
    for value in args:
        cls = value.__class__
        if cls in VIRTUAL:
            payloads.append(value.payload)
            if slot is None:
                slot = value._slot
            elif slot is not value._slot:
                mixed = True
        elif cls in _PLAIN:
            payloads.append(value)
        elif cls is list or cls is tuple:
            inner = []
            for item in value:
                if item.__class__ in VIRTUAL:
                    inner.append(item.payload)
                    if slot is None:
                        slot = item._slot
                    elif slot is not item._slot:
                        mixed = True
                else:
                    if isinstance(item, Tensor):
                        if sharded.has_own_rules(item.__class__):
                            return sharded.by_its_class(work, func, args, kwargs)
                        mixed = True
                    inner.append(item)
            payloads.append(inner)
        else:
            if isinstance(value, Tensor):
                if sharded.has_own_rules(cls):
                    return sharded.by_its_class(work, func, args, kwargs)
                mixed = True
            payloads.append(value)
    named = kwargs
    if kwargs:
        named = {}
        for name, value in kwargs.items():
            cls = value.__class__
            if cls in VIRTUAL:
                if slot is None:
                    slot = value._slot
                elif slot is not value._slot:
                    mixed = True
                value = value.payload
            elif cls not in _PLAIN:
                if cls is list or cls is tuple:
                    for item in value:
                        if item.__class__ in VIRTUAL:
                            if slot is None:
                                slot = item._slot
                            elif slot is not item._slot:
                                mixed = True
                        elif isinstance(item, Tensor):
                            mixed = True
                    value = [item.payload if item.__class__ in VIRTUAL else item for item in value]
                elif isinstance(value, Tensor):
                    mixed = True
            named[name] = value

    if plan.parts and (slot is not None or plan.factory):
        if plan.author is not None:
            return _by_its_author(plan, args, kwargs)
        return _take_apart(func, args, kwargs)

    machine = state._stack[-1] if state._stack else None
    observer = machine.observer if machine is not None else None
    if observer is not None and observer.wants_ops:
        observer.op(plan.name)
    if slot is not None and plan.kind != VIEW and machine is not None and not machine.ready:
        processes.touch(machine)

    if plan.factory and (slot is not None or kwargs.get("device") is not None):
        slot = _factory_slot(plan, slot, args, named, machine)
    elif slot is not None and mixed:
        slot = plan.rule(plan, args, kwargs, slot)
    if plan.seeded and named.get("generator") is not None:
        rules.generator(plan, named, slot)
        named["generator"] = generators.source_of(named["generator"])
    if slot is None:
        if plan.factory and named.get("pin_memory"):
            named["pin_memory"] = False  # there is no driver to lock the pages with
        try:
            out = _plain(plan, func, payloads, named)
        except RuntimeError as error:
            out = func(*kernels.with_tensors(func, payloads, error), **named)
        if observer is not None:
            traces.made_plain(plan, out, args)
        return out
    if plan.before is not None:
        payloads = plan.before(plan, payloads, args)
    try:
        out = func(*payloads, **named)
    except (RuntimeError, IndexError) as error:
        out = kernels.rescue(plan, func, args, payloads, named, error)

    kind = plan.kind
    if kind == FRESH:
        result = wrap(out, slot)
    elif kind == INPLACE:
        return args[0]
    elif kind == VIEW:
        base = args[0]
        if base.__class__ in VIRTUAL:
            if out is base.payload:
                return base
            result = wrap(out, slot, base._block)
        else:
            result = wrap(out, slot)
    else:
        result = _general(plan, args, kwargs, out, slot)
    if observer is not None:
        traces.made(plan, result, args)
    return result


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _for_inference(args: tuple[Any, ...]) -> bool:
    return torch.is_inference_mode_enabled() or any(isinstance(a, Tensor) and a.is_inference() for a in args)


def _switched_on(keys: Any) -> Any:
    """A guard under which an operation passes again through those of the keys that were on above Python."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        keys = keys - torch._C._dispatch_tls_local_exclude_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _take_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a composite operation by its parts, which have the rules and know a view from a copy.

    Autograd does so before an operation gets here, but it never sees inference tensors. The parts go through what torch
    switches off below Python: the keeping of views and versions, and autocast.
    """
    if not _for_inference(args):
        with VirtualMode():
            return func.decompose(*args, **kwargs)
    with _switched_on(_VIEWS if amp.is_aside() else _VIEWS | amp.KEY), VirtualMode():
        return func.decompose(*args, **kwargs)


def _by_its_author(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation written in Python (torch.library.custom_op): what its kernel for CUDA does passes here again."""
    kernels = plan.author._backend_fns
    kernel = kernels.get("cuda") or kernels.get(None)
    if kernel is None:
        raise NotImplementedError(f"Could not run '{plan.name}' with arguments from the 'CUDA' backend.")
    with torch._C._EnableTorchFunction(), VirtualMode():
        if functions.is_on():
            return kernel(*args, **kwargs)
        with functions.MODE:
            return kernel(*args, **kwargs)


def _plain(plan: Plan, func: Any, payloads: list[Any], named: dict[str, Any]) -> Any:
    """An operation on plain tensors; a composite one under inference mode keeps its views as above."""
    if plan.composite and _for_inference(tuple(payloads)):
        cast = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU")
        with _switched_on(_VIEWS if cast else _VIEWS | _CPU_AUTOCAST):
            return func(*payloads, **named)
    return func(*payloads, **named)


def _factory_slot(
    plan: Plan, slot: VirtualDevice | None, args: tuple[Any, ...], named: dict[str, Any], machine: Any
) -> VirtualDevice | None:
    """The device of an operation that takes `device=`: the one that is asked for, else that of its input."""
    device = named.get("device")
    if device is None:
        return slot
    if not is_virtual_device(device):
        return None
    named["device"] = torch.device("cpu")
    if named.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    if slot is not None and device.index == slot.index:
        return slot
    if machine is None:
        raise rules.no_machine()
    target: VirtualDevice = machine.device(device)
    if args and args[0].__class__ is list:
        _check_room(target, args[0], named.get("dtype"))
    return target


def _check_room(slot: VirtualDevice, size: list[Any], dtype: torch.dtype | None) -> None:
    count = 1
    for extent in size:
        if extent.__class__ is not int:
            return
        count *= extent
    if count > 1 << 20:
        memory.ensure(slot, count * (dtype or torch.get_default_dtype()).itemsize)


def _general(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, slot: VirtualDevice) -> Any:
    """Wrap any other result: several tensors, lists, out= variants, operations that change a shape in place."""
    written: dict[int, Tensor] = {}
    inputs: list[Any] = []
    slots: list[VirtualDevice | None] = []
    for value in (*args, *kwargs.values()):
        if value.__class__ in VIRTUAL:
            inputs.append(value)
        elif value.__class__ in (list, tuple):
            inputs.extend(item for item in value if item.__class__ in VIRTUAL)
            if not slots and plan.foreach:
                slots = [getattr(item, "_slot", None) for item in value]
    for tensor in inputs:
        written[id(tensor.payload)] = tensor
    if plan.writes:
        for name, value in _written(plan, args, kwargs):
            _after_write(name, value)

    def one(value: Any, index: int = -1) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = written.get(id(value))
        if known is not None:
            return known
        where: VirtualDevice | None = slot
        if 0 <= index < len(slots):
            where = slots[index]
        if where is None:
            return value
        block = None
        if not plan.writes and value.layout is torch.strided:
            block = _block_of(value, inputs)
        return wrap(value, where, block)

    if not isinstance(out, (list, tuple)):
        return one(out)
    host = _HOST_RESULTS.get(plan.name)
    made: list[Any] = []
    for index, value in enumerate(out):
        if isinstance(value, list):
            made.append([one(item, i) for i, item in enumerate(value)])
        else:
            made.append(value if index == host else one(value, index))
    return tuple(made) if isinstance(out, tuple) else made


def _block_of(value: Tensor, inputs: list[Any]) -> Block | None:
    """The block that a result shares with an input (results of split, unbind and the like)."""
    pointer = value.untyped_storage().data_ptr()
    for tensor in inputs:
        payload = tensor.payload
        if payload.layout is torch.strided and payload.untyped_storage().data_ptr() == pointer:
            return tensor._block  # type: ignore[no-any-return]
    return None


def _written(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    named = dict(zip(plan.names, args, strict=False)) | kwargs
    return [(name, named[name]) for name in plan.writes if name in named]


def _after_write(name: str, value: Any) -> None:
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if tensor.__class__ in VIRTUAL:
            before = tensor._block.nbytes
            if tensor.payload.layout is torch.strided:
                size = tensor.payload.untyped_storage().nbytes()
                if (size + 511) & -512 != before:
                    memory.resize(tensor._block, size)
            sync(tensor)


class VirtualMode(TorchDispatchMode):
    """Sees every operation of its thread: factories and plain tensors too, which no tensor class could catch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Compilation is off while a machine is in force (context.py); torch's own guard costs 3 µs an operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _unseen(func, args, kwargs or {})


def _unseen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`work`, past the function mode: in a backward pass it is on, and would see every question to a payload."""
    with torch._C.DisableTorchFunction():
        return work(func, args, kwargs)


set_worker(_unseen)

__all__ = ["PLANS", "Plan", "VirtualMode", "VirtualTensor", "is_virtual_device", "plan_of", "work"]
