"""Stops a run whose loss or gradient is NaN or infinite, before the optimizer puts it into the weights.

Hugging Face's trainer clips the gradients before any callback sees them, and clipping by a NaN norm makes every
gradient NaN. So `GradientCheck` notes the norm of each gradient at the end of the backward pass, on the device,
to be able to say where the NaN came from; the verdict itself is one fused norm over what the optimizer is about to
use, and one host sync a step. It never mends, skips or clips anything.

transformers replaces a NaN loss by the running mean in its logs unless `logging_nan_inf_filter=False`: a recipe
sets that, or the loss shown is not the loss.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn

from trimtab.errors import TrimtabError, some_of
from trimtab.monitor.wording import count_of

_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SKIPS_ALLOWED = 16
"""With fp16 the gradient scaler skips a step with an infinite gradient and halves its scale. So many in a row take it
from where it starts, 65536, down to 1: it no longer looks for a scale, the gradient itself overflows."""


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


class NonFiniteError(TrimtabError):
    """The loss or the gradient was NaN or infinite; the weights are those of the last good step."""

    def __init__(
        self, found: str, why: str, change: str, standing: Standing, what: str, parameters: Sequence[str] = ()
    ) -> None:
        super().__init__(f"{found}\n  {standing.line()}\n  why: {why}\n  change: {change}")
        self.step = standing.step
        self.what = what
        """`loss`, `gradient` or `gradient norm`."""
        self.parameters = list(parameters)
        """The trainable parameters whose gradient is not finite, all of them, those nearest the loss first."""


@dataclass(frozen=True)
class _Norms:
    """The norms of named tensors, one tensor of norms for each device and type."""

    groups: list[tuple[list[str], torch.Tensor]]

    @classmethod
    def of(cls, named: Sequence[tuple[str, torch.Tensor]]) -> _Norms:
        sorted_out: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, tensor in named:
            # Of a sharded tensor each process looks at its own part.
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if local.numel() and local.dtype in _CHECKED and local.device.type != "meta":
                sorted_out[local.device, local.dtype].append((name, local))
        groups = []
        for (_, dtype), members in sorted_out.items():
            # In half precision the norm itself would overflow at 65504.
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            norms = torch._foreach_norm([tensor for _, tensor in members], 2.0, dtype=wide)
            groups.append(([name for name, _ in members], torch.stack(norms)))
        return cls(groups)

    def finite(self) -> bool:
        """Whether all are finite: one host sync, whatever the number of tensors."""
        if not self.groups:
            return True
        home = self.groups[0][1].device
        return bool(torch.stack([norms.isfinite().all().to(home) for _, norms in self.groups]).all().item())

    def nonfinite_names(self) -> list[str]:
        return [
            name
            for names, norms in self.groups
            for name, good in zip(names, norms.isfinite().tolist(), strict=True)
            if not good
        ]


class GradientCheck:
    """Watches the gradients of one model. `close()` takes its hooks off again."""

    def __init__(
        self,
        model: nn.Module,
        *,
        scaler: bool,
        watch_forward: bool = True,
        processes: int = 1,
        stop: bool = True,
    ) -> None:
        """`scaler`: an fp16 gradient scaler skips bad steps by itself. `watch_forward`: also note each loss.
        `processes`: over how many processes the gradients are averaged. `stop`: whether a bad step ends the run."""
        self.scaler = scaler
        self.stop = stop
        self.processes = processes
        self.skipped_in_a_row = 0
        self._model = model
        self._trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._after_backward: _Norms | None = None
        self._queued = False
        self._forward_results: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        for _, parameter in self._trainable:
            hook = parameter.register_post_accumulate_grad_hook(self._queue_note)
            self._hooks.append(hook)
        if watch_forward:
            self._hooks.append(model.register_forward_hook(self._note_forward))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.step_begins()

    def step_begins(self) -> None:
        """Forget the step before."""
        self._after_backward = None
        self._queued = False
        self._forward_results.clear()

    def check(self, standing: Standing) -> bool:
        """Whether all gradients that the optimizer is about to use are finite; where that ends the run, raises
        `NonFiniteError`."""
        final = _Norms.of([(name, p.grad) for name, p in self._trainable if p.grad is not None])
        if final.finite():
            self.skipped_in_a_row = 0
            return True
        self.skipped_in_a_row += 1
        if not self.stop or (self.scaler and self.skipped_in_a_row < SKIPS_ALLOWED):
            return False
        raise self._error(final, standing)

    def _queue_note(self, _: torch.Tensor) -> None:
        """Runs when the first gradients of a backward pass arrive: asks for a note when the last ones have."""
        if not self._queued and GradientState().sync_gradients:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._note_gradients)

    def _note_gradients(self) -> None:
        self._queued = False
        with torch.no_grad():
            self._after_backward = _Norms.of([(n, p.grad) for n, p in self._trainable if p.grad is not None])

    def _note_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        """Keep the loss (with TRL's fused head, the sum of the log-probabilities): a number, still on the device."""
        if not module.training:
            return
        for key in ("loss", "log_probs"):
            value = output.get(key) if isinstance(output, dict) else getattr(output, key, None)
            if isinstance(value, torch.Tensor):
                self._forward_results.append(value.detach().sum(dtype=torch.float32))
                return

    def _error(self, final: _Norms, standing: Standing) -> NonFiniteError:
        # Before clipping, if it was noted; else (gradients sharded by FSDP) after it.
        noted = self._after_backward.nonfinite_names() if self._after_backward is not None else None
        # The backward pass goes from the last layer to the first: the trouble began at the last of these.
        names = (noted or final.nonfinite_names())[::-1]
        total = len(self._trainable)
        found = (
            f"step {standing.step}: the gradient of {len(names)} of {count_of(total, 'trainable parameter')}"
            f" is NaN or infinite (nearest the loss first): {some_of(names)}"
        )
        if self.scaler:
            found += f" ({self.skipped_in_a_row} steps in a row, which the fp16 gradient scaler skipped)"
        results = [result.item() for result in self._forward_results]
        weights = _Norms.of(
            [(name, p.detach()) for name, p in self._model.named_parameters()]
        ).nonfinite_names()
        bad = [index for index, result in enumerate(results, 1) if not math.isfinite(result)]
        if weights:
            why = (
                f"the weights themselves are not finite ({count_of(len(weights), 'tensor')},"
                f" first {weights[0]}), so nothing computed from them can be"
            )
            change = "start from other weights: the model or the checkpoint is damaged (`model`, `training.resume`)"
        elif noted == [] and self.processes > 1:
            why = "the gradients of this process were finite; the fault came in with those of another process"
            change = "read the message of the process whose own gradients are not finite"
        elif bad:
            which = f" in forward pass {bad[0]} of {len(results)}" if len(results) > 1 else ""
            why = f"the loss was {results[bad[0] - 1]} already{which}; a step would have put it into the weights"
            change = _CHANGE_LOSS
        elif results:
            why = "the loss was finite, so the backward pass overflowed; a step would have put NaN into the weights"
            change = _CHANGE_BACKWARD
        else:
            why = "an optimizer step would have put NaN into the weights"
            change = _CHANGE_BACKWARD
        return NonFiniteError(found, why, change, standing, "gradient", names)


def check_logged(loss: float | None, grad_norm: float | None, standing: Standing, *, scaler: bool) -> None:
    """Look at what the trainer logged for the steps just made; raise `NonFiniteError` if it is not finite."""
    if loss is not None and not math.isfinite(loss):
        why = "a loss like this no longer says whether the model learns"
        raise NonFiniteError(f"step {standing.step}: the loss is {loss}", why, _CHANGE_LOSS, standing, "loss")
    if grad_norm is not None and not math.isfinite(grad_norm) and not scaler:
        found = f"step {standing.step}: the gradient norm is {grad_norm}"
        why = (
            "the gradients are so large that their norm overflows; clipped by such a norm they teach nothing"
        )
        raise NonFiniteError(found, why, _CHANGE_BACKWARD, standing, "gradient norm")


_OFF = "`monitor.stop_on_nonfinite: false` goes on regardless"
_CHANGE_LOSS = (
    "lower `training.learning_rate` or lengthen `training.warmup_ratio`; with `precision: fp16` try bf16 or fp32; "
    f"look at the rows of this step for ones without an answer. {_OFF}"
)
_CHANGE_BACKWARD = (
    "set `precision: bf16` (or fp32) if it is fp16; lower `training.learning_rate`; "
    f"try `model.attn_implementation: eager`. {_OFF}"
)
