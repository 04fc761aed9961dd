"""`trimtab bench speed`: the time of a step against the bare forwards in it, and what a target accuracy costs.

The floor of a step is the forwards that it makes, of the same batch, with the weights as they are, run in the same way
(eager or captured, as many copies of the batch in one forward). The way to a target is read from the curves of the
GLUE+ runner; a target that was not reached is said to be so.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.bench.cells import INFERENCE
from trimtab.bench.glue import check_data, run_glue
from trimtab.bench.glue_cell import GlueRequest
from trimtab.bench.methods import DEFAULT_INTERVAL
from trimtab.bench.results import table
from trimtab.bench.stand import Bar, Plots, Stand, StandRequest, open_stand, run_stand
from trimtab.data.tasks import task as task_named
from trimtab.errors import RequestError
from trimtab.monitor.progress import Quiet
from trimtab.monitor.wording import size


def run_speed(
    request: StandRequest,
    out: Path,
    progress: Quiet,
    *,
    interval: int | None = None,
    target: float | None = None,
    runs: GlueRequest | None = None,
) -> tuple[Stand, bool]:
    """Time all that was asked for; the results, and whether it ran to its end.

    With a target, `runs` says how the methods are run on a task to find out what reaching it costs.
    """
    if target is not None:
        _check_target(target, request, runs)
    stand = open_stand("speed", request, out, progress.say)
    stand.header |= {"interval": interval or DEFAULT_INTERVAL, "target": target}
    stand.render = render
    whole = run_stand(stand, request, progress)
    if whole and target is not None:
        assert runs is not None
        whole = _to_target(stand, target, runs, request, progress)
    progress.end()
    return stand, whole


def _check_target(target: float, request: StandRequest, runs: GlueRequest | None) -> None:
    if not 0 < target <= 1:
        raise RequestError.of(f"--target {target}", "it is a share of right answers", "give 0 to 1, as 0.8")
    if request.shapes:
        raise RequestError.of(
            "--target with --shapes",
            "random weights answer at random, and would have to be pretrained to reach anything",
            "give --model or --scale",
        )
    if len(request.model) + len(request.scale) > 1:
        raise RequestError.of("--target with several models", "it is one model's", "give one --model")
    assert runs is not None
    for name in runs.tasks:
        check_data(runs.data, task_named(name))


def _to_target(
    stand: Stand, target: float, runs: GlueRequest, request: StandRequest, progress: Quiet
) -> bool:
    methods = tuple(name for name in stand.header["methods"] if name != INFERENCE)
    runs = replace(
        runs,
        methods=("zero-shot", *methods),
        model=request.model[0] if request.model else None,
        scale=request.scale[0] if request.scale else None,
        device=request.device,
        precision=request.precision,
    )
    progress.say(f"to {100 * target:g} % on {', '.join(runs.tasks)}")
    outcome = run_glue(runs, stand.path / "runs", progress.say, progress)
    stand.header["notes"] += [n for n in outcome.results.header["notes"] if n not in stand.header["notes"]]
    stand.more["to_target"] = [to_target(cell, target) for cell in outcome.results.cells.values()]
    stand.save()
    return not outcome.interrupted


def to_target(cell: dict[str, Any], target: float) -> dict[str, Any]:
    """What a run's curve says about a target: forwards, backwards and seconds of tuning where it was first reached."""
    kept = {"task": cell["task"], "method": cell["method"], "seed": cell["seed"], "target": target}
    if cell["status"] != "finished":
        return {**kept, "status": "failed", "reason": cell["reason"]}
    metric = "accuracy" if "accuracy" in cell["metrics"] else next(iter(cell["metrics"]))
    # A model as it is has no curve: it is there before the first step, or not at all.
    curve = cell["curve"] or [
        {"step": 0, "forwards": 0, "backwards": 0, "seconds": 0.0, "metrics": cell["metrics"]}
    ]
    scores = [point["metrics"][metric] for point in curve]
    defined = [score for score in scores if score is not None]
    kept |= {"metric": metric, "best": max(defined, default=None), "points": len(curve)}
    spent = ("step", "forwards", "backwards", "seconds")
    for point, score in zip(curve, scores, strict=True):
        if score is not None and score >= target:
            return {**kept, "status": "reached", **{name: point[name] for name in spent}}
    return {**kept, "status": "not reached", **{name: curve[-1][name] for name in spent}}


def figures(cell: dict[str, Any], interval: int) -> dict[str, float]:
    """A cell's times: medians, with DiZO's rounds shared out over the steps between them."""
    step, bare = statistics.median(cell["step_seconds"]), statistics.median(cell["bare_seconds"])
    whole, passes = step, float(cell["passes"])
    if cell["round_seconds"] is not None:
        whole += cell["round_seconds"] / interval
        passes += cell["round_passes"] / interval
    return {
        "step": step,
        "fastest": min(cell["step_seconds"]),
        "slowest": max(cell["step_seconds"]),
        "floor": bare,
        "ratio": step / bare,
        "whole": whole,
        "forwards_per_second": passes / whole,
    }


def render(stand: Stand) -> tuple[str, Plots]:
    interval = stand.header["interval"]

    def shown(cell: dict[str, Any]) -> list[str]:
        f = figures(cell, interval)
        return [
            _ms(f["step"]),
            f"{_ms(f['fastest'])}–{_ms(f['slowest'])}",
            f"{cell['passes']}{' + backward' if cell['backwards'] else ''}",
            _ms(f["floor"]),
            f"{f['ratio']:.2f}",
            _ms(f["whole"]) if cell["round_seconds"] is not None else "–",
            f"{f['forwards_per_second']:,.3g}",
            size(cell["peak_bytes"]),
        ]

    def bar(cell: dict[str, Any]) -> Bar:
        return cell["method"], figures(cell, interval)["ratio"]

    below = [
        "Medians. The floor is the step's forwards alone: the same batch, the weights as they are, run in the same "
        f"way. With rounds: DiZO's projection, shared out over the {interval} steps between two rounds.",
    ]
    below += [
        f"{cell['subject']}, {cell['method']}: {cell['idle_steps']} of {len(cell['step_seconds'])} timed steps "
        "found a slope of exactly 0 and wrote nothing."
        for cell in stand.cells
        if cell.get("idle_steps")
    ]
    if "to_target" in stand.more:
        below += _target_lines(stand)
    columns = [
        "step ms",
        "range",
        "forwards",
        "floor ms",
        "step / floor",
        "with rounds ms",
        "forwards/s",
        "peak",
    ]
    text = stand.page("Step time by method", columns, shown, below)
    return text, stand.bars("Step by its bare forwards", "×", bar, without=INFERENCE)


def _target_lines(stand: Stand) -> list[str]:
    rows, reasons = [], []
    for run in stand.more["to_target"]:
        start = [run["task"], run["method"], str(run["seed"]), run["status"]]
        if run["status"] == "failed":
            rows.append([*start, *["–"] * 4])
            reasons.append(f"- {run['task']}, {run['method']}, seed {run['seed']}: {run['reason']}")
            continue
        best = f"{run['metric']} {100 * run['best']:.1f}" if run["best"] is not None else "undefined"
        spent = [f"{run['forwards']:,}", f"{run['backwards']:,}", f"{run['seconds']:,.1f}"]
        rows.append([*start, *spent, best])
    columns = ["task", "method", "seed", "target", "forwards", "backwards", "seconds", "best"]
    return [
        "",
        f"## To {100 * stand.header['target']:g} %",
        "",
        *table(columns, rows),
        "",
        "Where the target was not reached, the figures are those of the whole run. Seconds are those of tuning, "
        "evaluations not counted. The curve is evaluated now and then, so the target may "
        "have been passed up to one interval of evaluation earlier; `trimtab report` of the folder runs/ draws the "
        "curves.",
        *(["", "Failed:", "", *reasons] if reasons else []),
    ]


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
