"""A plan in words: numbered lines with reasons, a table of the model's parts, and both as data. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from trimtab.config import config_warnings
from trimtab.placement.plan import Speed
from trimtab.placement.stacks import in_ranges
from trimtab.recipes.effective_batch import effective_batch

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.placement.plan import MemoryShare, PlacementPlan
    from trimtab.placement.profile import Part
    from trimtab.recipes.planning import Planned
    from trimtab.recipes.room_on_disk import Room

GIB = 2**30
_SPEED = {
    "adapters": ("fused adapters", "no fused adapters"),
    "head": ("chunked head", "plain head"),
    "compile": ("compiled layers", "layers not compiled"),
    "padding": ("rows end to end without padding", "padded rows"),
    "kernels": ("Triton kernels", "no Triton kernels"),
}
"""How the faster and the plain way of each part are called."""
_ON_EACH = {"data_parallel": "a copy on", "sharded": "a shard on"}
"""What the devices of a run hold of each part, where all hold alike."""


def plan_lines(request: Request, planned: Planned, room: Room | None = None) -> list[str]:
    """Numbered lines: what was decided, and the reason behind it."""
    config = request.config
    hardware, plan, profile = planned.hardware, planned.plan, planned.profile
    why = plan.reasons
    gpus = ", ".join(f"{g.name} {g.model}" for g in hardware.accelerators) or "no GPU"
    machine = f"{hardware.cpu.model}, {hardware.cpu.cores} cores; {gpus}; torch {hardware.torch_version}"
    size = f"{len(profile.layers)} layers, {profile.parameters:,} parameters"
    count = f"{plan.processes} process{'es' * (plan.processes > 1)}"
    batch = effective_batch(config, plan)
    rows = [
        ("✓", "config", request.origin),
        ("✓", "hardware", machine),
        ("✓" if plan.launcher != "none" else "-", "launcher", f"{plan.launcher}"),
        ("✓", "device", f"{plan.device}: {why['device']}"),
        ("✓", "precision", f"{plan.precision}: {why['precision']}"),
        ("✓" if plan.scaler else "-", "scaler", f"{'on' if plan.scaler else 'off'}: {why['scaler']}"),
        ("✓", "model", f"{config.model.name}: {planned.architecture}, {size}"),
        ("✓", "weights", why["weights"]),
        _adapter_row(config, planned),
        ("✓", "strategy", f"{plan.strategy}, {count}: {why['strategy']}"),
        ("✓", "batch", f"{batch}: rows a device × processes × accumulated passes, in one step"),
    ]
    rows += speed_rows(plan)
    if "optimizer" in why:
        rows.append(("✓", "optimizer", why["optimizer"]))
    if "ddp" in why:
        rows.append(("✓" if plan.unused_parameters else "-", "ddp", why["ddp"]))
    if "device_map" in why:
        rows.append(("✓", "device map", why["device_map"]))
    rows += [("-", "default", f"{d.key} {d.value}: {d.reason}") for d in request.defaults]
    rows += memory_rows(plan)
    if room is not None:
        rows.append(room.line())
    rows += [("!", "note", note) for note in plan.notes]
    return [f"{number:2} {mark} {name:<10} {text}" for number, (mark, name, text) in enumerate(rows, 1)]


def memory_rows(plan: PlacementPlan) -> list[tuple[str, str, str]]:
    """What each device needs and has, by which way it is known; devices that hold the same share a line."""
    rows = []
    for share, group in groupby(plan.memory.items(), key=lambda item: item[1]):
        on = _each_of([device for device, _ in group])
        rows.append(("✓" if share.fits else "✗", "memory", _memory(share, on)))
    if plan.memory and "memory" in plan.reasons:
        rows.append(("-", "memory", plan.reasons["memory"]))
    return rows


def _each_of(devices: Sequence[str]) -> str:
    return devices[0] if len(devices) == 1 else f"each of {devices[0]} to {devices[-1].rpartition(':')[2]}"


def _memory(share: MemoryShare, on: str) -> str:
    if not share.executed:
        return f"about {share.needed / GIB:.1f} GiB of {share.capacity / GIB:.1f} GiB free on {on} (estimate)"
    parts = {
        "weights": share.weights,
        "gradients": share.gradients,
        "optimizer": share.optimizer,
        "activations": share.activations,
        "temporary and other": share.other,
    }
    made_of = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
    beside = f", {share.reserved / GIB:.1f} for vLLM" if share.reserved else ""
    return (
        f"{share.needed / GIB:.1f} GiB of {share.capacity / GIB:.1f} GiB free on {on}: {share.allocated / GIB:.2f} "
        f"allocated at the peak ({made_of}), {(share.allocated + share.pool) / GIB:.2f} reserved, "
        f"{share.overhead / GIB:.2f} of CUDA's own{beside}"
    )


def speed_rows(plan: PlacementPlan) -> list[tuple[str, str, str]]:
    """A line of the faster ways that are used, and one of those that are not, with their reasons."""
    plain = Speed()
    used = {part for part in _SPEED if getattr(plan.speed, part) != getattr(plain, part)}
    budget = plan.speed.activation_memory_budget
    kept = [f"activation memory budget {budget:g}"] if budget is not None else []
    on = [fast for part, (fast, _) in _SPEED.items() if part in used] + kept
    off: dict[str, list[str]] = {}
    for part, (_, slow) in _SPEED.items():
        if part not in used and (reason := plan.reasons.get(f"speed.{part}")):
            off.setdefault(reason, []).append(slow)
    rows = [("✓", "speed", ", ".join(on))] if on else []
    if off:
        without = "; ".join(f"{', '.join(parts)} ({reason})" for reason, parts in off.items())
        rows.append(("-", "speed", without))
    return rows


def _adapter_row(config: Config, planned: Planned) -> tuple[str, str, str]:
    profile = planned.profile
    share = 100 * profile.trainable / profile.parameters
    counted = f"{profile.trainable:,} of {profile.parameters:,} parameters are trained ({share:.2f} %)"
    if config.method == "full":
        return "-", "adapter", f"none (method: full); {counted}"
    return "✓", "adapter", f"LoRA r {config.lora.r} on {_targets(planned.targets)}; {counted}"


def _targets(names: tuple[str, ...]) -> str:
    """Names of adapted layers; what differs in a layer's number alone is told once: `layers.[0-3].self_attn.q_proj`."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
        shape = name if at is None else ".".join([*parts[:at], "{}", *parts[at + 1 :]])
        numbers.setdefault(shape, []).extend([] if at is None else [int(parts[at])])
    return ", ".join(shape.replace("{}", f"[{in_ranges(found)}]") for shape, found in numbers.items())


def _grouped(planned: Planned) -> list[tuple[str, int, int, str]]:
    """Parts of the model with their counts and devices; neighbouring layers of one device are one row."""
    plan = planned.plan
    rows = []

    def key(part: Part) -> tuple[str, str]:
        stack = part.name.rsplit(".", 1)[0] if part.is_layer else part.name
        return stack, plan.device_of(part.name)

    for (name, device), group in groupby(planned.profile.parts, key=key):
        parts = list(group)
        if parts[0].is_layer:
            name += f".{parts[0].name.rsplit('.', 1)[1]}-{parts[-1].name.rsplit('.', 1)[1]}"
        counts = sum(p.parameters for p in parts), sum(p.trainable for p in parts)
        rows.append((name or "(whole model)", *counts, device))
    return rows


def parts_table(planned: Planned) -> list[str]:
    """The parts and their devices, for people."""
    rows, plan = _grouped(planned), planned.plan
    if plan.strategy in _ON_EACH and len(plan.memory) > 1:
        everywhere = f"{_ON_EACH[plan.strategy]} {_each_of(list(plan.memory))}"
        rows = [(*row[:3], everywhere) for row in rows]
    width = max(len(r[0]) for r in rows)
    head = f"{'part':<{width}}  {'parameters':>15}  {'trained':>13}  device"
    return [head] + [
        f"{n:<{width}}  {total:>15,}  {trained:>13,}  {device}" for n, total, trained, device in rows
    ]


def plan_as_dict(request: Request, planned: Planned, room: Room) -> dict[str, object]:
    """The plan and the counts behind it, for machines: all that the lines and the table say."""
    profile, batch = planned.profile, effective_batch(request.config, planned.plan)
    columns = ("name", "parameters", "trainable", "device")
    return {
        **planned.plan.as_dict(),
        "config": request.origin,
        "gpus": [asdict(gpu) for gpu in planned.hardware.accelerators],
        "batch": {**batch._asdict(), "rows": batch.rows},
        "defaults": [{"key": d.key, "value": d.value, "reason": d.reason} for d in request.defaults],
        "warnings": list(config_warnings(request.config)),
        "model": {
            "name": request.config.model.name,
            "architecture": planned.architecture,
            "layers": len(profile.layers),
            "parameters": profile.parameters,
            "trainable": profile.trainable,
            "adapter_targets": list(planned.targets),
            "parts": [dict(zip(columns, row, strict=True)) for row in _grouped(planned)],
        },
        "disk": room.as_dict(),
    }
