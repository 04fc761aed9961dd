"""`trimtab plan`: what would happen, where, and why. Loads no weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.recipes.planning import Planned

GIB = 2**30


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file, then overrides such as device=cpu."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print the placement plan with its reasons; no weights are loaded."""
    from trimtab.cli.arguments import config_from
    from trimtab.config import config_warnings
    from trimtab.placement import PlacementError
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.table import recipe_of

    request = config_from(arguments or [])
    config, origin = request.config, request.origin
    try:
        planned = plan_run(config)
    except PlacementError as error:
        if not as_json:
            typer.echo(f" 1 ✓ config      {origin}\n 2 ✗ placement   {error}\n 3 - the rest    skipped")
            raise typer.Exit(2) from None
        typer.echo(json.dumps({"error": str(error)}, indent=2))
        raise typer.Exit(2) from None
    preflight = recipe_of(config).preflight
    report = preflight(config, planned.plan) if preflight is not None else None
    failed = report is not None and bool(report.failed)
    if as_json:
        checks = {"checks": [asdict(check) for check in report.checks]} if report is not None else {}
        typer.echo(json.dumps(plan_as_dict(planned) | checks, indent=2))
        raise typer.Exit(2 if failed else 0)
    for line in plan_lines(request, planned):
        typer.echo(line)
    for warning in config_warnings(config):
        typer.echo(f" ! {warning}")
    typer.echo("")
    for line in parts_table(planned):
        typer.echo(line)
    if report is not None:
        typer.echo("")
        for line in report.lines():
            typer.echo(line)
    if failed:
        raise typer.Exit(2)


def plan_lines(request: Request, planned: Planned) -> list[str]:
    """Numbered lines: what was decided, and the reason behind it."""
    config = request.config
    hardware, plan, profile = planned.hardware, planned.plan, planned.profile
    why = plan.reasons
    gpus = ", ".join(f"{g.name} {g.model}" for g in hardware.accelerators) or "no GPU"
    layers = len(profile.layers)
    rows = [
        ("✓", "config", request.origin),
        (
            "✓",
            "hardware",
            f"{hardware.cpu.model}, {hardware.cpu.cores} cores; {gpus}; torch {hardware.torch_version}",
        ),
        ("✓" if plan.launcher != "none" else "-", "launcher", f"{plan.launcher}"),
        ("✓", "device", f"{plan.device}: {why['device']}"),
        ("✓", "precision", f"{plan.precision}: {why['precision']}"),
        ("✓" if plan.scaler else "-", "scaler", f"{'on' if plan.scaler else 'off'}: {why['scaler']}"),
        (
            "✓",
            "model",
            f"{config.model.name}: {planned.architecture}, {layers} layers, {profile.parameters:,} parameters",
        ),
        ("✓", "weights", why["weights"]),
        _adapter_row(config, planned),
        (
            "✓",
            "strategy",
            f"{plan.strategy}, {plan.processes} process{'es' * (plan.processes > 1)}: {why['strategy']}",
        ),
    ]
    if "device_map" in why:
        rows.append(("✓", "device map", why["device_map"]))
    rows += [("-", "default", f"{d.key} {d.value}: {d.reason}") for d in request.defaults]
    for device, share in plan.memory.items():
        figures = f"about {share.needed / GIB:.1f} GiB of {share.capacity / GIB:.1f} GiB free on {device} (estimate)"
        rows.append(("✓" if share.fits else "✗", "memory", figures))
    rows += [("!", "note", note) for note in plan.notes]
    return [f"{number:2} {mark} {name:<10} {text}" for number, (mark, name, text) in enumerate(rows, 1)]


def _adapter_row(config: Config, planned: Planned) -> tuple[str, str, str]:
    profile = planned.profile
    share = 100 * profile.trainable / profile.parameters
    counted = f"{profile.trainable:,} of {profile.parameters:,} parameters are trained ({share:.2f} %)"
    if config.method == "full":
        return "-", "adapter", f"none (method: full); {counted}"
    return "✓", "adapter", f"LoRA r {config.lora.r} on {', '.join(planned.targets)}; {counted}"


def parts_table(planned: Planned) -> list[str]:
    """Parts of the model and their devices; neighbouring layers of one device share a line."""
    plan = planned.plan
    rows = []

    def key(part: object) -> tuple[str, str]:
        name = part.name  # type: ignore[attr-defined]
        stack = name.rsplit(".", 1)[0] if part.is_layer else name  # type: ignore[attr-defined]
        return stack, plan.device_of(name)

    for (name, device), group in groupby(planned.profile.parts, key=key):
        parts = list(group)
        if parts[0].is_layer:
            name += f".{parts[0].name.rsplit('.', 1)[1]}-{parts[-1].name.rsplit('.', 1)[1]}"
        rows.append(
            (
                name or "(whole model)",
                sum(p.parameters for p in parts),
                sum(p.trainable for p in parts),
                device,
            )
        )
    width = max(len(r[0]) for r in rows)
    head = f"{'part':<{width}}  {'parameters':>15}  {'trained':>13}  device"
    return [head] + [
        f"{n:<{width}}  {total:>15,}  {trained:>13,}  {device}" for n, total, trained, device in rows
    ]


def plan_as_dict(planned: Planned) -> dict[str, object]:
    """The plan and the counts behind it, for machines."""
    profile = planned.profile
    return {
        **planned.plan.as_dict(),
        "model": {
            "architecture": planned.architecture,
            "parameters": profile.parameters,
            "trainable": profile.trainable,
            "adapter_targets": list(planned.targets),
        },
    }
