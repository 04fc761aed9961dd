"""`trimtab bench`: the GLUE+ benchmark, and those of memory and speed."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.bench_train import MeasuredSettings, train

if TYPE_CHECKING:
    from trimtab.bench.glue_cell import GlueRequest
    from trimtab.bench.stand import StandRequest
    from trimtab.monitor.progress import Quiet

# Every option once; a benchmark takes those that it needs, with defaults of its own.
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Precision = Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]
Methods = Annotated[
    str,
    typer.Option(
        help="Of zero-shot, full, lora, mezo, dizo, fzoo, mezo-lora, dizo-lora and fzoo-lora, commas between; or all."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the results, runs/bench-<kind>-<time> without it; what bench glue finished there is not run "
        "again, the others take a new folder."
    ),
]
# Which model.
_SCALES = "small, medium, large, xlarge: Qwen3 0.6B, 1.7B, 4B, 8B"
Model = Annotated[str | None, typer.Option(help="A folder, a hub id or smollm2, in place of --scale.")]
Models = Annotated[str | None, typer.Option(help="Folders, hub ids or smollm2, commas between.")]
Scale = Annotated[str | None, typer.Option(help=f"{_SCALES}.")]
Scales = Annotated[str | None, typer.Option(help=f"{_SCALES}; commas between.")]
Shapes = Annotated[
    str | None,
    typer.Option(help="Random weights in the shapes of these, as Qwen3-0.6B; no weights are read."),
]
# Which batches.
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a step.")]
BatchSizes = Annotated[str, typer.Option(help="Rows in a batch, commas between.")]
Lengths = Annotated[str, typer.Option(help="Tokens in a row, commas between.")]
MaxLength = Annotated[int, typer.Option(min=8, help="Longest row in tokens; prompts lose their left end.")]
# How a model is tuned on a task.
Tasks = Annotated[
    str,
    typer.Option(
        help="Of cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli, boolq, cb, copa, wic, wsc, multirc, record "
        "and squad, commas between; or all."
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="A folder with <task>/train and <task>/validation files (jsonl, json, tsv, csv or parquet); or hub; "
        "or sample, the few rows that Trimtab ships. Without it the hub, or the sample where that is out of reach."
    ),
]
TrainRows = Annotated[int, typer.Option(min=1, help="Training rows of each task, at most.")]
EvalRows = Annotated[int, typer.Option(min=1, help="Evaluated rows of each split, at most.")]
Epochs = Annotated[float, typer.Option(min=0.0, help="Passes over the training rows.")]
TuningSteps = Annotated[int | None, typer.Option(min=1, help="Steps, in place of --epochs.")]
EvalEvery = Annotated[int | None, typer.Option(min=1, help="Steps between two points of the curve.")]
Seeds = Annotated[str, typer.Option(help="Seeds, separated by commas.")]
Rate = Annotated[float | None, typer.Option(min=0.0, help="Learning rate of every method.")]
Eps = Annotated[float | None, typer.Option(help="Perturbation of the zeroth-order methods.")]
Interval = Annotated[int | None, typer.Option(min=1, help="DiZO: steps between two projections.")]
# What is timed.
TimedSteps = Annotated[int, typer.Option(min=1, help="Timed steps of each cell.")]
WarmUp = Annotated[int, typer.Option(min=2, help="Steps before the timed ones.")]
Compile = Annotated[bool, typer.Option("--compile", help="CUDA: compile the layers of zeroth-order passes.")]
Target = Annotated[
    float | None,
    typer.Option(
        help="Also what it costs to reach this accuracy on --task, as 0.8. --data, --epochs, --tuning-steps, --seeds, "
        "--lr, --eps and the rows say how, as in bench glue."
    ),
]

Asked = dict[str, Any]
"""A command's options by name, as its parameters are called."""

bench = typer.Typer(name="bench", help="Measure methods, memory and speed.", no_args_is_help=True)
bench.command(cls=MeasuredSettings)(train)


@bench.command()
def glue(
    device: Device = "auto",
    scale: Scale = None,
    datasets: Tasks = "sst2,cola,mrpc,rte",
    epochs: Epochs = 3.0,
    model: Model = None,
    methods: Methods = "zero-shot,lora,mezo,dizo",
    seeds: Seeds = "0",
    data: Data = None,
    train_rows: TrainRows = 1000,
    eval_rows: EvalRows = 500,
    steps: TuningSteps = None,
    batch_size: BatchSize = 16,
    max_length: MaxLength = 1024,
    lr: Rate = None,
    eps: Eps = None,
    interval: Interval = None,
    eval_every: EvalEvery = None,
    precision: Precision = "auto",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Tune and evaluate a model on GLUE+ tasks, by every method asked for."""
    asked: Asked = locals()
    from trimtab.bench.glue import run_glue
    from trimtab.bench.results import show

    more = ("model", "scale", "device", "precision", "batch_size", "max_length")
    request = _tuned(asked, datasets, steps, methods=listed(methods), **{name: asked[name] for name in more})
    _quiet_libraries()
    folder, progress = begin("glue", out)
    outcome = run_glue(request, folder, progress.say, progress)
    results = outcome.results
    show(results.as_dict(), results.markdown(), as_json=as_json)
    progress.say(f"kept in {folder}: results.md, results.json, cells/; drawn by: trimtab report {folder}")
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
    asked: Asked = locals()
    from trimtab.bench.memory import run_memory
    from trimtab.bench.stand import finish

    request = _measured(asked)
    folder, progress = begin("memory", out)
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
    steps: TimedSteps = 10,
    warm_up: WarmUp = 2,
    compile_layers: Compile = False,
    precision: Precision = "auto",
    target: Target = None,
    task: Tasks = "sst2",
    data: Data = None,
    epochs: Epochs = 3.0,
    tuning_steps: TuningSteps = None,
    train_rows: TrainRows = 1000,
    eval_rows: EvalRows = 500,
    eval_every: EvalEvery = None,
    seeds: Seeds = "0",
    lr: Rate = None,
    eps: Eps = None,
    interval: Interval = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Step time of every method against its bare forwards, and the cost of a target accuracy."""
    asked: Asked = locals()
    from trimtab.bench.speed import run_speed
    from trimtab.bench.stand import finish

    request = _measured(asked, warm_up=warm_up, steps=steps, iterations=10, compile=compile_layers)
    runs = _tuned(asked, task, tuning_steps, batch_size=request.batch_sizes[0])
    _quiet_libraries()
    folder, progress = begin("speed", out)
    found = run_speed(request, folder, progress, interval=interval, target=target, runs=runs)
    if not finish(*found, progress.say, as_json=as_json):
        raise typer.Exit(1)


def _measured(asked: Asked, **more: Any) -> StandRequest:
    """What the test stand is asked for."""
    from trimtab.bench.stand import StandRequest

    return StandRequest(
        methods=listed(asked["methods"]),
        batch_sizes=_numbers("--batch-size", asked["batch_size"]),
        lengths=_numbers("--length", asked["length"]),
        device=asked["device"],
        precision=asked["precision"],
        model=listed(asked["model"] or ""),
        scale=listed(asked["scale"] or ""),
        shapes=listed(asked["shapes"] or ""),
        **more,
    )


def _tuned(asked: Asked, tasks: str, steps: int | None, **more: Any) -> GlueRequest:
    """How models are tuned on tasks."""
    from trimtab.bench.glue_cell import GlueRequest
    from trimtab.errors import RequestError

    epochs, lr, eps = asked["epochs"], asked["lr"], asked["eps"]
    if steps is None and epochs <= 0:
        raise RequestError.of(
            "--epochs 0", "nothing would be tuned", "give more; --methods zero-shot alone needs no --epochs"
        )
    for name, value in (("epochs", epochs), ("lr", lr), ("eps", eps)):
        if value is not None and not math.isfinite(value):
            raise RequestError.of(f"--{name} {value}", "it is no finite number", "give one, as 1e-3")
    if eps is not None and eps <= 0:
        raise RequestError.of(
            f"--eps {eps}", "losses are compared at a distance from the weights", "give more than 0"
        )
    same = ("data", "train_rows", "eval_rows", "epochs", "eps", "interval", "eval_every")
    return GlueRequest(
        tasks=listed(tasks),
        seeds=_numbers("--seeds", asked["seeds"], seeds=True),
        steps=steps,
        learning_rate=lr,
        **{name: asked[name] for name in same},
        **more,
    )


def begin(kind: str, out: Path | None) -> tuple[Path, Quiet]:
    """Where the results go, and who tells of them."""
    from trimtab.monitor.progress import make_progress

    folder = (out or Path("runs") / f"bench-{kind}-{time.strftime('%Y%m%d-%H%M%S')}").expanduser()
    progress = make_progress("auto")
    progress.say(f"trimtab bench {kind}, into {folder}")
    return folder, progress


def _numbers(option: str, text: str, *, seeds: bool = False) -> tuple[int, ...]:
    from trimtab.errors import RequestError

    parts = listed(text)
    if not parts or not all(
        part.isdecimal() and (int(part) < 2**64 if seeds else int(part) > 0) for part in parts
    ):
        why, example = "it takes whole numbers above 0, separated by commas", "8,16"
        if seeds:
            why, example = "seeds are whole numbers of 64 bits, separated by commas", "0,1,2"
        raise RequestError.of(f"{option} {text}", why, f"write {option} {example}")
    return tuple(dict.fromkeys(map(int, parts)))


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _quiet_libraries() -> None:
    """One progress display is enough: ours."""
    # Read by the datasets library when it is imported, which is only where something comes from the hub.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
