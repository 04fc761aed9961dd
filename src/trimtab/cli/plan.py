"""`trimtab plan`: what would happen, where, and why. Loads no weights; memory is executed on virtual GPUs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.arguments import Arguments, Fresh, request_from
from trimtab.cli.meanwhile import meanwhile

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.placement import PlacementError
    from trimtab.recipes.planning import Planned
    from trimtab.recipes.trials import Trials


def plan(
    arguments: Arguments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "--gpu",
            help="Plan for GPUs that need not be here: a count, a model or both (2, H200, 2xH200), or MPS-32GB.",
            show_default=False,
        ),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Print the placement plan with its reasons; no weights are loaded.

    What GPUs have to hold is executed: training steps on virtual GPUs, by shapes alone. Where that cannot be, a formula
    estimates it; the plan says which. A figure that was executed before is told again as long as nothing that it hangs
    on has changed: the settings, the files they name, the packages.
    """
    from trimtab.placement import PlacementError
    from trimtab.recipes.trials import Trials
    from trimtab.rehearse.session import VARIABLE as REHEARSED

    planned: Planned | PlacementError
    rehearsed = REHEARSED in os.environ
    with (
        meanwhile("reading the config", quiet=as_json) as tell,
        Trials(keeps=not rehearsed, fresh=fresh, tell=tell) as trials,
    ):
        if gpus is not None and not rehearsed:
            trials.begin()  # it imports what takes long, while this process reads the config
        request = request_from(arguments or [])
        try:
            planned = _planned(request.config, gpus, trials)
        except PlacementError as error:
            planned = error
    _tell(request, planned, as_json, elsewhere=gpus is not None)


def _planned(config: Config, gpus: str | None, trials: Trials) -> Planned:
    from trimtab.hardware import probe
    from trimtab.recipes.planning import machine_with, plan_run

    hardware = machine_with(gpus) if gpus is not None else probe()
    if hardware.gpus and not hardware.virtual:
        trials.begin()
    return plan_run(config, hardware, trials=trials)


def _tell(request: Request, planned: Planned | PlacementError, as_json: bool, *, elsewhere: bool) -> None:
    from trimtab.config import config_warnings
    from trimtab.placement import PlacementError
    from trimtab.recipes.disk_needs import planned_room
    from trimtab.recipes.plan_text import parts_table, plan_as_dict, plan_lines
    from trimtab.recipes.table import recipe_of

    config = request.config
    if isinstance(planned, PlacementError):
        error = planned
        steps = f" 1 ✓ config      {request.origin}\n 2 ✗ placement   {error}\n 3 - the rest    skipped"
        typer.echo(json.dumps({"error": str(error)}, indent=2) if as_json else steps)
        raise typer.Exit(2)
    preflight = recipe_of(config).preflight
    report = preflight(config, planned.plan) if preflight is not None else None
    room = replace(planned_room(config, planned), elsewhere=elsewhere)
    failed = (report is not None and bool(report.failed)) or (room.refusal() is not None and not elsewhere)
    if as_json:
        checks = {"checks": [asdict(check) for check in report.checks]} if report is not None else {}
        typer.echo(json.dumps(plan_as_dict(request, planned, room) | checks, indent=2))
        raise typer.Exit(2 if failed else 0)
    lines = plan_lines(request, planned, room) + [f" ! {warning}" for warning in config_warnings(config)]
    lines += ["", *parts_table(planned), *(["", *report.lines()] if report is not None else [])]
    typer.echo("\n".join(lines))
    if failed:
        raise typer.Exit(2)
