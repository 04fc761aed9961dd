"""The GLUE+ benchmark: every task with every method and seed, one cell after the other, each kept as it comes.

A cell that fails is kept as failed, with its reason, and the next one goes on. A model is loaded anew for each cell,
so that none sees what another did. No figure is taken from anywhere but a measurement.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.bench.evaluate import Layout, evaluate
from trimtab.bench.methods import (
    DEFAULT_INTERVAL,
    LORA_ALPHA,
    LORA_RANK,
    LORA_TARGETS,
    METHODS,
    Method,
    Tuning,
    batches,
    method,
    tuner,
)
from trimtab.bench.results import Results
from trimtab.bench.sources import ModelChoice, choose_model, data_reachable
from trimtab.config.schema import Config, LoraSettings, ModelSettings
from trimtab.data.tasks import TASKS, Question, Task, task
from trimtab.data.tasks.load import SAMPLE_NOTE, TaskRows, load_task
from trimtab.errors import RequestError, TrimtabError
from trimtab.hardware import probe
from trimtab.models import load_model, load_model_config, load_tokenizer
from trimtab.models.adapters import add_lora
from trimtab.monitor.progress import Figures, Quiet
from trimtab.placement import PlacementPlan, PlacementRequest, prepare_process, resolve
from trimtab.recipes.planning import plan_run

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GlueRequest:
    """What is to be measured. Everything that can change a figure is here, and is kept with the figures."""

    tasks: tuple[str, ...] = ("sst2", "cola", "mrpc", "rte")
    methods: tuple[str, ...] = ("zero-shot", "lora", "mezo", "dizo")
    seeds: tuple[int, ...] = (0,)
    model: str | None = None
    scale: str | None = None
    device: str = "auto"
    precision: str = "auto"
    data: str | None = None
    train_rows: int = 1000
    eval_rows: int = 500
    epochs: float = 3.0
    steps: int | None = None
    """Steps in place of epochs."""
    batch_size: int = 16
    max_length: int = 1024
    learning_rate: float | None = None
    eps: float | None = None
    interval: int | None = None
    eval_every: int | None = None
    """Steps between two points of the curve; None makes four."""


@dataclass(frozen=True)
class Outcome:
    results: Results
    interrupted: bool

    @property
    def failed(self) -> bool:
        return self.interrupted or bool(self.results.failures())


def run_glue(request: GlueRequest, out: Path, say: Say, progress: Quiet) -> Outcome:
    """Measure all that was asked for. What is wrong with the request itself is an error before anything is run."""
    tasks = [TASKS[name] for name in _chosen(request.tasks, list(TASKS), lambda n: task(n).name)]
    methods = [METHODS[name] for name in _chosen(request.methods, list(METHODS), lambda n: method(n).name)]
    if request.data not in (None, "hub", "sample") and not Path(str(request.data)).expanduser().is_dir():
        load_task(tasks[0], request.data)  # says what is wrong with the folder
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
    try:
        for number, one in enumerate(tasks, 1):
            bench.run_task(one, methods, f"task {number} of {len(tasks)}")
    except KeyboardInterrupt:
        progress.end()
        results.save()
        return Outcome(results, interrupted=True)
    finally:
        progress.end()
    return Outcome(results, interrupted=False)


def _chosen(names: tuple[str, ...], everything: list[str], proper: Callable[[str], str]) -> list[str]:
    if names == ("all",):
        return everything
    if not names:
        raise RequestError.of(
            "an empty list", "there is nothing to measure", f"name some of {', '.join(everything)}"
        )
    return list(dict.fromkeys(proper(name) for name in names))


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
        "titles": {t.name: t.title for t in TASKS.values()},
        "data": {},
    }


class _Bench:
    """One benchmark under way."""

    def __init__(
        self,
        request: GlueRequest,
        choice: ModelChoice,
        layout: Layout,
        results: Results,
        say: Say,
        progress: Quiet,
    ) -> None:
        self.request, self.choice, self.layout, self.results = request, choice, layout, results
        self.say, self.progress = say, progress

    def run_task(self, one: Task, methods: list[Method], place: str) -> None:
        for seed in self.request.seeds:
            # Nothing is random about a model as it is, and all seeds are evaluated on the same rows.
            due = [m for m in methods if m.family != "none" or seed == self.request.seeds[0]]
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
        if self.results.finished(one.name, how.name, seed, settings):
            self.say(f"{one.name}, {how.name}, seed {seed}: there already, kept")
            return
        self.progress.note(f"{one.name}, {how.name}, seed {seed} ({place})")
        try:
            measured = self._measure(one, how, tuning, questions)
        except Exception as error:
            # The one place where any error is caught: it becomes this cell's result, and the exit code 1.
            self._failed(one, how, seed, settings, error)
        else:
            cell = {"task": one.name, "method": how.name, "seed": seed, "status": "finished"}
            self.results.add({**cell, "settings": settings, **measured})
            self.results.save()
            figures = ", ".join(f"{name} {100 * value:.1f}" for name, value in measured["metrics"].items())
            self.say(f"{one.name}, {how.name}, seed {seed}: {figures}")
        finally:
            gc.collect()
            if self.results.header["device"].startswith("cuda"):
                torch.cuda.empty_cache()

    def _failed(
        self, one: Task, how: Method, seed: int, settings: Mapping[str, Any], error: BaseException
    ) -> None:
        self.progress.end()
        foreseen = isinstance(error, TrimtabError)
        text = " ".join(str(error).split()) or "no message"
        reason = text if foreseen else f"{type(error).__name__}: {text}"
        cell: dict[str, Any] = {
            "task": one.name,
            "method": how.name,
            "seed": seed,
            "status": "failed",
            "reason": reason,
            "settings": dict(settings),
        }
        if not foreseen:
            cell["traceback"] = traceback.format_exception(error)
        self.results.add(cell)
        self.results.save()
        self.say(f"{one.name}, {how.name}, seed {seed}: FAILED: {reason}")

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

    def _config(self, how: Method) -> Config:
        """The cell as a run of its own, for the planner. A model as it is counts as steps without gradients."""
        recipe = "sft" if how.family == "first" else "zeroth_order"
        config = Config.model_validate(
            {
                "recipe": recipe,
                "model": {"name": self.choice.name},
                "method": "lora" if how.lora else "full",
                "device": self.request.device,
                "precision": self.request.precision,
                "processes": 1,
                "training": {"batch_size": self.request.batch_size},
                "data": {"max_length": max(8, self.layout.max_length)},
                "zeroth": {"method": how.rule or "mezo", "lanes": None if how.rule else 1},
            }
        )
        config.lora = LoraSettings(r=LORA_RANK, alpha=LORA_ALPHA, targets=LORA_TARGETS)
        return config

    def _measure(
        self, one: Task, how: Method, tuning: Tuning, questions: Mapping[str, list[Question]]
    ) -> dict[str, Any]:
        """Load, tune, evaluate."""
        config = self._config(how)
        plan = plan_run(config).plan
        prepare_process(plan)
        torch.manual_seed(tuning.seed)
        model: Any = load_model(config.model, plan)
        if how.lora:
            model = add_lora(model, config.lora)
        held = {split: part for split, part in questions.items() if split != "train"}
        peak = _Peak(plan)
        result: dict[str, Any] = {
            "forwards": 0,
            "backwards": 0,
            "train_seconds": 0.0,
            "curve": [],
            "facts": {},
            "train_rows": 0,
            "eval_rows": sum(map(len, held.values())),
            "truncated": self.layout.too_long(
                [self.layout.encode(q) for part in held.values() for q in part]
            ),
            "precision": plan.precision,
            "weights": plan.weight_precision,
        }
        started = time.perf_counter()
        if how.family == "none":
            result["metrics"] = self._evaluate(model, one, held, None)
            peak.take()
        else:
            self._tune(model, one, how, tuning, questions["train"], held, plan, peak, result)
        result["score"] = _mean(result["metrics"].values())
        result["seconds"] = round(time.perf_counter() - started, 3)
        result["peak_memory_bytes"] = peak.bytes
        return result

    def _tune(
        self,
        model: Any,
        one: Task,
        how: Method,
        tuning: Tuning,
        train: list[Question],
        held: Mapping[str, list[Question]],
        plan: PlacementPlan,
        peak: _Peak,
        result: dict[str, Any],
    ) -> None:
        """Steps with an evaluation now and then. The figure that counts is the last: no best point is picked."""
        engine = tuner(model, how, batches(one, train, self.layout, tuning), tuning, plan)
        every = self.request.eval_every or max(1, math.ceil(tuning.steps / 4))
        seconds, begun = 0.0, time.perf_counter()
        figures = Figures(0, tuning.steps, 0.0)
        self.progress.begin(figures)
        for step in range(1, tuning.steps + 1):
            before = time.perf_counter()
            loss = engine.step()
            seconds += time.perf_counter() - before
            elapsed = time.perf_counter() - begun
            figures = Figures(
                step,
                tuning.steps,
                elapsed,
                left=elapsed / step * (tuning.steps - step),
                loss=loss,
                learning_rate=tuning.learning_rate,
                steps_per_second=step / seconds,
            )
            self.progress.update(figures)
            self.progress.settle(figures)
            if step % every and step < tuning.steps:
                continue
            peak.take()
            # Zeroth-order passes compute in the weights' own format, gradients under autocast; so does evaluation.
            metrics = self._evaluate(model, one, held, plan if how.family == "first" else None)
            peak.restart()
            point: dict[str, Any] = {"step": step, "forwards": engine.forwards, "backwards": engine.backwards}
            point |= {"seconds": round(seconds, 3), "loss": loss}
            result["curve"].append({**point, "score": _mean(metrics.values()), "metrics": metrics})
            result["metrics"] = metrics
        self.progress.end()
        result |= {"forwards": engine.forwards, "backwards": engine.backwards}
        result |= {"train_seconds": round(seconds, 3), "train_rows": len(train), "facts": engine.facts()}

    def _evaluate(
        self, model: Any, one: Task, held: Mapping[str, list[Question]], plan: PlacementPlan | None
    ) -> dict[str, float]:
        figures = evaluate(model, one, held, self.layout, plan, self.progress.evaluating)
        self.progress.evaluated()
        return figures


class _Peak:
    """Highest memory of the plan's devices, without what evaluation takes. Only CUDA's allocator keeps one."""

    def __init__(self, plan: PlacementPlan) -> None:
        self.devices = plan.devices if plan.kind == "cuda" else ()
        self.bytes: int | None = None
        self.restart()

    def restart(self) -> None:
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> None:
        if self.devices:
            now = sum(torch.cuda.max_memory_allocated(device) for device in self.devices)
            self.bytes = max(self.bytes or 0, now)


def _mean(values: Any) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)
