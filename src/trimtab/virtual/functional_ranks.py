"""Collectives as operators of their own (`torch.distributed._functional_collectives`), as DTensor and compiled programs
use them: a group by its name, a new tensor for a result. The others are in ranks.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trimtab.virtual import met_ranks, ranks, state, traces
from trimtab.virtual.known_shapes import compute, shaped
from trimtab.virtual.operands import walked
from trimtab.virtual.plans import Args, Kwargs, Plan
from trimtab.virtual.state import Machine
from trimtab.virtual.tensor import wrap
from trimtab.virtual.unknown import is_unknown

_AS_GIVEN = ("all_reduce", "broadcast")
"""What these give has the shape of what they are given: its values may stand in."""
_COPIED = ("all_gather", "broadcast")
"""Where one rank stands for all, what these give is known: nothing is added up."""


def exchange(plan: Plan, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Carry out an operation between ranks."""
    if plan.name.startswith("c10d::"):
        return ranks.collective(func, args, kwargs)
    named = dict(zip(plan.names, args, strict=False)) | kwargs
    machine = state.machine()
    if machine is not None and "group_name" in named:
        ranks.on_gpus(_name(plan), _group(named), named)
        if machine.observer is not None:
            machine.observer.collective(_record(plan, named))
    payloads, slot, _ = walked((*args, *kwargs.values()))
    if slot is None:
        return func(*args, **kwargs)
    positional, rest = payloads[: len(args)], dict(zip(kwargs, payloads[len(args) :], strict=True))
    made, known = None, True
    if machine is None or not machine.shapes or _values_come(machine, plan, named):
        made = func(*positional, **rest)
    else:
        made, known = _shapes_alone(plan, func, positional, rest), False
    if plan.writes:
        written = named[plan.writes[0]]
        if not known:
            met_ranks.forget(written if isinstance(written, list) else [written], plan.name)
        return written
    results = [wrap(one, slot) for one in (made if isinstance(made, list) else [made])]
    for result in results:
        result._block.unknown = not known
    if machine is not None and machine.observer is not None:
        traces.made(plan, results, args)
    return results if isinstance(made, list) else results[0]


def _values_come(machine: Machine, plan: Plan, named: dict[str, Any]) -> bool:
    """Whether every rank has the values that this needs, and what comes of them is known here."""
    given = ranks.tensors(next(iter(named.values())))
    if machine.stands_for_all:
        copied = _name(plan).startswith(_COPIED) or _group(named).size() == 1
        return copied and not any(is_unknown(tensor) for tensor in given)
    return met_ranks.all_have_values(_name(plan), given, ranks.tensors(named.get("out")), _group(named))


def _shapes_alone(plan: Plan, func: Any, positional: list[Any], rest: dict[str, Any]) -> Any:
    """The results' shapes; what a rank has stands in for a sum, where it has anything."""
    if plan.writes:
        return None
    given = positional[0]
    if _name(plan).startswith(_AS_GIVEN) and not any(one.is_meta for one in ranks.tensors(given)):
        return [one.clone() for one in given] if isinstance(given, list) else given.clone()
    made = compute(plan, func, shaped(positional), {k: shaped(v) for k, v in rest.items()})
    return list(made) if isinstance(made, tuple) else made


def _name(plan: Plan) -> str:
    return plan.name.removeprefix("_c10d_functional::")


def _group(named: dict[str, Any]) -> Any:
    group: Any = named["group_name"]
    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def _record(plan: Plan, named: dict[str, Any]) -> dict[str, Any]:
    """What the ranks have to agree on."""
    name = _name(plan).removesuffix("_").removesuffix("_out")
    unequal = name in ("all_to_all_single", "batch_p2p_ops", "isend", "irecv")
    return ranks.record(name, _group(named), ranks.tensors(next(iter(named.values()))), unequal) | {
        "root": named.get("src") if name == "broadcast" else None,
        "parts": _parts(named) if name == "all_to_all_single" else None,
    }


def _parts(named: dict[str, Any]) -> dict[str, list[int]]:
    """What a rank gives each of the others, and what it expects of each, in elements."""
    given, size = named["input"], _group(named).size()
    wide = given.numel() // given.shape[0] if given.dim() and given.shape[0] else 0
    gives = ranks.split(given, named["input_split_sizes"], size)
    rows = named["output_split_sizes"]
    return {"gives": gives, "takes": [int(n) * wide for n in rows] if rows else gives}
