"""`trimtab fit`: which settings fit on which GPUs, executed on virtual ones; the best as a config for `train`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.arguments import Arguments, request_from

if TYPE_CHECKING:
    from trimtab.config.schema import Config
    from trimtab.recipes.fit_options import Option

MOST_GPUS = 8
"""So many are tried where nobody says how many there may be."""


def fit(
    arguments: Arguments = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU model (H200, RTX-4090, MPS-32GB), or all; may be given several times.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Exactly so many of them.", show_default=False)
    ] = None,
    max_gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Compare 1, 2, 4, … up to so many. Default: the fewest of 1 to 8 on which it fits.",
            show_default=False,
        ),
    ] = None,
    tokens_per_step: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of one step. Default: the rows that the config has.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the best settings to this new file.", dir_okay=False, show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Find settings that fit: micro-batch, checkpointing, strategy, number of GPUs, the fastest first.

    What fits is executed on virtual GPUs by shapes alone; how fast it is, is an estimate. The rows of a step stay what
    they are. Exit code: 0 something fits, 1 nothing does, 2 the request is wrong.
    """
    from trimtab.errors import RequestError
    from trimtab.hardware import Launcher, probe
    from trimtab.hardware.catalogue import cards
    from trimtab.recipes.fit_options import MARGIN
    from trimtab.recipes.fitting import Search
    from trimtab.recipes.roofline import assumptions
    from trimtab.recipes.trials import Trials

    began = time.monotonic()
    if not gpu:
        raise RequestError.of(
            "`trimtab fit` without --gpu",
            "what fits hangs on the GPU",
            "add --gpu H200, another model, or --gpu all",
        )
    if out is not None and (out.exists() or not out.absolute().parent.is_dir()):
        there = "there is such a file" if out.exists() else f"there is no folder {out.parent}"
        raise RequestError.of(f"--out {out}: {there}", "nothing is overwritten or made up", "name a new file")
    wanted = cards(gpu)
    with Trials() as trials:
        trials.begin()  # it imports what it needs while this process does
        request = request_from(arguments or [])
        config = request.config
        rows = _rows(config, tokens_per_step)
        with _progress(quiet=as_json) as tell:
            search = Search(config, rows, probe(Launcher(name="none")), trials, tell)
            for card in wanted:
                search.on(card, _counts(gpus, max_gpus), all_counts=max_gpus is not None)
    found = search.found
    best = found.best
    text = _config_text(best, request.origin) if best is not None else None
    if out is not None and text is not None:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    if as_json:
        more = {
            "model": config.model.name,
            "rows_a_step": rows,
            "seconds": round(time.monotonic() - began, 1),
        }
        typer.echo(json.dumps({**more, **found.as_dict(), "config": text}, indent=2))
        raise typer.Exit(0 if best is not None else 1)
    typer.echo(
        f"{config.model.name}, {config.method}, {rows} row{'s' * (rows > 1)} a step of at most "
        f"{config.data.max_length:,} tokens; {len(found.options)} layouts executed on virtual GPUs "
        f"in {time.monotonic() - began:.0f} s"
    )
    typer.echo("\n".join(["", *found.lines(), ""]))
    typer.echo(f"fits: what torch reserves and CUDA's own in {1 - MARGIN:.0%} of the GPU's memory")
    typer.echo("tokens/s are an estimate: " + "; ".join(assumptions()))
    for layout, why in found.failed.items():
        typer.echo(f"! not executed: {layout}: {why}")
    typer.echo(_answer(best, config, out, found.shown()))
    raise typer.Exit(0 if best is not None else 1)


def _rows(config: Config, tokens: int | None) -> int:
    """Rows of one step: as many as the config has, or as make up so many tokens."""
    training = config.training
    if tokens is not None:
        return max(1, round(tokens / config.data.max_length))
    each = training.batch_size * training.gradient_accumulation_steps * (config.processes or 1)
    return training.effective_batch_size or each


def _counts(gpus: int | None, most: int | None) -> list[int]:
    if gpus is not None:
        return [gpus]
    return [2**k for k in range(20) if 2**k <= (most or MOST_GPUS)]


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """What is executed now, on a line that goes away; nothing where no terminal looks on."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("looking at the model", total=None)
        made = 0

        def tell(text: str) -> None:
            nonlocal made
            made += 1
            bar.update(task, description=f"layout {made}: {text}")

        yield tell


def _config_text(best: Option, origin: str) -> str:
    from trimtab.config import dump_config

    told = [
        f"Found by `trimtab fit` from {origin} for {best.way.gpus} × {best.gpu}: {best.way.words()}.",
        f"Executed on virtual GPUs: {best.held.peak / 2**30:.1f} GiB allocated and "
        f"{best.held.reserved / 2**30:.1f} GiB reserved at the peak, {best.share:.0%} of each GPU with CUDA's own.",
    ]
    if best.tokens_a_second is not None:
        told.append(f"Estimated, not measured: {best.tokens_a_second:,.0f} tokens a second.")
    return "".join(f"# {line}\n" for line in told) + dump_config(best.config)


def _answer(best: Option | None, config: Config, out: Path | None, shown: list[Option]) -> str:
    if best is None:
        nearest = min(shown, key=lambda option: option.share, default=None)
        if nearest is None:
            return "nothing fits: no layout could be executed"
        return (
            f"nothing fits; nearest comes {nearest.way.gpus} × {nearest.gpu} ({nearest.way.words()}, "
            f"{nearest.micro_batch} row of {nearest.way.length:,} tokens), which needs {nearest.share:.0%} of the GPU. "
            "Try more or larger GPUs (--max-gpus, --gpu), or a smaller model"
        )
    way = best.way
    lines = [f"best: {way.gpus} × {best.gpu}, {way.words()}, training.batch_size={best.micro_batch}"]
    if way.length < config.data.max_length:
        lines.append(
            f"! data.max_length={way.length} in place of {config.data.max_length}: nothing fits with longer rows"
        )
    if way.quantize != config.model.quantize:
        lines.append(
            f"! frozen weights are held in four bits (model.quantize={way.quantize}): nothing fits without"
        )
    if out is not None:
        lines.append(f"written to {out}: trimtab train {shlex.quote(str(out))}")
    return "\n".join(lines)
