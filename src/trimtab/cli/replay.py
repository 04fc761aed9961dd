"""`trimtab replay`: the weights of a zeroth-order run, rebuilt from its base model and its file of losses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.arguments import Trusted


def replay(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_FILE", help="A run's folder, or its trajectory.bin alone.", show_default=False
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="The base model, where it has moved: a folder or a hub id.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; RUN/replayed without it.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Stop after so many steps; without it at the step that the run kept.", min=0),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the run's kept weights, bit for bit.")
    ] = False,
    trust: Trusted = None,
) -> None:
    """Rebuild a zeroth-order run's weights without a forward pass: from its base model and a few bytes a step."""
    from trimtab.recipes.launch import quiet_libraries
    from trimtab.recipes.replay import replay_run

    quiet_libraries()
    if out is None and not check:
        out = (source if source.is_dir() else source.parent) / "replayed"
    started = time.perf_counter()
    result = replay_run(source, model=model, out=out, steps=steps, check=check, trusted=trust or [])
    typer.echo(f"{result.steps:,} steps replayed in {time.perf_counter() - started:.1f} s")
    if result.folder is not None:
        typer.echo(f"weights in {result.folder}")
    if check and result.differing:
        some = ", ".join(result.differing[:5]) + (" …" if len(result.differing) > 5 else "")
        typer.echo(f"{len(result.differing)} of {result.tensors} tensors differ from the kept ones: {some}")
        raise typer.Exit(1)
    if check:
        typer.echo(f"all {result.tensors} tensors equal the kept ones, bit for bit")
