"""`trimtab bench`: the GLUE+ benchmark, and those of memory and speed."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trimtab.bench.glue import Outcome
    from trimtab.monitor.progress import Quiet

# Options that several benchmarks take.
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Precision = Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Interval = Annotated[int | None, typer.Option(min=1, help="DiZO: steps between two projections.")]
Methods = Annotated[
    str,
    typer.Option(
        help="Of zero-shot, full, lora, mezo, dizo, fzoo, mezo-lora, dizo-lora and fzoo-lora, commas between; or all."
    ),
]
BatchSizes = Annotated[str, typer.Option(help="Rows in a batch, commas between.")]
Lengths = Annotated[str, typer.Option(help="Tokens in a row, commas between.")]
Models = Annotated[str | None, typer.Option(help="Folders, hub ids or smollm2, commas between.")]
Scales = Annotated[
    str | None,
    typer.Option(help="small, medium, large, xlarge: Qwen3 0.6B, 1.7B, 4B, 8B; commas between."),
]
Shapes = Annotated[
    str | None,
    typer.Option(help="Random weights in the shapes of these, as Qwen3-0.6B; no weights are read."),
]
Out = Annotated[
    Path | None, typer.Option(help="New folder for the results; runs/bench-<kind>-<time> without it.")
]

bench = typer.Typer(name="bench", help="Measure methods, memory and speed.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure methods, memory and speed."""


@bench.command()
def glue(
    device: Device = "auto",
    scale: Annotated[
        str | None, typer.Option(help="small, medium, large, xlarge: Qwen3 0.6B, 1.7B, 4B, 8B.")
    ] = None,
    datasets: Annotated[
        str,
        typer.Option(
            help="Of cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, boolq, cb, copa, wic, wsc, multirc, record "
            "and squad, commas between; or all."
        ),
    ] = "sst2,cola,mrpc,rte",
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over the training rows.")] = 3.0,
    model: Annotated[
        str | None, typer.Option(help="A folder, a hub id or smollm2, in place of --scale.")
    ] = None,
    methods: Methods = "zero-shot,lora,mezo,dizo",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder with <task>/train and <task>/validation files (jsonl, json, tsv, csv or parquet); or hub; "
            "or sample, the few rows that Trimtab ships. Without it the hub, or the sample where that is out of reach."
        ),
    ] = None,
    train_rows: Annotated[int, typer.Option(min=1, help="Training rows of each task, at most.")] = 1000,
    eval_rows: Annotated[int, typer.Option(min=1, help="Evaluated rows of each split, at most.")] = 500,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, in place of --epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a step.")] = 16,
    max_length: Annotated[
        int, typer.Option(min=8, help="Longest row in tokens; prompts lose their left end.")
    ] = 1024,
    lr: Annotated[float | None, typer.Option(min=0.0, help="Learning rate of every method.")] = None,
    eps: Annotated[float | None, typer.Option(help="Perturbation of the zeroth-order methods.")] = None,
    interval: Interval = None,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between two points of the curve.")
    ] = None,
    precision: Precision = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; what is finished there is not run again. runs/bench-glue-<time> without it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tune and evaluate a model on GLUE+ tasks, by every method asked for."""
    import sys

    from trimtab.bench.glue import GlueRequest, run_glue
    from trimtab.errors import RequestError

    if steps is None and epochs <= 0:
        raise RequestError.of(
            "--epochs 0", "nothing would be tuned", "give more; --methods zero-shot alone needs no --epochs"
        )
    _check_numbers(epochs, lr, eps)
    request = GlueRequest(
        tasks=_listed(datasets),
        methods=_listed(methods),
        seeds=_seeds(seeds),
        model=model,
        scale=scale,
        device=device,
        precision=precision,
        data=data,
        train_rows=train_rows,
        eval_rows=eval_rows,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        max_length=max_length,
        learning_rate=lr,
        eps=eps,
        interval=interval,
        eval_every=eval_every,
    )
    _quiet_libraries()
    folder, progress = _begin("glue", out)
    outcome = run_glue(request, folder, progress.say, progress)
    if as_json:
        json.dump(outcome.results.as_dict(), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
    else:
        print("\n" + outcome.results.markdown())
    progress.say(f"kept in {folder}: results.md, results.json, cells/{_plots(outcome)}")
    if outcome.interrupted:
        progress.say(f"interrupted; what is done is kept. Go on with the same command and --out {folder}")
    if outcome.failed:
        raise typer.Exit(1)


@bench.command()
def memory(
    device: Device = "auto",
    scale: Scales = None,
    model: Models = None,
    shapes: Shapes = None,
    methods: Methods = "all",
    batch_size: BatchSizes = "16",
    length: Lengths = "64",
    precision: Precision = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory of every method against inference with the same batch."""
    from trimtab.bench.memory import run_memory
    from trimtab.bench.stand import StandRequest, finish

    request = StandRequest(
        methods=_listed(methods),
        model=_listed(model or ""),
        scale=_listed(scale or ""),
        shapes=_listed(shapes or ""),
        batch_sizes=_counts("--batch-size", batch_size),
        lengths=_counts("--length", length),
        device=device,
        precision=precision,
    )
    folder, progress = _begin("memory", out)
    if not finish(*run_memory(request, folder, progress), progress.say, as_json=as_json):
        raise typer.Exit(1)


@bench.command()
def speed(
    device: Device = "auto",
    scale: Scales = None,
    model: Models = None,
    shapes: Shapes = None,
    methods: Methods = "all",
    batch_size: BatchSizes = "16",
    length: Lengths = "64",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each cell.")] = 10,
    warm_up: Annotated[int, typer.Option(min=2, help="Steps before the timed ones.")] = 2,
    compile_layers: Annotated[
        bool, typer.Option("--compile", help="CUDA: compile the layers of zeroth-order passes.")
    ] = False,
    precision: Precision = "auto",
    target: Annotated[
        float | None, typer.Option(help="Also what it costs to reach this accuracy on --task, as 0.8.")
    ] = None,
    task: Annotated[str, typer.Option(help="With --target: tasks of bench glue, commas between.")] = "sst2",
    data: Annotated[str | None, typer.Option(help="With --target: as in bench glue.")] = None,
    epochs: Annotated[float, typer.Option(min=0.01, help="With --target: passes over the rows.")] = 3.0,
    tuning_steps: Annotated[
        int | None, typer.Option(min=1, help="With --target: steps, in place of --epochs.")
    ] = None,
    train_rows: Annotated[int, typer.Option(min=1, help="With --target: training rows, at most.")] = 1000,
    eval_rows: Annotated[int, typer.Option(min=1, help="With --target: evaluated rows, at most.")] = 500,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="With --target: steps between two evaluations.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="With --target: seeds, separated by commas.")] = "0",
    lr: Annotated[float | None, typer.Option(min=0.0, help="With --target: learning rate.")] = None,
    eps: Annotated[float | None, typer.Option(help="With --target: perturbation.")] = None,
    interval: Interval = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Step time of every method against its bare forwards, and the cost of a target accuracy."""
    from trimtab.bench.glue import GlueRequest
    from trimtab.bench.speed import run_speed
    from trimtab.bench.stand import StandRequest, finish

    request = StandRequest(
        methods=_listed(methods),
        model=_listed(model or ""),
        scale=_listed(scale or ""),
        shapes=_listed(shapes or ""),
        batch_sizes=_counts("--batch-size", batch_size),
        lengths=_counts("--length", length),
        device=device,
        precision=precision,
        warm_up=warm_up,
        steps=steps,
        iterations=10,
        compile=compile_layers,
    )
    _check_numbers(epochs, lr, eps)
    runs = GlueRequest(
        tasks=_listed(task),
        seeds=_seeds(seeds),
        data=data,
        train_rows=train_rows,
        eval_rows=eval_rows,
        epochs=epochs,
        steps=tuning_steps,
        batch_size=request.batch_sizes[0],
        learning_rate=lr,
        eps=eps,
        interval=interval,
        eval_every=eval_every,
    )
    _quiet_libraries()
    folder, progress = _begin("speed", out)
    found = run_speed(request, folder, progress, interval=interval, target=target, runs=runs)
    if not finish(*found, progress.say, as_json=as_json):
        raise typer.Exit(1)


def _begin(kind: str, out: Path | None) -> tuple[Path, Quiet]:
    """Where the results go, and who tells of them."""
    from trimtab.monitor.progress import make_progress

    folder = (out or Path("runs") / f"bench-{kind}-{time.strftime('%Y%m%d-%H%M%S')}").expanduser()
    progress = make_progress("auto")
    progress.say(f"trimtab bench {kind}, into {folder}")
    return folder, progress


def _check_numbers(epochs: float, lr: float | None, eps: float | None) -> None:
    from trimtab.errors import RequestError

    for name, value in (("epochs", epochs), ("lr", lr), ("eps", eps)):
        if value is not None and not math.isfinite(value):
            raise RequestError.of(f"--{name} {value}", "it is no finite number", "give one, as 1e-3")
    if eps is not None and eps <= 0:
        raise RequestError.of(
            f"--eps {eps}", "losses are compared at a distance from the weights", "give more than 0"
        )


def _counts(option: str, text: str) -> tuple[int, ...]:
    from trimtab.errors import RequestError

    parts = _listed(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RequestError.of(
            f"{option} {text}", "it takes whole numbers above 0, separated by commas", f"write {option} 8,16"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _seeds(text: str) -> tuple[int, ...]:
    from trimtab.errors import RequestError

    parts = _listed(text)
    if not parts or not all(part.isdecimal() and int(part) < 2**64 for part in parts):
        raise RequestError.of(
            f"--seeds {text}",
            "seeds are whole numbers of 64 bits, separated by commas",
            "write --seeds 0,1,2",
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _plots(outcome: Outcome) -> str:
    return "".join(f", {name}" for name in outcome.results.plots())


def _quiet_libraries() -> None:
    """One progress display is enough: ours."""
    # Read by the datasets library when it is imported, which is only where something comes from the hub.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
