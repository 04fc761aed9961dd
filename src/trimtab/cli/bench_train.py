"""`trimtab bench train`: the ladder of a faster training step, on the user's own machine, model and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trimtab.cli.arguments import Arguments, request_from

Steps = Annotated[int, typer.Option(min=1, help="Timed steps of each row.")]
WarmUp = Annotated[
    int, typer.Option(min=1, help="Steps before the timed ones, in which layers are compiled.")
]
Rows = Annotated[
    str | None,
    typer.Option(
        help="Of padding, head, adapters, compile, kernels, optimizer and default, commas between; the first row, "
        "plain, is always there."
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="New folder of the results, runs/bench-train-<time> without it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


class MeasuredSettings(TyperCommand):
    """A verb with options of its own, some with values, among settings, which go to it as they stand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            name: option for option in self.get_params(ctx) for name in option.opts if name.startswith("-")
        }
        mine: list[str] = []
        settings: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            option = own.get(word.partition("=")[0])
            (settings if option is None else mine).append(word)
            if option is not None and "=" not in word and not getattr(option, "is_flag", False) and rest:
                mine.append(rest.pop(0))
        return super().parse_args(ctx, [*mine, "--", *settings])


def train(
    arguments: Arguments = None,
    steps: Steps = 10,
    warm_up: WarmUp = 5,
    rows: Rows = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Training speed and memory by what makes them, one change a row. Without CONFIG: the built-in quick start."""
    from trimtab.bench.stand import finish
    from trimtab.bench.train import TrainRequest, run_train
    from trimtab.cli.bench import begin, listed

    request = request_from(arguments or [])
    folder, progress = begin("train", out)
    asked = TrainRequest(
        config=request.config,
        origin=request.origin,
        steps=steps,
        warm_up=warm_up,
        rows=listed(rows or ""),
    )
    if not finish(*run_train(asked, folder, progress), progress.say, as_json=as_json):
        raise typer.Exit(1)
