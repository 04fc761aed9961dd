"""Keeps NaN and infinity out of the weights: looks at every loss and gradient before the optimizer does.

Hugging Face's trainer clips the gradients before any callback sees them, and clipping by a NaN norm makes every
gradient NaN. So `GradientCheck` notes the norm of each gradient at the end of the backward pass, on the device,
to be able to say where the NaN came from; the verdict itself is one fused norm over what the optimizer is about to
use, and the losses of the step. It is taken over all processes, stays on the device, and is read a step later where
`gate.py` can keep the weights safe until then. It never mends, skips or clips anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from torch import nn

from trimtab.errors import some_of
from trimtab.monitor.gate import Gate, Verdict
from trimtab.monitor.health import CHANGE_BACKWARD, CHANGE_LOSS, Found, NonFiniteError, Standing
from trimtab.monitor.norms import Norms
from trimtab.monitor.record import Pass, Recorder
from trimtab.monitor.wording import count_of

SKIPS_ALLOWED = 16
"""With fp16 the gradient scaler skips a step with an infinite gradient and halves its scale. So many in a row take it
from where it starts, 65536, down to 1: it no longer looks for a scale, the gradient itself overflows."""
_ADAPTED = "base_model.model."
"""What PEFT puts before the names of a model."""


@dataclass(frozen=True)
class _Step:
    """A step whose verdict is on its way."""

    standing: Standing
    verdict: Verdict
    final: Norms
    noted: Norms | None
    losses: list[torch.Tensor]
    passes: list[Pass]


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
        recorder: Recorder | None = None,
        on_skip: Callable[[int], None] = lambda step: None,
        late: bool | None = None,
    ) -> None:
        """`scaler`: an fp16 gradient scaler skips bad steps by itself. `watch_forward`: also note each loss.
        `processes`: over how many processes the gradients are averaged. `stop`: whether a bad step ends the run.
        `recorder`: has the losses and batches of the step. `on_skip` is told each step that the scaler skipped.
        `late`: read verdicts a step later also off a GPU."""
        self.scaler = scaler
        self.stop = stop
        self.processes = processes
        self.skipped_in_a_row = 0
        self._model = model
        self._recorder, self._on_skip, self._late = recorder, on_skip, late
        self._trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._weights_at_begin = self._weights()
        self._gate: Gate | None = None
        self._waiting: _Step | None = None
        self._after_backward: Norms | None = None
        self._queued = False
        self._forward_results: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        for _, parameter in self._trainable:
            hook = parameter.register_post_accumulate_grad_hook(self._queue_note)
            self._hooks.append(hook)
        if watch_forward and recorder is None:
            self._hooks.append(model.register_forward_hook(self._note_forward))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waiting = None
        if self._gate is not None:
            self._gate.close()
        self.step_begins()

    def step_begins(self) -> None:
        """Forget the step before."""
        self._after_backward = None
        self._queued = False
        self._forward_results = []
        if self._recorder is not None:
            self._recorder.begin()

    def check(self, standing: Standing, optimizer: Any = None) -> bool:
        """Look at the step that the optimizer is about to make. Whether all is finite, as far as it is known by now;
        where the run ends here, raises `NonFiniteError`. Every process has to call it."""
        good, first = self.settle(), self._gate is None
        if self._gate is None:
            parameters = [p for _, p in self._trainable]
            late = False if optimizer is None else self._late
            self._gate = Gate(optimizer, parameters, scaler=self.scaler, late=late)
        final = Norms.of([(name, p.grad) for name, p in self._trainable if p.grad is not None])
        passes = self._recorder.passes if self._recorder is not None else []
        losses = [each.loss for each in passes] or self._forward_results
        bad = self._bad(final, losses)
        if bad is None:
            return good
        if self.stop:
            self._gate.shut_if(bad, scaler=self.scaler)
        self._waiting = _Step(standing, Verdict(bad), final, self._after_backward, losses, passes)
        # The first step is waited for in any case: it proves the run, and others would tell less of what is wrong.
        return good if self._gate.late and self._gate.way != "at once" and not first else self.settle()

    def settle(self) -> bool:
        """Read the verdict on the step that waits for it: whether it was good, or none waits."""
        step, self._waiting = self._waiting, None
        if step is None:
            return True
        if not step.verdict.read():
            self.skipped_in_a_row = 0
            return True
        self.skipped_in_a_row += 1
        if self.scaler:
            self._on_skip(step.standing.step)
        if not self.stop or (self.scaler and self.skipped_in_a_row < SKIPS_ALLOWED):
            return False
        if self._gate is not None:
            self._gate.undo()
        raise self._error(step)

    def growth(self) -> float | None:
        """How many times larger the trained weights are than when the run began; asks the device."""
        before, now = self._weights_at_begin.total(), self._weights().total()
        return now / before if before and math.isfinite(before) else None

    def _weights(self) -> Norms:
        return Norms.of([(name, p.detach()) for name, p in self._trainable])

    def _bad(self, final: Norms, losses: list[torch.Tensor]) -> torch.Tensor | None:
        """One number on the device: 1 where a gradient or a loss is not finite on any process; None: nothing to see."""
        faults = final.faults()
        if not self.scaler:  # which looks at gradients alone, and at those that it has scaled back
            faults += self._after_backward.faults() if self._after_backward is not None else []
            faults += [loss.isfinite().logical_not().any() for loss in losses]
        several = self.processes > 1 and dist.is_available() and dist.is_initialized()
        home = final.home or (losses[0].device if losses else None)
        if home is None and not several:
            return None
        home = home or self._trainable[0][1].device
        found = [fault.to(home, non_blocking=True) for fault in faults]
        bad = torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=home)
        bad = bad.to(torch.float32)
        if several:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bad

    def _queue_note(self, _: torch.Tensor) -> None:
        """Runs when the first gradients of a backward pass arrive: asks for a note when the last ones have."""
        if not self._queued and GradientState().sync_gradients:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._note_gradients)

    def _note_gradients(self) -> None:
        self._queued = False
        with torch.no_grad():
            self._after_backward = Norms.of([(n, p.grad) for n, p in self._trainable if p.grad is not None])

    def _note_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        """Keep the loss (with TRL's fused head, the sum of the log-probabilities): a number, still on the device."""
        if not module.training:
            return
        for key in ("loss", "log_probs"):
            value = output.get(key) if isinstance(output, dict) else getattr(output, key, None)
            if isinstance(value, torch.Tensor):
                self._forward_results.append(value.detach().sum(dtype=torch.float32))
                return

    def _error(self, step: _Step) -> NonFiniteError:
        # Before clipping, if it was noted; else (gradients sharded by FSDP) after it.
        noted = step.noted.nonfinite_names() if step.noted is not None else None
        # The backward pass goes from the last layer to the first: the trouble began at the last of these.
        names = [name.removeprefix(_ADAPTED) for name in (noted or step.final.nonfinite_names())[::-1]]
        total = len(self._trainable)
        losses = [loss.item() for loss in step.losses]
        record = Found(step.passes, losses, noted)
        bad = record.bad_passes
        what = "loss" if bad else "gradient"
        if bad:
            found = f"step {step.standing.step}: the loss is {losses[bad[0]]}"
        else:
            found = (
                f"step {step.standing.step}: the gradient of {len(names)} of {count_of(total, 'trainable parameter')}"
                f" is NaN or infinite (nearest the loss first): {some_of(names, 2)}"
            )
        if self.scaler:
            found += f" ({self.skipped_in_a_row} steps in a row, which the fp16 gradient scaler skipped)"
        weights = Norms.of(
            [(name, p.detach()) for name, p in self._model.named_parameters()]
        ).nonfinite_names()
        if weights:
            why = (
                f"the weights themselves are not finite ({count_of(len(weights), 'tensor')},"
                f" first {weights[0]}), so nothing computed from them can be"
            )
            change = "start from other weights: the model or the checkpoint is damaged (`model`, `training.resume`)"
        elif not bad and noted == [] and self.processes > 1:
            why = "the gradients of this process were finite; the fault came in with those of another process"
            change = "read the message of the process whose own gradients are not finite"
        elif bad:
            which = f" in forward pass {bad[0] + 1} of {len(losses)}" if len(losses) > 1 else ""
            why = f"the loss was {losses[bad[0]]} already{which}; a step would have put it into the weights"
            change = CHANGE_LOSS
        elif losses:
            why = "the loss was finite, so the backward pass overflowed; a step would have put NaN into the weights"
            change = CHANGE_BACKWARD
        else:
            why = "an optimizer step would have put NaN into the weights"
            change = CHANGE_BACKWARD
        return NonFiniteError(found, why, change, step.standing, what, names, record)
