"""One cell of the GLUE+ benchmark: load a model anew, tune it by one method on one task, evaluate it as it goes.

Takes every figure by measurement and keeps none of its own: what to measure and where it goes is `bench.glue`'s.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.bench.evaluate import Layout, evaluate, laid_out
from trimtab.bench.methods import Method, Tuning, batches, placed, tuner
from trimtab.data.tasks import Question, Task
from trimtab.models import load_model
from trimtab.models.adapters import add_lora
from trimtab.monitor.progress import Figures, Quiet
from trimtab.placement import PlacementPlan


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
class GlueCell:
    """A task and a method, with all that its measurement needs."""

    task: Task
    method: Method
    tuning: Tuning
    model: str
    request: GlueRequest
    layout: Layout
    progress: Quiet

    def measure(self, questions: Mapping[str, list[Question]]) -> dict[str, Any]:
        """Load, tune, evaluate."""
        how = self.method
        with placed(
            how if how.family != "none" else None,  # a model as it is counts as steps without gradients
            model=self.model,
            device=self.request.device,
            precision=self.request.precision,
            batch_size=self.request.batch_size,
            max_length=self.layout.max_length,
        ) as (config, plan):
            peak = _Peak(plan)
            torch.manual_seed(self.tuning.seed)
            model: Any = load_model(config.model, plan)
            if how.lora:
                model = add_lora(model, config.lora)
            peak.restart()  # what loading took for a moment is not tuning's
            held = {split: part for split, part in questions.items() if split != "train"}
            asked = [e for part in held.values() for e in laid_out(self.task, part, self.layout)]
            result: dict[str, Any] = {
                "forwards": 0,
                "backwards": 0,
                "train_seconds": 0.0,
                "curve": [],
                "facts": {},
                "train_rows": 0,
                "eval_rows": len(asked),
                "truncated": sum(e.length > self.layout.max_length for e in asked),
                "precision": plan.precision,
                "weights": plan.weight_precision,
            }
            started = time.perf_counter()
            if how.family == "none":
                result["metrics"] = self._evaluate(model, held, None)
                peak.take()
            else:
                result |= self._tuned(model, questions["train"], held, plan, peak)
            result["score"] = statistics.fmean(result["metrics"].values())
            result["seconds"] = round(time.perf_counter() - started, 3)
            result["peak_memory_bytes"] = peak.bytes
            return result

    def _tuned(
        self,
        model: Any,
        train: list[Question],
        held: Mapping[str, list[Question]],
        plan: PlacementPlan,
        peak: _Peak,
    ) -> dict[str, Any]:
        """Steps with an evaluation now and then. The figure that counts is the last: no best point is picked."""
        tuning, how = self.tuning, self.method
        engine = tuner(model, how, batches(self.task, train, self.layout, tuning), tuning, plan)
        every = self.request.eval_every or max(1, math.ceil(tuning.steps / 4))
        curve: list[dict[str, Any]] = []
        seconds, begun = 0.0, time.perf_counter()
        self.progress.begin(Figures(0, tuning.steps, 0.0))
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
                # That of a first-order method changes from step to step.
                learning_rate=tuning.learning_rate if how.family == "zeroth" else None,
                steps_per_second=step / seconds,
            )
            self.progress.update(figures)
            self.progress.settle(figures)
            if step % every and step < tuning.steps:
                continue
            peak.take()
            # Zeroth-order passes compute in the weights' own format, gradients under autocast; so does evaluation.
            metrics = self._evaluate(model, held, plan if how.family == "first" else None)
            peak.restart()
            spent = {"forwards": engine.forwards, "backwards": engine.backwards}
            point = {"step": step, **spent, "seconds": round(seconds, 3), "loss": loss}
            curve.append({**point, "score": statistics.fmean(metrics.values()), "metrics": metrics})
        self.progress.end()
        found = {"train_seconds": round(seconds, 3), "train_rows": len(train), "metrics": metrics}
        return {**spent, **found, "curve": curve, "facts": engine.facts()}

    def _evaluate(
        self, model: Any, held: Mapping[str, list[Question]], plan: PlacementPlan | None
    ) -> dict[str, float]:
        figures = evaluate(model, self.task, held, self.layout, plan, self.progress.evaluating)
        self.progress.evaluated()
        return figures


class _Peak:
    """Highest memory of the plan's devices while tuning, evaluation left out. Only CUDA's allocator keeps one."""

    def __init__(self, plan: PlacementPlan) -> None:
        self.devices = plan.devices if plan.kind == "cuda" else ()
        self.bytes: int | None = None
        # Workspaces that the libraries keep from earlier cells of this process are not this one's.
        self.base = sum(torch.cuda.memory_allocated(device) for device in self.devices)
        self.restart()

    def restart(self) -> None:
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)

    def take(self) -> None:
        if self.devices:
            now = sum(torch.cuda.max_memory_allocated(device) for device in self.devices)
            self.bytes = max(self.bytes or 0, now - self.base)
