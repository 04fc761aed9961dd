"""`trimtab doctor`: what is installed and there, for a bug report. Shows no secret, repairs nothing."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Report what is installed and there; exit code 1 when something would bite a run."""
    from trimtab.hardware.doctor import examine

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        for line in report.lines():
            typer.echo(line)
    if report.bites:
        raise typer.Exit(1)
