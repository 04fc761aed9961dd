"""Warns of a run that goes on without learning, or that runs away: from the figures that it logs, once for each kind.

It stops nothing. Thresholds are set so that healthy runs are left alone: a spike is judged by the spread of the losses
before it, nothing is judged in the first steps, and a learning rate of zero excuses a loss that stands still.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

SEVERAL = 5
"""Steps in a row after which a figure that should move is said to stand still."""
FIRST = 8
"""Logged losses whose middle is where a run began, or is now."""
WINDOW = 32
"""Logged losses that a spike is held against; half of them have to be there."""
SPREADS = 8.0
"""A spike stands so many usual deviations above the middle of the window, and"""
FACTOR = 2.0
"""is at least so many times that, and higher by half of what the loss was when the run began."""
GROWN = 10.0
"""Trained weights that are so many times what they were have been blown up: a healthy fine-tuning moves them by a
fraction of themselves."""
LOWER = (
    "lower `training.learning_rate` (ten times, to begin with), lengthen `training.warmup_ratio`, or clip harder "
    "(`training.max_grad_norm`)"
)
HOPELESS = 15.0
"""A guess among 100,000 tokens costs 11.5: a loss that stays above this, and three times the first, ran away."""
RISING = 3
"""Evaluations in a row, each worse than the one before it, and"""
WORSE = 1.05
"""the last so many times the best, until it is said."""


@dataclass(frozen=True)
class Warned:
    """One warning, in the three parts of a message."""

    kind: str
    step: int
    found: str
    why: str
    change: str

    def text(self) -> str:
        return f"warning: {self.found}\n  why: {self.why}\n  change: {self.change}"


class Course:
    """The figures of a run, in the order in which it logs them."""

    def __init__(self, growth: Callable[[], float | None] = lambda: None) -> None:
        """`growth`: how many times larger the trained weights are than at the start; asked when a warning is due."""
        self._growth = growth
        self._told: set[str] = set()
        self._start: list[float] = []
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._still: dict[str, int] = {}
        """For each figure that stands still, the steps that it has."""
        self._last_step = 0
        self._held_out: list[tuple[int, float]] = []

    def begin(self, step: int, told: set[str]) -> None:
        """A training begins after `step`; `told` was said before it was resumed."""
        self.__init__(self._growth)  # type: ignore[misc]
        self._last_step, self._told = step, set(told)

    def logged(self, step: int, values: Mapping[str, Any]) -> list[Warned]:
        """What the figures of the steps up to `step` give reason to say."""
        covers, self._last_step = max(1, step - self._last_step), step
        rate, loss, norm = (_number(values.get(name)) for name in ("learning_rate", "loss", "grad_norm"))
        learns = rate is None or rate > 0
        rewarded = "reward" in values
        equal = rewarded and _equal_rewards(values)
        found = []
        if self._lasts("rewards", equal, covers):
            found.append(_rewards(step, values, self._still["rewards"]))
        zero = norm == 0 and learns and not equal
        if self._lasts("gradients", zero, covers):
            found.append(_gradients(step, self._still["gradients"]))
        if loss is not None and not rewarded:  # a loss of GRPO is near zero by its making
            found += self._of_loss(step, loss, covers, rate, zero)
        return [self._blown_up(warned, rate) for warned in found if self._first(warned.kind)]

    def _blown_up(self, warned: Warned, rate: float | None) -> Warned:
        """Where the weights themselves ran away, that is the reason."""
        if warned.kind not in ("zero gradients", "constant loss", "rising loss", "spike"):
            return warned
        growth = self._growth()
        if growth is None or growth < GROWN:
            return warned
        shown = "" if rate is None else f" with learning rate {rate:.3g}"
        why = f"training diverged{shown}: the trained weights are {growth:.3g} times what they were"
        return replace(warned, why=why, change=LOWER)

    def evaluated(self, step: int, loss: float | None) -> list[Warned]:
        """A held-out loss."""
        if loss is None or not math.isfinite(loss):
            return []
        if not self._held_out or self._held_out[-1][0] != step:
            self._held_out.append((step, loss))
        losses = [value for _, value in self._held_out]
        tail = losses[-RISING - 1 :]
        rises = len(tail) > RISING and all(b > a for a, b in pairwise(tail))
        best_at, best = min(self._held_out, key=lambda one: one[1])
        if not rises or loss < WORSE * best or not self._first("overfitting"):
            return []
        return [
            Warned(
                "overfitting",
                step,
                f"step {step}: the held-out loss has risen {RISING} evaluations in a row: "
                f"{best:.4g} at step {best_at}, now {loss:.4g}",
                "the model learns its rows by heart and gets worse on others",
                "train for fewer steps or with more rows; `training.keep_best` keeps the best checkpoint",
            )
        ]

    def stuck_weights(self, step: int, share: float, kind: str, rate: float) -> list[Warned]:
        """So small a share of the weights changed in steps that had gradients."""
        if not self._first("rounding"):
            return []
        return [
            Warned(
                "rounding",
                step,
                f"step {step}: {100 * share:.2g} % of the trained weights changed, with gradients other than zero",
                f"an update of about the learning rate ({rate:.3g}) is below half an ulp in {kind}: it is rounded away",
                "raise `training.learning_rate`, or train an adapter (`method: lora`), whose weights are fp32",
            )
        ]

    def _of_loss(self, step: int, loss: float, covers: int, rate: float | None, zero: bool) -> list[Warned]:
        before, found = list(self._losses), []
        still = bool(before) and (rate is None or rate > 0) and math.isclose(loss, before[-1], rel_tol=1e-6)
        if (
            self._lasts("loss", still and math.isfinite(loss), covers)
            and not zero
            and "gradients" not in self._told
        ):
            found.append(
                Warned(
                    "constant loss",
                    step,
                    f"step {step}: the loss has been {loss:.6g} for {self._still['loss']} steps",
                    "batches differ and weights change, so a loss does too: it does not depend on what is trained, or "
                    "its changes are lost in rounding",
                    "look at the labels, at what is frozen, and at `training.learning_rate`",
                )
            )
        if len(before) > 2 and math.isfinite(loss):
            found += self._of_height(step, loss, before)
        if len(self._start) < FIRST and math.isfinite(loss):
            self._start.append(loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        return found

    def _of_height(self, step: int, loss: float, before: list[float]) -> list[Warned]:
        middle, start, few = median(before), self._began, median([*before[-2:], loss])
        if min(*before, loss, start) <= 0:
            return []
        # By their logarithms: the losses of single rows differ by factors, not by amounts.
        logs = [math.log(value) for value in before]
        spread = _spread(logs)
        far = math.log(loss / middle) > max(SPREADS * spread, math.log(FACTOR))
        if len(before) >= WINDOW // 2 and far and loss > middle + start / 2:
            return [
                Warned(
                    "spike",
                    step,
                    f"step {step}: the loss is {loss:.4g}, {loss / middle:.3g} times what it was in the last "
                    f"{len(before)} logs",
                    "a step that was too long, or rows that are unlike the others",
                    "look at the rows; lower `training.learning_rate`, or clip harder (`training.max_grad_norm`)",
                )
            ]
        late = median([*before[1 - FIRST :], loss])
        # The middle of a few noisy numbers is noisy itself; from one to the next, so that a trend is no noise.
        noise = 1.4826 * median(abs(b - a) for a, b in pairwise(logs)) / math.sqrt(2)
        doubt = 5 * 1.25 * noise * math.sqrt(2 / FIRST)
        slowly = len(before) >= 2 * FIRST and math.log(late / start) > max(doubt, math.log(1.5))
        recent = late if slowly else few
        if slowly or few > max(HOPELESS, 3 * self._start[0]):
            return [
                Warned(
                    "rising loss",
                    step,
                    f"step {step}: the loss is {recent:.4g}; it began with {min(start, self._start[0]):.4g}",
                    "the steps are too long: training runs away",
                    LOWER,
                )
            ]
        return []

    @property
    def _began(self) -> float:
        """The loss that the run began with: of the untouched model on what is held out, or the middle of the first."""
        untouched = [loss for step, loss in self._held_out if step == 0]
        return untouched[0] if untouched else median(self._start)

    def _lasts(self, figure: str, still: bool, covers: int) -> bool:
        """Whether the figure has stood still for several steps."""
        self._still[figure] = self._still.get(figure, 0) + covers if still else 0
        return self._still[figure] >= SEVERAL

    def _first(self, kind: str) -> bool:
        new = kind not in self._told
        self._told.add(kind)
        return new


def _equal_rewards(values: Mapping[str, Any]) -> bool:
    share, std = (_number(values.get(name)) for name in ("frac_reward_zero_std", "reward_std"))
    return share == 1 if share is not None else std == 0


def _rewards(step: int, values: Mapping[str, Any], steps: int) -> Warned:
    flat = [
        name.removeprefix("rewards/").removesuffix("/std")
        for name, value in values.items()
        if name.startswith("rewards/") and name.endswith("/std") and _number(value) == 0
    ]
    all_of = f"reward {', '.join(flat)}" if flat else "every reward"
    mean = _number(values.get("reward"))
    return Warned(
        "equal rewards",
        step,
        f"step {step}: {all_of} has given all completions of a prompt the same for {steps} steps"
        + (f" (mean {mean:.3g})" if mean is not None else ""),
        "GRPO learns from differences within a group: the advantages are zero, and so is the gradient",
        "check the reward on a few completions (metrics.jsonl has some); make the task easier or harder, or raise "
        "`grpo.num_generations` or `grpo.temperature`",
    )


def _gradients(step: int, steps: int) -> Warned:
    return Warned(
        "zero gradients",
        step,
        f"step {step}: the gradient norm has been exactly 0 for {steps} steps",
        "the loss does not depend on what is trained: nothing is learned",
        "look at the labels, at what is frozen (`lora.targets`, `method`), and at the loss",
    )


def _spread(values: list[float]) -> float:
    """The usual deviation, whatever a few of them are."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
