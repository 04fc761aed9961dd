"""From what was found in a bad step, and from how the run went before it, to a reason and to what to change.

A file with NaN in it, a learning rate that blew the weights up, one bad row and an overflow in 16 bits all end in the
same NaN; the way out differs. Words alone: it looks at no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.monitor.blame import Blame
from trimtab.monitor.course import GROWN, LOWER
from trimtab.monitor.health import OFF

RISEN = 2.0
"""A loss so many times its best has risen."""


@dataclass(frozen=True)
class History:
    """How the run went until the bad step."""

    steps_made: int
    """Since this process began to train."""
    losses: Sequence[float]
    """As logged, finite ones alone."""
    growth: float | None
    """How many times larger the trained weights are than when the run began; None: not known."""
    learning_rate: float | None
    trained: frozenset[str] = frozenset()
    """Names of the trained tensors."""

    @property
    def diverged(self) -> str:
        """What speaks for a training that ran away; empty: nothing does."""
        signs = []
        if self.steps_made and self.growth is not None and not self.growth < GROWN:
            times = f"{self.growth:.3g} times" if math.isfinite(self.growth) else "beyond all numbers"
            signs.append(f"the trained weights have grown {times} since the run began")
        if self.losses and (best := min(self.losses)) > 0 and self.losses[-1] > RISEN * best:
            signs.append(f"the loss had risen from {best:.4g} to {self.losses[-1]:.4g}")
        return " and ".join(signs)


@dataclass(frozen=True)
class Reason:
    why: str
    change: str
    cause: str
    """`batch`, `labels`, `weights`, `diverged`, `overflow`, `loss`, `backward` or `unknown`."""


def reason(
    found: Blame, history: History, *, no_labels: bool, bad_weights: Sequence[tuple[str, int, int]]
) -> Reason:
    """Why the step was bad."""
    if found.kind == "input":
        why = f"the batch itself: `{found.where}` {found.said}"
        return Reason(why, "mend that row or leave it out of the data", "batch")
    signs = history.diverged
    if bad_weights:
        tensor, count, of = bad_weights[0]
        name = tensor.replace(".base_layer", "")  # as the file has it
        more = f" (and {len(bad_weights) - 1} more tensors)" if len(bad_weights) > 1 else ""
        if tensor in history.trained and history.steps_made and signs:
            return _diverged(signs, f"{name} has overflowed{more}", history)
        bad = f"{name} holds {count:,} of {of:,} values that are not finite{more}"
        why = f"{bad}, as it was loaded: the file is damaged"
        change = "start from other weights (`model`, `training.resume`): download or save them again"
        return Reason(why, change, "weights")
    if no_labels:
        why = "none of the batch's tokens is trained on, and the mean over no token is no number"
        change = "leave out rows without an answer, or raise `data.max_length` where the answers are cut off"
        return Reason(why, change, "labels")
    at = _at(found)
    if signs:
        return _diverged(signs, at, history)
    if found.kind == "nothing":
        why = "run once more, the same batch gave finite numbers: a race, a faulty device, or numbers near overflow"
        change = (
            f"resume from the last checkpoint; if it comes again try another device or `precision`. {OFF}"
        )
        return Reason(why, change, "unknown")
    if found.kind == "loss":
        change = f"look at the rows of this batch: labels, rewards, lengths. {OFF}"
        return Reason(at, change, "loss")
    change = {
        "fp16": "set `precision: bf16` or fp32: fp16 ends at 65504",
        "bf16": "set `precision: fp32` for this model, and look at the rows of this batch",
    }.get(found.precision, "look at the rows of this batch, and at the scale of the weights")
    if found.kind == "backward":
        change += "; try `model.attn_implementation: eager`"
    return Reason(at, f"{change}. {OFF}", "backward" if found.kind == "backward" else "overflow")


def _at(found: Blame) -> str:
    facts = (
        f" ({', '.join(filter(None, (found.precision, found.said)))})"
        if found.precision or found.said
        else ""
    )
    if found.kind == "forward":
        return f"{found.where} gave the first value that is not finite{facts}"
    if found.kind == "backward":
        return f"the forward pass was finite; going back, {found.where} gave the first gradient that is not{facts}"
    return found.said if found.kind == "loss" else ""


def _diverged(signs: str, at: str, history: History) -> Reason:
    rate = "" if history.learning_rate is None else f" with learning rate {history.learning_rate:.3g}"
    why = f"training diverged{rate}: {signs}" + (f"; {at}" if at else "")
    return Reason(why, f"{LOWER}; the model and the data may be sound", "diverged")
