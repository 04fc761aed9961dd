"""Proves that model and optimizer are where and what the plan says; gradients: `arrival.py`. It repairs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError, some_of
from trimtab.placement.gradients import frozen_at_zero
from trimtab.placement.plan import PlacementPlan
from trimtab.placement.profile import bare_model, numbers_in

if TYPE_CHECKING:
    from torch import nn


class PlacementFault(TrimtabError):
    """Something is not where the plan says, or will not train."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `ok` is None for what could not be looked at yet."""

    name: str
    ok: bool | None
    detail: str


def verify(model: nn.Module, plan: PlacementPlan, optimizer: Any | None = None) -> list[Check]:
    """Check placement before the first step; raises PlacementFault when a check fails.

    A model that is to be sharded is checked before FSDP takes it over, where it was loaded: on the CPU.
    """
    # The device map knows the model's own names, not those of a wrapper around it.
    named = bare_model(model) if plan.device_map else model
    checks = [
        _placed("parameters", named.named_parameters(), plan),
        _placed("buffers", named.named_buffers(), plan),
        _trainable(model),
        _trainable_format(model, plan),
    ]
    if frozen := frozen_at_zero(model):
        checks.append(frozen_check(frozen))
    if optimizer is not None:
        checks.append(_in_optimizer(model, optimizer))
    return passed(checks)


def verify_trained(model: nn.Module, optimizer: Any) -> list[Check]:
    """Check that something is trained, and that the optimizer holds all of it: also of a model that is sharded."""
    return passed([_trainable(model), _in_optimizer(model, optimizer)])


def frozen_check(frozen: list[str]) -> Check:
    detail = (
        f"{len(frozen)} adapted modules were frozen after their adapters were added (requires_grad is False), and the "
        f"adapters are still zero: {some_of(frozen)}; freeze first, then add adapters, then wrap"
    )
    return Check("adapters frozen", False, detail)


def finite_check(broken: list[str]) -> Check:
    found = f"NaN or infinity in {len(broken)}: {some_of(broken)}"
    return _check("gradients finite", broken, "no NaN or infinity", found)


def _check(name: str, faulty: list[str], good: str, fault: str) -> Check:
    return Check(name, not faulty, fault if faulty else good)


def is_finite(gradient: Any) -> bool:
    # Of a sharded gradient each process looks at its own part.
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    # By its largest value, which keeps NaN and overflows in no format: `isfinite` of a whole gradient takes nearly
    # twice its memory, when most is allocated.
    return not local.numel() or bool(local.norm(float("inf")).isfinite())


def same_device(device: Any, planned: Any) -> bool:
    """`cpu` and `cpu:0` are one device, as are `mps` and `mps:0`; `cuda:0` and `cuda:1` are not."""
    import torch

    one, other = torch.device(device), torch.device(planned)
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def passed(checks: list[Check]) -> list[Check]:
    """The checks, if none of them failed; otherwise a PlacementFault that names all that did."""
    failed = [c for c in checks if c.ok is False]
    if failed:
        raise PlacementFault(
            "the run is not as planned\n" + "\n".join(f"  {c.name}: {c.detail}" for c in failed)
        )
    return checks


def _placed(what: str, tensors: Iterable[tuple[str, Any]], plan: PlacementPlan) -> Check:
    count, astray, seen = 0, [], set()
    for name, tensor in tensors:
        count += 1
        planned = plan.device_of(name) if plan.device_map else plan.load_device
        seen.add(planned)
        if not same_device(tensor.device, planned):
            astray.append(f"{name} on {tensor.device}, planned on {planned}")
    there = f"{count} on {', '.join(sorted(seen))}"
    return _check(what, astray, there, f"{len(astray)} astray: {some_of(astray)}")


def _trainable(model: nn.Module) -> Check:
    total = sum(numbers_in(name, p) for name, p in model.named_parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    detail = f"{trained:,} of {total:,} parameters ({100 * trained / total:.2f} %)" if trained else ""
    none = "no parameter requires a gradient: nothing would be trained"
    return Check(name="trainable", ok=bool(trained), detail=detail or none)


def _trainable_format(model: nn.Module, plan: PlacementPlan) -> Check:
    import torch

    formats = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    found = {n: formats.get(p.dtype, str(p.dtype)) for n, p in model.named_parameters() if p.requires_grad}
    low = [n for n, name in found.items() if name in ("bf16", "fp16") and name != plan.trainable_precision]
    return _check(
        "trainable format",
        low,
        ", ".join(sorted(set(found.values()))),
        f"{len(low)} trainable tensors in {found[low[0]] if low else ''}, planned in {plan.trainable_precision}: "
        f"{some_of(low)}; small updates are lost in 16 bits, and a gradient scaler refuses fp16",
    )


def _in_optimizer(model: nn.Module, optimizer: Any) -> Check:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    missing = [n for n, p in trained if id(p) not in held]
    return _check(
        "optimizer",
        missing,
        f"holds all {len(trained)} trainable tensors",
        f"lacks {len(missing)} trainable tensors: {some_of(missing)}; it was made before them, or they were "
        "replaced since",
    )
