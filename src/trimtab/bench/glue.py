"""The GLUE+ benchmark: every task with every method and seed, one cell after the other, each kept as it comes.

A cell that fails is kept as failed, with its reason, and the next one goes on. A model is loaded anew for each cell,
so that none sees what another did. No figure is taken from anywhere but a measurement.
"""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from trimtab import __version__
from trimtab.bench.evaluate import Layout
from trimtab.bench.glue_cell import GlueCell, GlueRequest
from trimtab.bench.methods import DEFAULT_INTERVAL, LORA_RANK, METHODS, Method, Tuning, method
from trimtab.bench.results import Results, reason_of
from trimtab.bench.sources import ModelChoice, choose_model, data_reachable
from trimtab.config.schema import ModelSettings
from trimtab.data.tasks import TASKS, Question, Task, task
from trimtab.data.tasks.load import SAMPLE_NOTE, TaskRows, load_task
from trimtab.errors import RequestError, TrimtabError
from trimtab.hardware import probe
from trimtab.models import load_model_config, load_tokenizer
from trimtab.monitor.progress import Quiet
from trimtab.placement import PlacementPlan, PlacementRequest, resolve

Say = Callable[[str], None]
Named = TypeVar("Named", Task, Method)


@dataclass(frozen=True)
class Outcome:
    results: Results
    interrupted: bool
    unchecked: bool = False
    """Whether finished cells were kept whose rows cannot be read any more."""

    @property
    def failed(self) -> bool:
        return self.interrupted or self.unchecked or bool(self.results.failures())


def run_glue(request: GlueRequest, out: Path, say: Say, progress: Quiet) -> Outcome:
    """Measure all that was asked for. What is wrong with the request itself is an error before anything is run."""
    tasks = _chosen("--datasets", request.tasks, TASKS, task)
    methods = _chosen("--methods", request.methods, METHODS, method)
    check_data(request.data, tasks[0])
    # What the machine cannot give is refused before anything is looked for.
    hardware = probe()
    placed = resolve(
        PlacementRequest(device=request.device, precision=request.precision, processes=1), hardware
    )
    choice = choose_model(request.model, request.scale)
    if choice.note:
        say(choice.note)
    settings = ModelSettings(name=choice.name)
    tokenizer = load_tokenizer(settings)
    longest = getattr(load_model_config(settings).get_text_config(), "max_position_embeddings", None)
    layout = Layout(tokenizer, request.batch_size, min(request.max_length, longest or request.max_length))
    header = _header(choice, placed)
    results = Results.open(out, header)
    bench = _Bench(request, choice, layout, results, say, progress)
    for one in tasks:
        bench.check(one, methods)
    try:
        for number, one in enumerate(tasks, 1):
            bench.run_task(one, methods, f"task {number} of {len(tasks)}")
    except KeyboardInterrupt:
        progress.end()
        results.save()
        return Outcome(results, interrupted=True)
    finally:
        progress.end()
    results.header["whole"] = True
    results.save()
    return Outcome(results, interrupted=False, unchecked=bench.unchecked)


def check_data(data: str | None, one: Task) -> None:
    """A folder that is not there is the request's fault, not that of each task."""
    if data not in (None, "hub", "sample") and not Path(str(data)).expanduser().is_dir():
        load_task(one, data)  # says what is wrong with the folder


def _chosen(
    option: str, names: tuple[str, ...], everything: Mapping[str, Named], named: Callable[[str], Named]
) -> list[Named]:
    if names == ("all",):
        return list(everything.values())
    if not names:
        raise RequestError.of(
            f"{option}: an empty list",
            "there is nothing to measure",
            f"name some of {', '.join(everything)}, or all",
        )
    return list({found.name: found for found in map(named, names)}.values())


def _header(choice: ModelChoice, placed: PlacementPlan) -> dict[str, Any]:
    return {
        "benchmark": "glue+",
        "trimtab": __version__,
        "torch": str(torch.__version__),
        "model": choice.name,
        "model_asked": choice.asked,
        "model_shown": choice.shown,
        "notes": [choice.note] if choice.note else [],
        "device": placed.device,
        "device_reason": placed.reasons["device"],
        "whole": False,
        "titles": {t.name: t.title for t in TASKS.values()},
        "data": {},
    }


@dataclass
class _Bench:
    """One benchmark under way."""

    request: GlueRequest
    choice: ModelChoice
    layout: Layout
    results: Results
    say: Say
    progress: Quiet
    unchecked: bool = False

    def check(self, one: Task, methods: list[Method]) -> None:
        """A finished cell that was made with other settings is told before anything is run."""
        for seed in self.request.seeds:
            there = [m for m in self._due(methods, seed) if self.results.has(one.name, m.name, seed)]
            if not there:
                continue
            try:
                rows = self._rows(one, seed)
            except (TrimtabError, OSError):
                return  # told when its turn comes
            for how in there:
                tuning = self._tuning(how, seed, len(rows.splits["train"]))
                self.results.finished(one.name, how.name, seed, self._settings(one, how, tuning, rows))

    def _due(self, methods: list[Method], seed: int) -> list[Method]:
        """Nothing is random about a model as it is, and all seeds are evaluated on the same rows."""
        return [m for m in methods if m.family != "none" or seed == self.request.seeds[0]]

    def run_task(self, one: Task, methods: list[Method], place: str) -> None:
        for seed in self.request.seeds:
            due = self._due(methods, seed)
            try:
                rows = self._rows(one, seed)
                questions = {s: [one.question(row) for row in part] for s, part in rows.splits.items()}
            except (TrimtabError, OSError) as error:
                for how in due:
                    self._failed(one, how, seed, {}, error)
                continue
            for how in due:
                self._cell(one, how, seed, rows, questions, place)

    def _rows(self, one: Task, seed: int) -> TaskRows:
        request = self.request
        rows = load_task(
            one,
            request.data,
            train_rows=request.train_rows,
            eval_rows=request.eval_rows,
            seed=seed,
            hub=lambda: data_reachable(one),
        )
        data, notes = self.results.header["data"], self.results.header["notes"]
        if rows.origin == "sample":
            found = f"{one.hub} is not on this machine and the hub cannot be reached: " * (
                request.data is None
            )
            note = f"{found}running on the shipped sample, {SAMPLE_NOTE}"
            if note not in notes:
                self.say(note)
                notes.append(note)
        data[one.name] = {
            "origin": rows.origin,
            "source": rows.source,
            "rows": rows.found,
            "used": {split: len(part) for split, part in rows.splits.items()},
        }
        return rows

    def _cell(
        self,
        one: Task,
        how: Method,
        seed: int,
        rows: TaskRows,
        questions: Mapping[str, list[Question]],
        place: str,
    ) -> None:
        tuning = self._tuning(how, seed, len(questions["train"]))
        settings = self._settings(one, how, tuning, rows)
        name = f"{one.name}, {how.name}, seed {seed}"
        if self.results.finished(one.name, how.name, seed, settings):
            self.say(f"{name}: there already, kept")
            return
        self.progress.note(f"{name} ({place})")
        try:
            whole = GlueCell(one, how, tuning, self.choice.name, self.request, self.layout, self.progress)
            measured = whole.measure(questions)
        except Exception as error:
            # The one place where any error is caught: it becomes this cell's result, and the exit code 1.
            self._failed(one, how, seed, settings, error)
        else:
            self._keep(one, how, seed, {"status": "finished", "settings": settings, **measured})
            figures = ", ".join(f"{name} {100 * value:.1f}" for name, value in measured["metrics"].items())
            self.say(f"{name}: {figures}")
        finally:
            gc.collect()
            if self.results.header["device"].startswith("cuda"):
                torch.cuda.empty_cache()

    def _failed(
        self, one: Task, how: Method, seed: int, settings: Mapping[str, Any], error: BaseException
    ) -> None:
        self.progress.end()
        name = f"{one.name}, {how.name}, seed {seed}"
        if self.results.has(one.name, how.name, seed):
            # Only rows that cannot be read bring a finished cell here. What was measured is never thrown away.
            self.unchecked = True
            self.say(f"{name}: there already, kept, but not checked: {' '.join(str(error).split())}")
            return
        cell = {"status": "failed", "reason": reason_of(error), "settings": dict(settings)}
        if not isinstance(error, TrimtabError):
            cell["traceback"] = traceback.format_exception(error)
        self._keep(one, how, seed, cell)
        self.say(f"{name}: FAILED: {cell['reason']}")

    def _keep(self, one: Task, how: Method, seed: int, cell: Mapping[str, Any]) -> None:
        self.results.add({"task": one.name, "method": how.name, "seed": seed, **cell})
        self.results.save()

    def _tuning(self, how: Method, seed: int, rows: int) -> Tuning:
        request = self.request
        size = min(request.batch_size, rows)
        steps = request.steps or max(1, math.ceil(request.epochs * rows / max(1, size)))
        if how.family == "none":
            return Tuning(steps=0, batch_size=request.batch_size, learning_rate=0.0, eps=None, seed=seed)
        interval = None
        if how.rule == "dizo":
            # A run shorter than the usual interval gets its one round at the end: without any it would be MeZO.
            interval = request.interval or min(DEFAULT_INTERVAL, steps)
        return Tuning(
            steps=steps,
            batch_size=size,
            learning_rate=request.learning_rate if request.learning_rate is not None else how.learning_rate,
            eps=(request.eps if request.eps is not None else how.eps) if how.family == "zeroth" else None,
            seed=seed,
            interval=interval,
        )

    def _settings(self, one: Task, how: Method, tuning: Tuning, rows: TaskRows) -> dict[str, Any]:
        """All that decides a cell's figures; a cell made with other values is not taken for this one."""
        return {
            "task": one.name,
            "method": how.name,
            **asdict(tuning),
            "lora_rank": LORA_RANK if how.lora else None,
            "max_length": self.layout.max_length,
            "precision": self.request.precision,
            "device": self.results.header["device"],
            "train_rows": len(rows.splits["train"]) if how.family != "none" else None,
            "eval_rows": {s: len(rows.splits[s]) for s in rows.evaluated},
            "data": rows.source,
        }
