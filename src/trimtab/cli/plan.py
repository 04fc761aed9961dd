"""`trimtab plan`: what would happen, where, and why. Loads no weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from trimtab.cli.arguments import Arguments, request_from


def plan(
    arguments: Arguments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print the placement plan with its reasons; no weights are loaded."""
    from trimtab.config import config_warnings
    from trimtab.placement import PlacementError
    from trimtab.recipes.plan_text import parts_table, plan_as_dict, plan_lines
    from trimtab.recipes.planning import plan_run
    from trimtab.recipes.table import recipe_of

    request = request_from(arguments or [])
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
