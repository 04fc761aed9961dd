"""Zeroth-order fine-tuning: MeZO, DiZO and FZOO behind one class, for anybody's training loop.

It reads losses, never gradients; weights change only in `step`, `settle` and `project`. It neither loads nor places a
model, and prints nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import RequestError, TrimtabError
from trimtab.zeroth.dizo import Round
from trimtab.zeroth.lanes import LaneModules, evaluating, lanes_by_default
from trimtab.zeroth.losses import mean_losses
from trimtab.zeroth.parameters import Tuned, projected_parameters, tuned_parameters
from trimtab.zeroth.peers import on_several_ranks, own_rank
from trimtab.zeroth.settings import ZerothSettings, scheduled_rate
from trimtab.zeroth.steps import apply_round, step_lanes, step_shrink, step_slopes, step_update
from trimtab.zeroth.sweep import Change, Directions, Ratios, Sweep, by_kernels, fp32, shapes_alone
from trimtab.zeroth.trajectory import TrajectoryWriter, make_header

LossFunction = Callable[[nn.Module, Any, int], Tensor]
"""(model, batch, lanes) -> [lanes, examples]: the batch's rows repeated lane after lane, a loss for each example."""


class NotFinite(TrimtabError):
    """A loss was not a finite number. The weights are those of the step before."""

    on_all_ranks = False
    """Whether every rank raises it, of the losses that they have exchanged."""


@dataclass(frozen=True)
class StepResult:
    """What a step saw and did."""

    step: int
    loss: float
    """The mean of the lanes."""
    losses: tuple[float, ...]
    """mezo, dizo: plus and minus; fzoo: unperturbed, then each query."""
    coefficients: tuple[float, ...]
    """The slope along each direction, before the learning rate; empty where the step was skipped."""
    learning_rate: float
    forwards: int

    @property
    def skipped(self) -> bool:
        return not self.coefficients


@dataclass(frozen=True)
class ProjectionResult:
    """What a projection round found."""

    step: int
    ratios: dict[str, float]
    """For each projected tensor, its new distance from the start by its old one."""
    losses: tuple[tuple[float, float], ...]
    forwards: int


class ZerothOrder:
    """A zeroth-order optimizer over every parameter of a model that requires a gradient.

        from trimtab.zeroth import ZerothOrder, ZerothSettings, build_batch

        optimizer = ZerothOrder(model, ZerothSettings(method="dizo", learning_rate=1e-6, eps=1e-3, seed=1))
        print(*optimizer.describe(), sep="\\n")
        optimizer.record("run/trajectory.bin")            # a few bytes a step; enough to rebuild the weights
        for examples in loader:
            result = optimizer.step([build_batch(examples, pad_id, max_length=512)])
            if optimizer.due():                           # DiZO: every `interval` steps
                optimizer.project(lambda: [build_batch(next(more), pad_id, max_length=512)])
            print(result.step, result.loss)

    A step's batch is a list of micro-batches, the same list on every rank; rank r of W computes those at r, r + W, …
    and the ranks exchange their losses, nothing else. `loss_fn` makes any other objective: it is given the model, a
    micro-batch and a number of lanes, and returns [lanes, examples].
    """

    def __init__(
        self, model: nn.Module, settings: ZerothSettings, loss_fn: LossFunction | None = None
    ) -> None:
        self.model, self.settings = model, settings
        self.tuned = tuned_parameters(model)
        self.projected: list[Tuned] = []
        if settings.method == "dizo":
            self.projected = projected_parameters(self.tuned, settings.projection_roles)
        shapes = shapes_alone(model.parameters())
        self._sweep = Sweep(self.tuned, settings.rounding == "stochastic", shapes)
        self.anchors = {t.index: t.parameter.detach().clone() for t in self.projected}
        self.step_number = 0
        self.forwards = 0
        self.skipped = 0
        self._rounds = 0
        self._loss_fn = loss_fn or _candidate_losses
        self._modules = LaneModules(model, self.tuned, self._sweep)
        self._trajectory: TrajectoryWriter | None = None
        lanes, self._lanes_reason = settings.lanes, "asked for"
        if lanes is None:
            lanes, self._lanes_reason = lanes_by_default(model, self.tuned, settings.passes)
        self.lanes = min(lanes, settings.passes)
        self._passes_reason = ""
        self.plain_in_rehearsal = ""
        """On a virtual GPU: why passes are not captured here that a real one may capture."""
        self._owed: tuple[Directions, float] | None = None
        self._captured: Any = self._capture()

    def describe(self) -> list[str]:
        """What it will do, in lines to print."""
        s = self.settings
        elements = sum(t.parameter.numel() for t in self.tuned)
        lines = [
            f"{s.method}: {len(self.tuned)} tensors tuned, {elements:,} elements, seed {s.seed}",
            f"{s.passes} passes a step, {self.lanes} in one forward ({self._lanes_reason})",
        ]
        if self._passes_reason:
            lines.append(self._passes_reason)
        narrow = sorted({str(t.parameter.dtype) for t in self.tuned if t.parameter.dtype.itemsize < 4})
        if narrow and s.rounding == "nearest":
            lines.append(
                f"tuned weights in {', '.join(narrow)}: a change below half a unit in the last place is rounded away "
                "(in bf16 1/512 of a weight); rounding: stochastic and fp32 keep it"
            )
        elif narrow:
            lines.append(
                f"tuned weights in {', '.join(narrow)}, rounded up or down by chance, right in the mean"
            )
        if self.projected:
            fused = sum("_" in t.role for t in self.projected)
            note = f", {fused} of them fused with other roles and projected whole" if fused else ""
            lines.append(
                f"projection: {len(self.projected)} tensors ({', '.join(s.projection_roles)}{note}), every "
                f"{s.interval} steps, {2 * s.projection_iterations} forwards a round"
            )
        return lines

    def step(
        self, batches: Sequence[Any], learning_rate: float | None = None, *, more: bool = False
    ) -> StepResult:
        """Measure the loss of every lane over the micro-batches, and move the weights.

        `more`: another step follows before anybody looks at the weights. On a GPU the move may then wait until that
        step reads each weight anyway, which saves a sweep over all of them. Call `settle` before you look after all.
        """
        if self.due():
            raise RuntimeError("a projection round is due: call project() before the next step()")
        s, step = self.settings, self.step_number
        rate = self._rate(learning_rate)
        losses = self._measure(batches, step_lanes(s, step), f"step {step}")
        self._warn_of_uncalled()
        directions = step_update(s, step, losses, rate)
        if directions is None:
            self.skipped += 1
        else:
            self._owed = (directions, step_shrink(s, rate))
            if not (more and self._may_wait(directions)):
                self.settle()
        self.step_number += 1
        if self._trajectory is not None:
            self._trajectory.step(losses, rate)
        loss, slopes = math.fsum(losses) / len(losses), step_slopes(s, losses)
        return StepResult(step, loss, losses, slopes, rate, s.passes)

    def settle(self) -> None:
        """Write what the last step left to the next one, if anything."""
        if self._owed is not None:
            directions, shrink = self._owed
            self._sweep.update_(self.tuned, directions, shrink)
            self._owed = None

    def _may_wait(self, directions: Directions) -> bool:
        """Whether the next pass can carry this update: a captured one can, of one line that moves the weights."""
        return self._captured is not None and len(directions.queries) == 1 and directions.coefficients[0] != 0

    def due(self) -> bool:
        """Whether a projection round has to come before the next step."""
        return self.settings.method == "dizo" and self.step_number // self.settings.interval > self._rounds

    def project(self, next_batches: Callable[[], Sequence[Any]]) -> ProjectionResult | None:
        """DiZO's round, each iteration on a fresh batch; None where none is due."""
        if not self.due():
            return None
        self.settle()
        s, step = self.settings, self.step_number - 1
        search = Round(s, step, [t.index for t in self.projected])
        pairs: list[tuple[float, float]] = []
        for iteration in range(s.projection_iterations):
            change = Ratios(search.seed, search.step, self.anchors, search.lanes())
            plus, minus = self._measure(
                next_batches(), change, f"projection after step {step}, iteration {iteration + 1}"
            )
            search.observe((plus, minus))
            pairs.append((plus, minus))
        apply_round(self._sweep, self.projected, self.anchors, search)
        self._rounds += 1
        if self._trajectory is not None:
            self._trajectory.round(pairs)
        ratios = search.ratios
        return ProjectionResult(
            step, {t.name: ratios[t.index] for t in self.projected}, tuple(pairs), 2 * len(pairs)
        )

    def record(self, path: str | Path, **about: Any) -> None:
        """Keep a trajectory in this file from now on; `about` (the base model's name, …) goes into its header.

        A resumed run goes on in its old file: call it after `load_state_dict`. On several ranks, the first one writes.
        """
        if own_rank()[0] == 0:
            header = make_header(self.settings, self.tuned, self.projected, about)
            self._trajectory = TrajectoryWriter(Path(path), header, self.step_number, self._rounds)

    def recorded(self) -> tuple[int, str] | None:
        """The trajectory's length by now and its SHA-256, once all of it is on the disk; None where none is kept."""
        return self._trajectory.written() if self._trajectory is not None else None

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs beside the weights, which are settled by it."""
        self.settle()
        return {
            "step_number": self.step_number,
            "forwards": self.forwards,
            "skipped": self.skipped,
            "rounds": self._rounds,
            "anchors": {t.name: self.anchors[t.index].cpu() for t in self.projected},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = {t.name for t in self.projected}
        if set(state["anchors"]) != names:
            raise RequestError.of(
                f"the saved state has anchors for {len(state['anchors'])} tensors, this run projects {len(names)}",
                "a run goes on only with the tensors that it began with",
                "use the method, projection_roles and adapter of the saved run",
            )
        self._owed = None  # owed to weights that are those of the saved run by now
        for each in self.projected:
            self.anchors[each.index].copy_(state["anchors"][each.name])
        self.step_number, self.forwards = int(state["step_number"]), int(state["forwards"])
        self.skipped, self._rounds = int(state["skipped"]), int(state["rounds"])

    def _rate(self, given: float | None) -> float:
        s, expected = self.settings, fp32(scheduled_rate(self.settings, self.step_number))
        if s.schedule == "given" and given is None:
            raise RequestError.of(
                "step() was given no learning rate",
                "with schedule: given every step is told its own",
                "pass learning_rate, or choose another schedule",
            )
        if given is None:
            return expected
        if s.schedule != "given" and self._trajectory is not None and fp32(given) != expected:
            raise RequestError.of(
                f"step {self.step_number} was given the learning rate {given}, its schedule says {expected}",
                "the trajectory could not be replayed: it stores a rate with each step only with schedule: given",
                "set schedule: given",
            )
        return fp32(given)

    def _measure(self, batches: Sequence[Any], change: Change, what: str) -> tuple[float, ...]:
        """The loss of every lane, over all micro-batches and ranks."""
        count = len(change.coefficients) if isinstance(change, Directions) else len(change.lanes)

        def of_batch(batch: Any) -> Tensor:
            return self._lane_losses(batch, change, count)

        # Not inference_mode: in it, tensors of other kinds (virtual GPUs') refuse views of ordinary weights.
        with torch.no_grad():
            losses = mean_losses(batches, of_batch, count)
        self.forwards += count
        if not all(map(math.isfinite, losses)):
            error = NotFinite(
                f"{what}: the losses are {', '.join(f'{loss:g}' for loss in losses)}\n"
                "  why: a step along a slope that is not a number would destroy the weights; it was not made\n"
                "  change: a smaller learning_rate or eps, or bf16 in place of fp16; check the batch's labels"
            )
            error.on_all_ranks = True
            raise error
        return losses

    def _lane_losses(self, batch: Any, change: Change, count: int, *, captured: bool = True) -> Tensor:
        """[lanes, examples] of one micro-batch, on this rank."""
        parts = []
        for group in [range(i, min(i + self.lanes, count)) for i in range(0, count, self.lanes)]:
            if captured and (found := self._captured_losses(change, group, batch)) is not None:
                # The next replay of its graph writes over it.
                parts.append(found if count <= self.lanes else found.clone())
                continue
            self.settle()
            with evaluating(self.model), self._modules.running(change, group):
                losses = self._loss_fn(self.model, batch, len(group))
            if losses.dim() != 2 or losses.shape[0] != len(group):
                raise ValueError(
                    f"loss_fn returned the shape {tuple(losses.shape)} for {len(group)} lanes; it returns "
                    "[lanes, examples]"
                )
            parts.append(losses)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def losses_again(self, batch: Any) -> Tensor:
        """[lanes, examples] of a micro-batch of the step that failed, module by module, on this rank alone."""
        change = step_lanes(self.settings, self.step_number)
        with torch.no_grad():
            return self._lane_losses(batch, change, len(change.coefficients), captured=False)

    def _captured_losses(self, change: Change, lanes: Sequence[int], batch: Any) -> Tensor | None:
        """On a real GPU the pass is a CUDA graph, where the model lets itself be captured; else None.

        They hold until the next pass.
        """
        if self._captured is None:
            return None
        from trimtab.zeroth.graph import MOST_GRAPHS, NotCapturable

        try:
            if self._owed is not None and not self._captured.carries(change, lanes, batch):
                self.settle()
            losses: Tensor | None = self._captured.losses(change, lanes, batch, self._carried())
            self._owed = None
            if losses is not None:
                return losses
            text = f"more than {MOST_GRAPHS} shapes of batches: the others are not captured, and take longer"
            warnings.warn(text, stacklevel=2)  # Python shows it once
            return None
        except NotCapturable as error:
            self._captured, self._passes_reason = None, f"uncaptured: {error}"
            warnings.warn(f"passes are no longer captured, and steps take longer: {error}", stacklevel=2)
            return None

    def _carried(self) -> Any:
        """The owed update as a captured pass takes it."""
        from trimtab.zeroth.kernels import Owed

        if self._owed is None:
            return None
        line, shrink = self._owed
        return Owed(line.seed, line.step, line.queries[0], line.coefficients[0], shrink)

    def _capture(self) -> Any:
        """Passes by CUDA graphs, or None with the reason in `describe`."""
        first = self.tuned[0].parameter
        if not by_kernels(first, self._sweep.shapes):
            if first.is_cuda and hasattr(first, "payload"):
                why = "Triton is not installed here" if self._sweep.shapes else "tensors have values here"
                self._passes_reason, self.plain_in_rehearsal = f"uncaptured: {why}", why
            return None
        if self._loss_fn is not _candidate_losses:
            self._passes_reason = "uncaptured: the loss is the caller's own"
            return None
        from trimtab.zeroth.graph import captured_passes

        made, self._passes_reason = captured_passes(
            self.model, self.tuned, self.settings.compile, self._sweep.stochastic
        )
        return made

    def _warn_of_uncalled(self) -> None:
        if self.step_number or self._captured is not None:
            return
        if on_several_ranks() and not self._modules.called:
            return  # this rank had no micro-batch
        uncalled = [unit.name for unit in self._modules.units if unit.name not in self._modules.called]
        if uncalled:
            warnings.warn(
                f"{len(uncalled)} modules with tuned tensors took no part in the first step: "
                f"{', '.join(uncalled[:8])}{' …' if len(uncalled) > 8 else ''}. Their weights will only wander; "
                "freeze them with requires_grad_(False) if the task never uses them.",
                stacklevel=3,
            )


def _candidate_losses(model: nn.Module, batch: Any, lanes: int) -> Tensor:
    from trimtab.zeroth.objective import candidate_scores, example_losses

    return example_losses(candidate_scores(model, batch, lanes), batch.label)
