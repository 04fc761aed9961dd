"""Carries out every operation: rules over the operands, the op on the payloads, the result on its device.

This is the hot path; the way through it is drawn at the head of `work`. The schema of an op is read once (plans.py). It
never decides what is legal: see rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library import simple_registry
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.virtual import (
    amp,
    ctypes_libraries,
    functional_ranks,
    functions,
    fused,
    generators,
    held_modes,
    kernels,
    memory,
    owed_draws,
    processes,
    reused,
    rules,
    shapes,
    sharded,
    state,
    temporaries,
    traces,
)
from trimtab.virtual.course import Course
from trimtab.virtual.face import ABOVE
from trimtab.virtual.memory import Block
from trimtab.virtual.operands import FOREIGN, SHAPE, STRAY, mark_shapes, unwritten, walked
from trimtab.virtual.plans import FRESH, INPLACE, NUMBERS, VIEW, Args, Kwargs, Plan
from trimtab.virtual.results import several
from trimtab.virtual.state import Machine, VirtualDevice
from trimtab.virtual.tensor import VIRTUAL, wrap

_CPU, _META = torch.device("cpu"), torch.device("meta")

PLANS: dict[int, Plan] = {}
"""By the id of the operation, which its plan keeps alive: to ask an operation for its hash takes a call of Python."""


def plan_of(func: Any) -> Plan:
    """The plan of an operation, made on first use."""
    if isinstance(func, HigherOrderOperator):
        raise state.NotSimulated(
            f"torch's operation {func.name()} on functions is not simulated by virtual GPUs."
        )
    plan = PLANS[id(func)] = Plan(func)
    plan.rule = rules.rule_for(func, plan.name)
    plan.before = kernels.BEFORE.get(plan.name)
    plan.compute = fused.INSTEAD.get(plan.name, plan.binding)
    plan.temporary = temporaries.rule_for(plan.name)
    plan.reuses = reused.RULES.get(plan.name)
    return plan


def work(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Carry out one operation.

    1. Know it: its plan. A collective between ranks goes its own way (functional_ranks.py, ranks.py).
    2. Walk the arguments once: payloads, the first virtual device among them (`slot`), how they mix.
    3. What is not one kernel goes on by its parts, which come back here: a tensor class with rules of its own
       (sharded.py), a composite operation, one that a program wrote in Python.
    4. Tell the observer; a process that was forked touches the GPU for the first time.
    5. Decide the device: `device=` of a factory, the rule of a mix (rules.py), the kind of a generator. No virtual
       device: it is an operation on the CPU.
    6. Compute on the payloads; where CUDA's kernel differs from the CPU's, kernels.py steps in. With shapes only,
       shapes.py computes.
    7. Put the result on its device, as a fresh tensor, a view of the first operand, or that operand itself; what
       CUDA's kernel would allocate for itself (temporaries.py) is held until then.
    """
    plan = PLANS.get(id(func)) or plan_of(func)
    if plan.collective:
        return functional_ranks.exchange(plan, func, args, kwargs)

    payloads, slot, mix = walked((*args, *kwargs.values()) if kwargs else args)
    named = kwargs
    if kwargs:
        count = len(args)
        named = dict(zip(kwargs, payloads[count:], strict=True))
        del payloads[count:]

    if mix >= STRAY:
        if mix is FOREIGN:
            return sharded.by_its_class(work, func, args, kwargs)
        if slot is not None:
            raise unwritten(args, kwargs)
    if plan.parts and (slot is not None or plan.factory):
        return (_take_apart if plan.author is None else _by_its_author)(plan, func, args, kwargs)

    machine = state._stack[-1] if state._stack else None
    observer = machine.observer if machine is not None else None
    if observer is not None and observer.wants_ops:
        observer.op(plan.name)
    if slot is not None and plan.kind != VIEW and machine is not None and not machine.ready:
        processes.touch(machine)

    if plan.factory and (slot is not None or kwargs.get("device") is not None):
        slot = _factory_slot(slot, args, named, machine)
    elif mix and slot is not None:
        slot = plan.rule(plan, args, kwargs, slot)
        if mix is SHAPE and slot is not None:
            rules.no_data(plan)
    if plan.seeded and named.get("generator") is not None:
        rules.generator(plan, named, slot)
        named["generator"] = generators.source_of(named["generator"])
    if machine is not None and machine.shapes and slot is None:
        slot = shapes.host_slot(machine, plan, args, kwargs)
        named.pop("pin_memory", None)  # there is no driver to lock the pages with
    if slot is None:
        if plan.draws and machine is not None and machine.shapes:
            owed_draws.settle(plan, payloads, named)
        out = _on_cpu(plan, func, payloads, named)
        if mix is SHAPE or (plan.factory and named.get("device") == _META):
            mark_shapes(out)
        if observer is not None:
            traces.made(plan, out, args)
        return out

    if plan.before is not None:
        payloads = plan.before(plan, payloads, args)
    try:
        if machine is not None and machine.shapes:
            out = shapes.carry(machine, slot, plan, func, args, kwargs, payloads, named)
        else:
            number = payloads and payloads[0].__class__ in NUMBERS
            out = (plan.kernel if number else plan.compute)(*payloads, **named)
    except (RuntimeError, IndexError, MemoryError, TypeError) as error:
        out = kernels.rescue(plan, func, args, payloads, named, error)

    held: Any = None
    if plan.temporary is not None and slot.index != state.HOST:
        if plan.name in temporaries.AFTER:
            held = temporaries.LATER
        elif taken := plan.temporary(plan, args, kwargs, slot):
            held = Block(slot, taken) if taken.__class__ is int else Course(taken, slot)
    kind = plan.kind
    if kind == FRESH:
        result = wrap(out, slot, None if plan.reuses is None else plan.reuses(args))
    elif kind == INPLACE:
        if held.__class__ is Course:
            held.end()
        return args[0]
    elif kind == VIEW and args[0].__class__ in VIRTUAL:
        if out is args[0].payload:
            return args[0]
        result = wrap(out, slot, args[0]._block)
    elif kind == VIEW:
        result = wrap(out, slot)
    else:
        result = several(plan, args, kwargs, out, slot, held if held.__class__ is Course else None)
    if held is temporaries.LATER:
        temporaries.taken_after(plan, args, kwargs, slot)
    elif held.__class__ is Course:
        held.end()
    del held
    if observer is not None:
        traces.made(plan, result, args)
    return result


_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_CPU_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _for_inference(args: Args) -> bool:
    return torch.is_inference_mode_enabled() or any(isinstance(a, Tensor) and a.is_inference() for a in args)


def _switched_on(keys: Any) -> Any:
    """A guard under which an operation passes again through those of the keys that were on above Python."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        keys = keys - torch._C._dispatch_tls_local_exclude_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _take_apart(plan: Plan, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Carry out a composite operation by its parts, which have the rules and know a view from a copy.

    Autograd does so before an operation gets here, but it never sees inference tensors. The parts go through what torch
    switches off below Python: the keeping of views and versions, and autocast.
    """
    if not _for_inference(args):
        with VirtualMode():
            return func.decompose(*args, **kwargs)
    with _switched_on(_VIEWS | amp.keys_on()), VirtualMode():
        return func.decompose(*args, **kwargs)


def _by_its_author(plan: Plan, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An operation written in Python (authors.py): what its kernel for CUDA does passes here again."""
    kernel = plan.author()
    if kernel is None:
        raise NotImplementedError(f"Could not run '{plan.name}' with arguments from the 'CUDA' backend.")

    def run() -> Any:
        with torch._C._EnableTorchFunction(), VirtualMode(), functions.switched_on():
            return kernel(*args, **kwargs)

    if plan.name.startswith(ctypes_libraries.OPERATIONS):
        return ctypes_libraries.carry(run, plan, func, args, kwargs)
    return run()


def _on_cpu(plan: Plan, func: Any, payloads: list[Any], named: Kwargs) -> Any:
    """An operation on plain tensors; a composite one under inference mode keeps its views as above."""
    if plan.factory and named.get("pin_memory"):
        named["pin_memory"] = False
    try:
        if plan.composite and _for_inference(tuple(payloads)):
            cast = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU")
            with _switched_on(_VIEWS if cast else _VIEWS | _CPU_AUTOCAST):
                return plan.kernel(*payloads, **named)
        return plan.kernel(*payloads, **named)
    except RuntimeError as error:
        if plan.writes and shapes.keeps(payloads):
            return payloads[0]
        return plan.kernel(*kernels.with_tensors(func, payloads, error), **named)


def _factory_slot(
    slot: VirtualDevice | None, args: Args, named: Kwargs, machine: Machine | None
) -> VirtualDevice | None:
    """The device of an operation that takes `device=`: the one that is asked for, else that of its input."""
    device = named.get("device")
    if device is None:
        return slot
    if not state.is_virtual_device(device):
        return None
    named["device"] = _CPU
    if named.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    if slot is not None and device.index == slot.index:
        return slot
    if machine is None:
        raise RuntimeError(
            "No virtual GPU is in force here: the virtual_gpus() context of this device has ended."
        )
    target = processes.used(machine, device.index)
    if args and args[0].__class__ is list:
        _check_room(target, args[0], named.get("dtype"))
    return target


def _check_room(slot: VirtualDevice, size: list[Any], dtype: torch.dtype | None) -> None:
    if all(extent.__class__ is int for extent in size) and (count := math.prod(size)) > 1 << 20:
        memory.ensure(slot, count * (dtype or torch.get_default_dtype()).itemsize)


class VirtualMode(TorchDispatchMode):
    """Sees every operation of its thread: factories and plain tensors too, which no tensor class could catch."""

    supports_higher_order_operators = True  # none is carried out: `plan_of` says so

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Compilation is off while a machine is in force (context.py); torch's own guard costs 3 µs an operation.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Past the function mode: in a backward pass it is on, and would see every question to a payload.
        with torch._C.DisableTorchFunction():
            return work(func, args, kwargs or {})


def _unseen(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with torch._C.DisableTorchFunction():
        return work(func, args, kwargs)


@contextmanager
def _modes() -> Iterator[None]:
    """Both modes, for Python that runs inside an operation."""
    with torch._C._EnableTorchFunction(), VirtualMode(), functions.INSIDE:
        yield


ABOVE.work = _unseen
sharded.set_modes(_modes, VirtualMode)
held_modes.set_mode(VirtualMode)


def _ask_for_no_rules() -> None:
    """C++ asks Python before each operation for a rule of torch.library for the mode: for these there is none.

    It remembers whom it asked the first time, so one operation under the mode is enough.
    """
    asked = simple_registry.find_torch_dispatch_rule
    ours = VIRTUAL | {VirtualMode}

    def rule(op: Any, torch_dispatch_class: type) -> Any:
        return None if torch_dispatch_class in ours else asked(op, torch_dispatch_class)

    simple_registry.find_torch_dispatch_rule = rule
    try:
        with VirtualMode():
            torch.empty(0, device="cpu")
    finally:
        simple_registry.find_torch_dispatch_rule = asked


_ask_for_no_rules()
