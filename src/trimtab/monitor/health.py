"""What is said of a loss or a gradient that is NaN or infinite, and the error that ends the run. Looks at no tensor.

transformers replaces a NaN loss by the running mean in its logs unless `logging_nan_inf_filter=False`: a recipe
sets that, or the loss shown is not the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from trimtab.monitor.record import Pass


@dataclass(frozen=True)
class Standing:
    """Where the run stood when something was found; part of the message."""

    step: int
    learning_rate: float | None
    last_good_loss: float | None
    last_good_step: int | None

    def line(self) -> str:
        rate = "unknown" if self.learning_rate is None else f"{self.learning_rate:.3g}"
        loss = "none was logged yet"
        if self.last_good_loss is not None:
            loss = f"{self.last_good_loss:.4g} at step {self.last_good_step}"
        return f"learning rate {rate}; last good loss: {loss}"


@dataclass(frozen=True)
class Found:
    """What is known of a bad step on this process: its passes, and the gradients that it made by itself."""

    passes: list[Pass]
    losses: list[float]
    """The loss of each pass, where it was seen."""
    own_gradients: list[str] | None
    """Parameters whose gradient was bad before other processes' came in; None: not noted."""

    @property
    def bad_passes(self) -> list[int]:
        return [index for index, loss in enumerate(self.losses) if not math.isfinite(loss)]


class NonFiniteError(TrimtabError):
    """The loss or the gradient was NaN or infinite; the weights are those of the last good step."""

    def __init__(
        self,
        found: str,
        why: str,
        change: str,
        standing: Standing,
        what: str,
        parameters: Sequence[str] = (),
        record: Found | None = None,
    ) -> None:
        super().__init__(f"{found}\n  {standing.line()}\n  why: {why}\n  change: {change}")
        self.found, self.why, self.change, self.standing = found, why, change, standing
        self.step = standing.step
        self.what = what
        """`loss`, `gradient`, `gradient norm` or `logits`."""
        self.parameters = list(parameters)
        """The trainable parameters whose gradient is not finite, all of them, those nearest the loss first."""
        self.record = record
        """What the step can be looked at again by; None where nothing was kept."""


def check_logged(loss: float | None, grad_norm: float | None, standing: Standing, *, scaler: bool) -> None:
    """Look at what the trainer logged for the steps just made; raise `NonFiniteError` if it is not finite."""
    if loss is not None and not math.isfinite(loss):
        why = "a loss like this no longer says whether the model learns"
        raise NonFiniteError(f"step {standing.step}: the loss is {loss}", why, CHANGE_LOSS, standing, "loss")
    if grad_norm is not None and not math.isfinite(grad_norm) and not scaler:
        found = f"step {standing.step}: the gradient norm is {grad_norm}"
        why = (
            "the gradients are so large that their norm overflows; clipped by such a norm they teach nothing"
        )
        raise NonFiniteError(found, why, CHANGE_BACKWARD, standing, "gradient norm")


OFF = "`monitor.stop_on_nonfinite: false` goes on regardless"
CHANGE_LOSS = (
    "lower `training.learning_rate` or lengthen `training.warmup_ratio`; with `precision: fp16` try bf16 or fp32; "
    f"look at the rows of this step for ones without an answer. {OFF}"
)
CHANGE_BACKWARD = (
    "set `precision: bf16` (or fp32) if it is fp16; lower `training.learning_rate`; "
    f"try `model.attn_implementation: eager`. {OFF}"
)
