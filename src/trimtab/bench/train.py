"""`trimtab bench train`: what each part of a faster step brings on this machine, with this model and these rows.

Every row of the ladder is a short run of `trimtab train` itself, in a process of its own, on the user's config. A row
that the plan would not choose here is left out with the plan's reason; one that fails is told with its own, and the
rows after it go on without its part. What is measured is kept at once; the runs' weights are not kept.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.bench.ladder import FIRST, LAST, RUNGS, TITLES, start, why_not
from trimtab.bench.results import check_folder, make_folder, reason_of
from trimtab.bench.stand import Stand, finished, machine_of
from trimtab.bench.steady import figures_of, furthest, steps_of
from trimtab.bench.train_cell import Step, run_training
from trimtab.bench.train_page import render
from trimtab.config import Config
from trimtab.config.dump import dump_config
from trimtab.errors import RequestError
from trimtab.monitor.progress import Figures, Quiet
from trimtab.recipes.planning import Planned, plan_run

LEAST_ROWS = 512
"""Rows that are read at least, where the data has them: the rows of few steps alone would be all of one kind."""

Train = Callable[[list[str], Path, Step], None]
"""Runs `trimtab train WORDS`, its words into a file; told of every step."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What is to be measured."""

    config: Config
    origin: str
    steps: int = 10
    """Timed steps of every row."""
    warm_up: int = 5
    rows: tuple[str, ...] = ()
    """Names of rows; none: all. The first is always there: the others are held against it."""


def run_train(
    request: TrainRequest, out: Path, progress: Quiet, train: Train = run_training
) -> tuple[Stand, bool]:
    """Measure all rows; the results, and whether it ran to its end."""
    _check(request)
    check_folder(out, "things in it", "results go into a folder of their own")
    planned = plan_run(request.config, refuses=False)
    make_folder(out)
    stand = Stand(out, _header(request, planned), more={"left_out": []}, render=render)
    config = out / "config.yaml"
    config.write_text(dump_config(_short(request, planned)), encoding="utf-8")
    optimizer = request.config.training.optimizer
    settings = start(optimizer)
    whole = _Rows(stand, request, config, progress, train)
    try:
        whole.measure(FIRST, settings)
        for rung in RUNGS:
            if request.rows and rung.name not in request.rows:
                continue
            with_it = {**settings, rung.setting: rung.value}
            if why := why_not(rung, planned.plan, optimizer):
                stand.more["left_out"].append({"row": rung.name, "title": rung.title, "reason": why})
                stand.save()
                progress.say(f"{rung.title}: left out: {why}")
            elif whole.measure(rung.name, with_it):
                settings = with_it
        if not request.rows or LAST in request.rows:
            whole.measure(LAST, {})
    except KeyboardInterrupt:
        stand.save()
        return stand, False
    finally:
        progress.end()
    return stand, True


def _check(request: TrainRequest) -> None:
    unknown = [name for name in request.rows if name not in TITLES]
    if unknown:
        raise RequestError.of(
            f"--rows {', '.join(unknown)}", "the ladder has no such row", f"its rows are {', '.join(TITLES)}"
        )
    if request.config.recipe == "zeroth_order":
        raise RequestError.of(
            "bench train with recipe: zeroth_order",
            "its steps have no gradients, and none of the ladder's parts",
            "measure it by `trimtab bench speed`",
        )


class _Rows:
    """Runs the rows, one after the other."""

    def __init__(
        self, stand: Stand, request: TrainRequest, config: Path, progress: Quiet, train: Train
    ) -> None:
        self.stand, self.request, self.config = stand, request, config
        self.progress, self.train = progress, train
        self.began = time.monotonic()

    def measure(self, name: str, settings: Mapping[str, Any]) -> bool:
        """One row; whether it could be measured."""
        number, request = len(self.stand.cells), self.request
        each, total = request.warm_up + request.steps, len({FIRST, *(request.rows or TITLES)})
        cell: dict[str, Any] = {"row": name, "title": TITLES[name], "settings": dict(settings)}
        self.progress.note(f"{cell['title']} (row {number + 1} of at most {total})")
        at = Figures(number * each, total * each, time.monotonic() - self.began)
        self.progress.begin(at)

        def step(done: int, line: Mapping[str, Any]) -> None:
            shown = Figures(
                at.step + done,
                at.total,
                time.monotonic() - self.began,
                loss=line.get("loss"),
                tokens_per_second=line.get("tokens_per_second"),
                utilisation=line.get("mfu"),
                memory=line.get("peak_memory_bytes"),
            )
            self.progress.update(shown)

        try:
            cell |= {"status": "finished", **self._run(name, settings, step)}
        except Exception as error:
            # As in the other benchmarks: any error becomes this row's result, and the exit code 1.
            cell |= {"status": "failed", "reason": reason_of(error)}
            self.progress.say(f"{cell['title']}: FAILED: {cell['reason']}")
        self.stand.cells.append(cell)
        self.stand.save()
        return finished(cell)

    def _run(self, name: str, settings: Mapping[str, Any], step: Step) -> dict[str, Any]:
        folder = self.stand.path / "rows" / name
        make_folder(folder)
        run = folder / "run"
        words = [str(self.config), f"output_dir={json.dumps(str(run))}"]
        words += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        if trusted := self.request.config.model.trust_remote_code:
            words.append(f"model.trust_remote_code={json.dumps(trusted)}")
        started = time.time()
        try:
            self.train(words, folder, step)
            steps = steps_of(run)
        finally:
            for kept in ("metrics.jsonl", "plan.json"):
                if (run / kept).is_file():
                    shutil.move(run / kept, folder / kept)
            # Written by that run alone, in a folder of this benchmark's own.
            shutil.rmtree(run, ignore_errors=True)
        found = figures_of(steps, self.request.warm_up)
        cells = self.stand.cells
        base = cells[0]["losses"] if cells and finished(cells[0]) else steps.losses
        return {
            **found,
            "start_seconds": max(0.0, steps.begun - started),
            "loss_difference": furthest(steps.losses, base),
            "losses": list(steps.losses),
            "tokens": list(steps.tokens) if steps.tokens else None,
        }


def _short(request: TrainRequest, planned: Planned) -> Config:
    """The user's config cut to a few steps, all of them logged, with nothing evaluated, sampled or exported."""
    config, steps = request.config, request.warm_up + request.steps
    training, data = config.training, config.data
    needed = steps * training.batch_size * training.gradient_accumulation_steps * planned.plan.processes
    short: dict[str, Any] = {
        "training": training.model_copy(
            update={
                "max_steps": steps,
                "logging_steps": 1,
                "save_steps": steps,
                "save_total_limit": 1,
                "eval_steps": None,
                "keep_best": False,
                "resume": False,
                "resume_changed": None,
            }
        ),
        "data": data.model_copy(
            update={
                "eval_source": None,
                "eval_fraction": 0.0,
                "max_rows": min(data.max_rows or 2**31, max(LEAST_ROWS, 4 * needed)),
            }
        ),
        "samples": config.samples.model_copy(update={"prompts": [], "held_out": 0}),
        "export": config.export.model_copy(update={"to": None}),
        "monitor": config.monitor.model_copy(update={"progress": "none", "report_to": [], "restarts": 0}),
        "output_dir": None,
        "overwrite": False,
    }
    return config.model_copy(update=short)


def _header(request: TrainRequest, planned: Planned) -> dict[str, Any]:
    config, plan = request.config, planned.plan
    return {
        "benchmark": "train",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["trimtab", *sys.argv[1:]]),
        "trimtab": __version__,
        "torch": planned.hardware.torch_version,
        "machine": machine_of(planned.hardware, plan.device),
        "device": plan.device,
        "precision": plan.precision,
        "strategy": plan.strategy,
        "whole": False,
        "notes": [],
        "origin": request.origin,
        "model": config.model.name,
        "recipe": config.recipe,
        "rows_a_step": config.training.batch_size
        * config.training.gradient_accumulation_steps
        * plan.processes,
        "max_length": config.data.max_length,
        "steps": request.steps,
        "warm_up": request.warm_up,
    }
