"""What another end means for a run that goes on: never before the step reached; and another learning rate from here on
where the schedule is stretched over the whole run. Only tells."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from trimtab.config.schema import Config

_STRETCHED = ("linear", "cosine", "polynomial")


def step_reached(checkpoint: Path) -> int:
    """The step that a checkpoint was saved at."""
    state = _state(checkpoint)
    reached = state.get("global_step", state.get("progress", {}).get("step"))
    if reached is None:
        number = checkpoint.name.rpartition("-")[2]
        reached = number if number.isdecimal() else 0
    return int(reached)


def length_change(checkpoint: Path, was: Config, now: Config) -> tuple[str | None, list[str]]:
    """Why the new end is refused, or what is to be said of it."""
    step, state = step_reached(checkpoint), _state(checkpoint)
    wanted, epoch = now.training.max_steps, state.get("epoch")
    if wanted is not None and wanted < step:
        return f"(step {step} is reached already)", []
    if wanted is None and epoch is not None and now.training.epochs < epoch - 1e-6:
        return f"({epoch:g} epochs are done already)", []
    schedule = now.training.lr_scheduler
    by_ratio = now.training.warmup_steps is None and now.training.warmup_ratio > 0
    stretched = schedule in _STRETCHED or (schedule == "constant_with_warmup" and by_ratio)
    if now.recipe == "zeroth_order" and stretched:
        why = f"(its trajectory is replayed by one schedule, and `{schedule}` ends where the run does)"
        return why, []
    told = f"the run ends at {_end(now)} instead of {_end(was)}"
    if not stretched:
        return None, [told]
    old, new = _total(was, was, state), _total(now, was, state)
    lines = [
        f"{told}: the schedule `{schedule}` is stretched over the whole run, so the learning rate changes with it"
    ]
    if old is not None and new is not None:
        before, after = (_rate(now, step, total) for total in (old, new))
        lines[0] += (
            f": at step {step} of {new} it is {after:.3g}, and was {before:.3g} at step {step} of {old}"
        )
    return None, lines


def _end(config: Config) -> str:
    training = config.training
    return f"step {training.max_steps}" if training.max_steps is not None else f"epoch {training.epochs:g}"


def _total(config: Config, was: Config, state: dict[str, Any]) -> int | None:
    """Steps of the whole run; by epochs as many for each as the earlier ones had."""
    if config.training.max_steps is not None:
        return config.training.max_steps
    if was.training.max_steps is None:
        planned = state.get("max_steps")
        return math.ceil(planned * config.training.epochs / was.training.epochs) if planned else None
    epoch = state.get("epoch")
    return math.ceil(config.training.epochs * state["global_step"] / epoch) if epoch else None


def _rate(config: Config, step: int, total: int) -> float:
    """The learning rate of a step, by the very schedule that trains."""
    import torch
    from transformers import get_scheduler

    training = config.training
    warmup = (
        training.warmup_steps
        if training.warmup_steps is not None
        else math.ceil(training.warmup_ratio * total)
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    schedule = get_scheduler(
        training.lr_scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=total
    )
    return float(training.learning_rate * schedule.lr_lambdas[0](step))


def _state(checkpoint: Path) -> dict[str, Any]:
    for name in ("trainer_state.json", "state.json"):
        try:
            found = json.loads((checkpoint / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}
