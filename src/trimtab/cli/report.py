"""`trimtab report`: one HTML page for a run, a benchmark or a rehearsal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run or of a benchmark, or the file of `rehearse --json`.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; RUN/report.html without it.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print what the page tells, as JSON, in place of its path.")
    ] = False,
) -> None:
    """Make one self-contained HTML page: results, curves, completions, plan, health and settings."""
    from trimtab.report.make import make_report, write_page

    made = make_report(source)
    path = write_page(made, out)
    if as_json:
        typer.echo(json.dumps({"page": str(path), **made.facts}, indent=2, ensure_ascii=False))
    else:
        typer.echo(str(path))
