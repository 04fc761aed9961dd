"""The ways of tuning that the benchmark compares, each with its usual learning rate, and one loop for all of them.

All methods see the same batches and the same objective; zeroth-order ones compare losses, first-order ones take its
gradient with AdamW. Nothing here evaluates or keeps weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch

from trimtab.bench.evaluate import Layout
from trimtab.config.schema import Config, LoraSettings
from trimtab.data.tasks import Question, Task
from trimtab.errors import RequestError, TrimtabError
from trimtab.placement import PlacementPlan, own_stream, prepare_process
from trimtab.recipes.planning import plan_run
from trimtab.zeroth.batches import BatchStream
from trimtab.zeroth.objective import Example, candidate_scores, example_losses
from trimtab.zeroth.optimizer import ZerothOrder
from trimtab.zeroth.settings import ZerothSettings

Family = Literal["none", "first", "zeroth"]
DEFAULT_INTERVAL = 50
LORA_RANK, LORA_ALPHA, LORA_TARGETS = 8, 16, "attention"
WARM_UP = 0.06
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of tuning."""

    name: str
    family: Family
    lora: bool = False
    rule: Literal["mezo", "dizo", "fzoo", ""] = ""
    learning_rate: float = 0.0
    eps: float | None = None
    about: str = ""


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(name="zero-shot", family="none", about="the model as it is"),
        Method(name="full", family="first", learning_rate=1e-5, about="AdamW on all weights"),
        Method(name="lora", family="first", lora=True, learning_rate=2e-4, about="AdamW on LoRA"),
        Method(name="mezo", family="zeroth", rule="mezo", learning_rate=1e-6, eps=1e-3, about="all weights"),
        Method(name="dizo", family="zeroth", rule="dizo", learning_rate=1e-6, eps=1e-3, about="all weights"),
        Method(name="fzoo", family="zeroth", rule="fzoo", learning_rate=5e-5, eps=1e-4, about="all weights"),
        Method(name="mezo-lora", family="zeroth", rule="mezo", lora=True, learning_rate=1e-4, eps=1e-2),
        Method(name="dizo-lora", family="zeroth", rule="dizo", lora=True, learning_rate=1e-4, eps=1e-2),
        Method(name="fzoo-lora", family="zeroth", rule="fzoo", lora=True, learning_rate=1e-3, eps=1e-2),
    )
}


def method(name: str) -> Method:
    plain = name.strip().lower().replace("_", "-")
    plain = {"zeroshot": "zero-shot", "zero": "zero-shot", "ft": "full"}.get(plain, plain)
    if plain in METHODS:
        return METHODS[plain]
    near = get_close_matches(plain, METHODS, n=2)
    raise RequestError.of(
        f"no method is called {name!r}",
        f"the methods are {', '.join(METHODS)}",
        f"did you mean {' or '.join(near)}?" if near else "name one of them, or `all`",
    )


@contextmanager
def placed(
    how: Method | None, *, model: str, device: str, precision: str, batch_size: int, max_length: int
) -> Iterator[tuple[Config, PlacementPlan]]:
    """A cell as a run of its own, planned; the process is ready for it inside. Without a method: passes as they are."""
    config = Config.model_validate(
        {
            "recipe": "sft" if how is not None and how.family == "first" else "zeroth_order",
            "model": {"name": model},
            "method": "lora" if how is not None and how.lora else "full",
            "device": device,
            "precision": precision,
            "processes": 1,
            "training": {"batch_size": batch_size},
            "data": {"max_length": max(8, max_length)},
            "zeroth": {"method": how.rule if how and how.rule else "mezo", "lanes": None if how else 1},
        }
    )
    config.lora = LoraSettings(r=LORA_RANK, alpha=LORA_ALPHA, targets=LORA_TARGETS)
    plan = plan_run(config, refuses=False).plan
    prepare_process(plan)
    with own_stream(plan):
        yield config, plan


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What one tuning run is told; all of it is kept with the result."""

    steps: int
    batch_size: int
    learning_rate: float
    eps: float | None
    seed: int
    interval: int | None = None
    """DiZO: steps between two rounds of projection."""


def batches(task: Task, questions: Sequence[Question], layout: Layout, tuning: Tuning) -> BatchStream:
    """Training batches without end: each pass over the rows in a new order that the seed decides."""
    if not questions:
        raise RequestError.of(
            f"{task.name}: no training rows", "there is nothing to tune on", "give some, or take zero-shot"
        )
    examples = [layout.encode(question) for question in questions]
    if task.train_on == "answer":
        examples = [Example(e.prompt, [e.candidates[e.label]], 0) for e in examples]
    return BatchStream(examples, min(tuning.batch_size, len(examples)), 1, tuning.seed, layout.collate)


class FirstOrder:
    """AdamW with gradient clipping, a short warm-up and a linear decay."""

    def __init__(self, model: Any, stream: BatchStream, tuning: Tuning, plan: PlacementPlan) -> None:
        self.model, self.stream, self.tuning, self.plan = model, stream, tuning, plan
        self.forwards = self.backwards = self._step = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=tuning.learning_rate, weight_decay=0.0)
        self.scaler = torch.amp.GradScaler(plan.kind, enabled=plan.scaler)

    def step(self) -> float:
        (batch,) = self.stream()
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        with torch.autocast(
            self.plan.kind, dtype=self.plan.torch_dtype, enabled=self.plan.precision != "fp32"
        ):
            scores = candidate_scores(self.model, batch)
        loss = example_losses(scores, batch.label).mean()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise TrimtabError(
                f"the loss is {value} at step {self._step + 1}\n"
                "  why: weights or activations left the range of their number format\n"
                "  change: lower --lr, or take --precision fp32"
            )
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._step += 1
        self.forwards += 1
        self.backwards += 1
        return value

    def facts(self) -> dict[str, Any]:
        return {"tuned_parameters": sum(p.numel() for p in self.parameters)}

    def _rate(self) -> float:
        warm = max(1, round(WARM_UP * self.tuning.steps))
        rising = (self._step + 1) / warm
        falling = (self.tuning.steps - self._step) / max(1, self.tuning.steps - warm + 1)
        return self.tuning.learning_rate * min(1.0, rising, falling)


class ZerothTuner:
    """MeZO, DiZO or FZOO from `trimtab.zeroth`, at a constant learning rate."""

    def __init__(self, model: Any, how: Method, stream: BatchStream, tuning: Tuning, **more: Any) -> None:
        """`more`: settings of the optimizer that a tuning run leaves as they are."""
        assert how.rule
        assert tuning.eps is not None
        interval = tuning.interval or DEFAULT_INTERVAL
        if how.rule == "dizo" and interval > tuning.steps:
            raise RequestError.of(
                f"--interval {interval}: the run has {tuning.steps} steps",
                "without a single projection DiZO is MeZO, and its figures would go by the wrong name",
                f"give at most {tuning.steps}, or tune for longer",
            )
        self.stream = stream
        self.backwards = self.rounds = 0
        self.optimizer = ZerothOrder(
            model,
            ZerothSettings(
                method=how.rule,
                learning_rate=tuning.learning_rate,
                eps=tuning.eps,
                interval=interval,
                seed=tuning.seed,
                **more,
            ),
        )

    @property
    def forwards(self) -> int:
        return self.optimizer.forwards

    def step(self) -> float:
        result = self.optimizer.step(self.stream())
        self.rounds += self.optimizer.project(self.stream) is not None
        return result.loss

    def facts(self) -> dict[str, Any]:
        return {
            "tuned_parameters": sum(t.parameter.numel() for t in self.optimizer.tuned),
            "projected_tensors": len(self.optimizer.projected),
            "projection_rounds": self.rounds,
            "skipped_steps": self.optimizer.skipped,
            "engine": self.optimizer.describe(),
        }


Tuner = FirstOrder | ZerothTuner
"""One step at a time (the loss before it), with counts of the passes of a batch, and facts besides the settings."""


def tuner(model: Any, how: Method, stream: BatchStream, tuning: Tuning, plan: PlacementPlan) -> Tuner:
    if how.family == "first":
        return FirstOrder(model, stream, tuning, plan)
    return ZerothTuner(model, how, stream, tuning)
