"""`trimtab evaluate`: how good the model is that a run kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.arguments import Trusted, trust_words


def evaluate(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Rows to judge it by, as data.source names them; without it what the run held out.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Held-out rows to answer, as samples.held_out; of a voice the rows to speak, so many trained and so "
            "many held out (8).",
            min=0,
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to compute; without it where the run was told to be.", show_default=False),
    ] = None,
    trust: Trusted = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Measure what a run kept: held-out loss, the recipe's own figures, and a voice by recogniser and encoder."""
    from trimtab.bench.evaluation import check_place, evaluated, keep, lines
    from trimtab.config import load_config
    from trimtab.export.finished import read_run
    from trimtab.files import plain_value
    from trimtab.recipes.launch import quiet_libraries

    finished = read_run(run)
    check_place(run)
    words = trust_words(trust)
    words += [] if device is None else [f"device={device}", "precision=auto"]
    config = load_config(run / "config.yaml", words)
    quiet_libraries()
    found = evaluated(
        config,
        finished.folder,
        finished.weights,
        data=data,
        rows=rows,
        say=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(plain_value(found), indent=2, ensure_ascii=False, allow_nan=False, default=str))
    else:
        typer.echo("\n".join(lines(found)))
    kept = keep(run, found)
    if not as_json:
        typer.echo(f"kept in {kept}")
