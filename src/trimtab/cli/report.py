"""`trimtab report`: one HTML page for a run, a benchmark, a rehearsal or a fit."""

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
            help="The folder of a run or of a benchmark, or the JSON of `rehearse --json` or `fit --json`.",
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
        told = json.dumps({"page": str(path), **made.facts}, indent=2, ensure_ascii=False)
        # Half a surrogate pair, as a model may write it, has no UTF-8; as \ud83d it is good JSON.
        typer.echo(told.encode("utf-8", "backslashreplace").decode("utf-8"))
    else:
        typer.echo(str(path))
