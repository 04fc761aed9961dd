"""`trimtab ask`: a question to the model that a run kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.arguments import Trusted, trust_words


def ask(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)
    ],
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    picture: Annotated[
        list[Path] | None,
        typer.Option(
            help="A picture that the question is about; may be given several times.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where to answer; without it where the run was told to be.", show_default=False),
    ] = None,
    trust: Trusted = None,
) -> None:
    """Ask the model that a run kept; with pictures where it can see. Prints the answer alone."""
    from trimtab.config import load_config
    from trimtab.errors import RequestError
    from trimtab.export.finished import read_run
    from trimtab.recipes.ask import ask as ask_run
    from trimtab.recipes.launch import quiet_libraries

    finished = read_run(run)
    for path in picture or []:
        if not path.is_file():
            raise RequestError.of(
                f"--picture {path}: no such file", "there is nothing to look at", "check the path"
            )
    words = trust_words(trust)
    words += [] if device is None else [f"device={device}", "precision=auto"]
    config = load_config(run / "config.yaml", words)
    quiet_libraries()
    typer.echo(ask_run(config, finished.weights, question, picture or []))
