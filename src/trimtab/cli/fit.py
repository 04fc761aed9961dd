"""`trimtab fit`: which settings fit on which GPUs, executed on virtual ones; the best as a config for `train`."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.arguments import Arguments, Fresh, request_from
from trimtab.cli.meanwhile import meanwhile
from trimtab.cli.output_files import check_outputs
from trimtab.monitor.wording import count_of

if TYPE_CHECKING:
    from trimtab.config import Config, Request
    from trimtab.hardware.catalogue import Card
    from trimtab.recipes.fit_options import Found, Option

MOST_GPUS = 8
"""So many are tried where nobody says how many there may be."""


def fit(
    arguments: Arguments = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="A GPU model (H200, RTX-4090, MPS-32GB), so many of it (2xH200), or all; may be given several times.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(help="Exactly so many of them (2), or what --gpu takes (2xH200).", show_default=False),
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
        typer.Option(
            help="Write your config with the best settings to this new file.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file of --out if it is there.")
    ] = False,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", help="Write what was found here as one HTML page.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    fresh: Fresh = False,
) -> None:
    """Find settings that fit: micro-batch, checkpointing, strategy, number of GPUs, the fastest first.

    What fits is executed on virtual GPUs by shapes alone; how fast it is, is an estimate. The rows of a step stay what
    they are. Ctrl-C ends the search, and tells what was found. Exit code: 0 something fits, 1 nothing does or it was
    stopped, 2 the request is wrong.
    """
    from trimtab.hardware import Launcher, probe
    from trimtab.recipes.fitting import Search
    from trimtab.recipes.trials import Trials

    began = time.monotonic()
    wanted = _wanted(list(gpu or []), gpus, max_gpus)
    _check_places(out, overwrite, html_file)
    stopped = False
    with Trials(keeps=True, fresh=fresh) as trials:
        trials.begin()  # it imports what it needs while this process does
        request = request_from(arguments or [])
        if out is not None and out.exists() and out.samefile(request.origin):
            raise _refused(f"--out {out}: your own config", "it is never replaced", "name another file")
        config = request.config
        rows = _rows(config, tokens_per_step)
        with meanwhile("looking at the model", quiet=as_json) as tell:
            number = itertools.count(1)
            search = Search(
                config,
                rows,
                probe(Launcher(name="none")),
                trials,
                lambda text: tell(f"layout {next(number)}: {text}"),
            )
            try:
                for card, counts in wanted:
                    search.on(card, counts, all_counts=max_gpus is not None)
            except KeyboardInterrupt:
                if not search.found.options:
                    raise
                stopped = True
    found = search.found
    best = found.best
    text = _config_text(best, request) if best is not None else None
    told = {
        "model": config.model.name,
        "rows_a_step": rows,
        "seconds": round(time.monotonic() - began, 1),
        "executed_before": trials.from_before,
        "stopped": stopped,
        **found.as_dict(),
        "config": text,
    }
    if as_json:
        typer.echo(json.dumps(told, indent=2))
    else:
        executed = f"{len(found.options)} layout{'s' * (len(found.options) != 1)} executed on virtual GPUs"
        if trials.from_before:
            executed += f" ({trials.from_before} of them before, and kept; --fresh executes them again)"
        typer.echo(
            f"{config.model.name}, {config.method}, {rows} row{'s' * (rows > 1)} a step of at most "
            f"{config.data.max_length:,} tokens; {executed} in {told['seconds']:.0f} s"
        )
        table = ["", *found.lines()] if found.options else []
        typer.echo("\n".join([*table, "", *found.footnotes()]))
        if (more := more_by_itself(config, tokens_per_step, found)) is not None:
            typer.echo(more)
        if stopped:
            typer.echo("! stopped before the search was over: what was executed until then")
        typer.echo(_answer(best, config, found.shown(), stopped=stopped))
    if html_file is not None:
        _write_page(html_file, told, quiet=as_json)
    if out is not None and text is not None:
        _write_config(out, text, overwrite)
        if not as_json:
            typer.echo(f"written to {out}: trimtab train {shlex.quote(str(out))}")
    raise typer.Exit(0 if best is not None and not stopped else 1)


def _refused(found: str, why: str, change: str) -> Exception:
    from trimtab.errors import RequestError

    return RequestError.of(found, why, change)


def _wanted(names: list[str], gpus: str | None, most: int | None) -> list[tuple[Card, Sequence[int]]]:
    """Which GPUs, and of each how many are tried."""
    from trimtab.hardware.catalogue import MOST, cards, check_one_apple

    exactly: int | None = None
    if gpus is not None and gpus.strip().isdecimal():
        exactly = int(gpus)
    elif gpus is not None:
        names.append(gpus)
    if not names:
        raise _refused(
            "`trimtab fit` without --gpu",
            "what fits hangs on the GPU",
            "add --gpu H200, another model, or --gpu all",
        )
    found: list[tuple[Card, Sequence[int]]] = []
    for name in (part for several in names for part in several.split(",")):
        several = re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(\S.*)", name, re.IGNORECASE)
        count = int(several[1]) if several else exactly
        if several is not None and exactly not in (None, count):
            raise _refused(
                f"--gpu {name} and --gpus {gpus}", "these are two numbers of GPUs", "give one of them"
            )
        if count is not None and most is not None:
            raise _refused(
                f"{count} GPUs and --max-gpus {most}", "either so many or up to so many", "give one of them"
            )
        if count is not None and not 1 <= count <= MOST:
            raise _refused(f"{count} GPUs", f"there may be 1 to {MOST:,}", "write --gpus 2 or --gpu 2xH200")
        counts = [count] if count is not None else [2**k for k in range(20) if 2**k <= (most or MOST_GPUS)]
        for card in cards([several[2] if several else name]):
            check_one_apple(card, count or 1)
            if not any(card.key == one.key and counts == tried for one, tried in found):
                found.append((card, counts))
    return found


def _check_places(out: Path | None, overwrite: bool, html_file: Path | None) -> None:
    """Refuse, before anything is executed, what could not be written afterwards."""
    from trimtab.report.make import check_place

    check_outputs([("--out", out), ("--html", html_file)])
    if out is not None and (out.is_dir() or (out.exists() and not overwrite)):
        there = "a folder" if out.is_dir() else "the file is there"
        also = "" if out.is_dir() else ", or add --overwrite"
        raise _refused(
            f"--out {out}: {there}",
            "nothing of yours is replaced unless you say so",
            f"name another file{also}",
        )
    if html_file is not None:
        check_place(html_file, "--html")


def _rows(config: Config, tokens: int | None) -> int:
    """Rows of one step: as many as the config has, or as make up so many tokens."""
    training = config.training
    if tokens is not None:
        if tokens < config.data.max_length:
            raise _refused(
                f"--tokens-per-step {tokens:,}: less than one row",
                f"a row may have data.max_length={config.data.max_length} tokens",
                f"ask for at least {config.data.max_length}, or lower data.max_length",
            )
        return round(tokens / config.data.max_length)
    each = training.batch_size * training.gradient_accumulation_steps * (config.processes or 1)
    return training.effective_batch_size or each


def more_by_itself(config: Config, tokens: int | None, found: Found) -> str | None:
    """Where the config says the rows of one process, and not how many there are: what its own run would take."""
    training = config.training
    said = tokens or config.processes or config.model_parallel or training.effective_batch_size
    if said or not any(option.way.ranks > 1 for option in found.options):
        return None
    each = training.batch_size * training.gradient_accumulation_steps
    return (
        f"! {each} rows a step are those of one process: your config as it is takes so many on each GPU that it is "
        "copied to (training.effective_batch_size or --tokens-per-step says how many there are in all)"
    )


def _config_text(best: Option, request: Request) -> str:
    """The user's config with what was found, and above it where that came from."""
    from trimtab.config.edited import edited_text

    told = [
        f"Found by `trimtab fit` from {request.origin} for {best.way.gpus} × {best.gpu}: {best.way.words()}.",
        f"Executed on virtual GPUs: {best.held.peak / 2**30:.1f} GiB allocated and "
        f"{best.held.reserved / 2**30:.1f} GiB reserved at the peak, {best.share:.0%} of each GPU with CUDA's own.",
    ]
    if best.tokens_a_second is not None:
        told.append(f"Estimated, not measured: {best.tokens_a_second:,.0f} tokens a second.")
    return "".join(f"# {line}\n" for line in told) + edited_text(request, best.config)


def _write_config(out: Path, text: str, overwrite: bool) -> None:
    from trimtab.files import write_whole

    if overwrite:
        write_whole(out, text)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise _refused(
            f"--out {out}: the file is there by now",
            "it came while the search went on, and nothing of yours is replaced unless you say so",
            "name another file, or add --overwrite",
        ) from None


def _write_page(file: Path, told: dict[str, object], *, quiet: bool) -> None:
    from trimtab.report.fit import fit_page
    from trimtab.report.make import Report, write_page
    from trimtab.report.run_facts import hidden

    facts = hidden(told)
    write_page(Report(fit_page(facts), facts, file), file)
    if not quiet:
        typer.echo(f"page: {file}")


def _answer(best: Option | None, config: Config, shown: list[Option], *, stopped: bool) -> str:
    if best is None:
        nearest = min(shown, key=lambda option: option.share, default=None)
        if nearest is None:
            none = "nothing fits: no layout was executed, for the reasons above"
            return f"{none}. Try more or larger GPUs (--max-gpus, --gpu), or a smaller model"
        rows = count_of(nearest.micro_batch, "row")
        near = (
            f"nearest comes {nearest.way.gpus} × {nearest.gpu} ({nearest.way.words()}, {rows} of "
            f"{nearest.way.length:,} tokens), which needs {nearest.share:.0%} of the GPU"
        )
        if stopped:
            return f"nothing that was executed until then fits, and more was to be tried; {near}"
        return f"nothing fits; {near}. Try more or larger GPUs (--max-gpus, --gpu), or a smaller model"
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
    return "\n".join(lines)
