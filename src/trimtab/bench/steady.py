"""How fast a run trains once it is warm: from what it wrote of itself, step by step. Runs and estimates nothing.

A step's time is when its loss was logged. What stands before the timed steps (loading apart) is the warm-up; what that
took beyond so many usual steps is what compiling and first launches cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trimtab.errors import TrimtabError
from trimtab.reading import parse_json, read_text

LAST = 5
"""Steps whose mean is the loss at the end."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A run's steps in their order, each of them logged."""

    begun: float
    """When training began, in Unix seconds, as the times are."""
    times: Sequence[float]
    losses: Sequence[float | None]
    tokens: Sequence[int] | None
    """Of each step, padding left out; None where the run counts none."""
    peak: int | None
    """Bytes."""
    utilisation: Sequence[float] = ()
    """Of the device's arithmetic, 0 to 1, for the steps where that is known."""


def steps_of(run: Path) -> Steps:
    """The steps of the run in this folder."""
    lines = [parse_json(line) for line in read_text(run / "metrics.jsonl").splitlines()]
    train: list[dict[str, Any]] = [line for line in lines if line["phase"] == "train"]
    if not train:
        raise TrimtabError("the run logged no step")
    counts = [0, *(line["num_tokens"] for line in train if "num_tokens" in line)]
    losses = [line.get("loss") for line in train]
    return Steps(
        begun=train[0]["time"] - train[0]["elapsed_seconds"],
        times=[line["time"] for line in train],
        losses=[loss if isinstance(loss, int | float) else None for loss in losses],
        tokens=[int(after - before) for before, after in pairwise(counts)]
        if len(counts) == len(train) + 1
        else None,
        peak=max((line["peak_memory_bytes"] for line in train if "peak_memory_bytes" in line), default=None),
        utilisation=[line["mfu"] for line in train if isinstance(line.get("mfu"), int | float)],
    )


def figures_of(steps: Steps, warm_up: int) -> dict[str, Any]:
    """The figures of the steps after the warm-up. At least one stands before them: a step begins where one ended."""
    times = steps.times
    if len(times) < 2:
        raise TrimtabError("the run has one step: nothing is left to be timed after the first")
    warm_up = max(1, min(warm_up, len(times) - 1))
    # Where logs come a step late, the last two come together, when the run ends: they tell no time.
    end = len(times) - 2 if len(times) - warm_up > 3 else len(times)
    spans = [after - before for before, after in pairwise(times[warm_up - 1 : end])]
    usual, whole = statistics.median(spans), times[end - 1] - times[warm_up - 1]
    ends = [loss for loss in steps.losses[-LAST:] if loss is not None]
    return {
        "tokens_per_second": sum(steps.tokens[warm_up:end]) / max(whole, 1e-9) if steps.tokens else None,
        "steps_per_second": len(spans) / max(whole, 1e-9),
        "step_seconds": usual,
        "timed_steps": len(spans),
        "warm_up_seconds": max(0.0, times[warm_up - 1] - steps.begun - warm_up * usual),
        "peak_bytes": steps.peak,
        "mfu": statistics.median(steps.utilisation[warm_up:]) if steps.utilisation[warm_up:] else None,
        "last_loss": statistics.mean(ends) if ends else None,
    }


def furthest(losses: Sequence[float | None], others: Sequence[float | None]) -> float | None:
    """The largest difference of two loss curves by the second's loss at that step; None where none can be compared."""
    pairs = zip(losses, others, strict=False)
    found = [abs(one - other) / abs(other) for one, other in pairs if one is not None and other]
    return max(found, default=None)
