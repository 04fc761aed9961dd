"""A plan whose memory is executed: steps on virtual GPUs decide what fits, where a formula would only estimate it.

Where nothing can be executed the formula's plan stands, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab.config.schema import Config
from trimtab.hardware import Hardware
from trimtab.monitor.last_words import OWN_AGENT
from trimtab.placement import MemoryShare, PlacementPlan, PlacementRequest
from trimtab.placement.sizing import GIB, DoesNotFit, PlacementError, figures, one_of, rows_told, ways_down
from trimtab.recipes.planning import Known, request_of, resolve_for
from trimtab.recipes.trial_step import STEPS, Executed, Held, Trial
from trimtab.recipes.trials import Trials

SURELY = 0.3
"""Below this share of a GPU an estimate is enough for `train`: measured peaks were 0.92 to 1.22 of it, and a run that
takes three times as much as the formula says still fits. Nothing is ever refused by the formula alone where a step can
be executed."""


@dataclass(frozen=True)
class Settling:
    """All that a plan is made and tried with."""

    config: Config
    hardware: Hardware
    known: Known
    trials: Trials
    rows: tuple[Any, ...] = ()
    """Of the data, to be executed in place of rows as long as the settings let them be."""

    @property
    def request(self) -> PlacementRequest:
        return request_of(self.config)

    def resolve(self, asked: PlacementRequest, alone: MemoryShare | None, refuses: bool) -> PlacementPlan:
        return resolve_for(self.config, self.hardware, self.known, asked, alone, refuses)

    def plan(self, *, near_only: bool = False) -> PlacementPlan:
        """The plan by what was executed. With `near_only` the formula's stands where it surely fits."""
        if (against := self._against()) is not None:
            return self._by_formula(against)
        first = self._first()
        if (decided := self._elsewhere()) is not None:
            return _estimated(first, decided)
        if near_only and _surely_fits(first):
            return self._by_formula("so far below what the GPUs have that nothing hangs on it")
        done = self._executed(first)
        if isinstance(done, str):
            return self._by_formula(done)
        plan, note = done, _contradiction(first, done)
        if self._launched:
            # How it is laid out all processes must decide alike, so each does by the formula; whether that fits, not.
            if not _fits(plan):
                raise self._too_large(plan)
        elif not _fits(plan):
            if plan.strategy not in ("single", "data_parallel"):
                raise self._too_large(plan)
            # Raises where one GPU is all there is, or all that was asked for.
            plan = self._again(self.resolve(self.request, _largest(plan), False))
        elif plan.strategy in ("split", "sharded") and self._may_stay_whole():
            plan = self._whole_if_it_fits(plan)
            note = note if plan is done else _contradiction(first, plan)
        if not _fits(plan):
            raise self._too_large(plan)
        return replace(plan, notes=(*plan.notes, note)) if note else plan

    def _first(self) -> PlacementPlan:
        """What is executed first. Where shards that nobody asked for cannot be, it is the whole model on each GPU."""
        try:
            return self.resolve(self.request, None, False)
        except PlacementError as error:
            if self.request.sharding is not None:
                raise
            try:
                return self.resolve(replace(self.request, sharding=False), None, False)
            except PlacementError:
                raise error from None

    def _against(self) -> str | None:
        """Why nothing is executed, where that is known from the start."""
        from trimtab.recipes.table import recipe_of

        if self.hardware.virtual:
            return "this is a rehearsal itself"
        if not self.hardware.gpus or self.request.device in ("cpu", "mps"):
            return "only what CUDA GPUs hold is executed"
        if recipe_of(self.config).fullest is None:
            return f"a step of recipe {self.config.recipe} cannot be executed without its data"
        return None

    @property
    def _launched(self) -> bool:
        return self.hardware.launcher.name != "none"

    def _elsewhere(self) -> str | None:
        """Which other process executes this plan, or has; what that one refuses, is refused for all."""
        if OWN_AGENT in os.environ:
            return "the process that started this one has looked whether it fits"
        if self._launched and self.hardware.launcher.local_rank > 0:
            return "the first process of this machine looks whether it fits"
        return None

    def _by_formula(self, why: str) -> PlacementPlan:
        return _estimated(self.resolve(self.request, None, True), why)

    def _again(self, plan: PlacementPlan) -> PlacementPlan:
        done = self._executed(plan)
        if isinstance(done, str):
            raise DoesNotFit.of(
                f"no step of a {plan.strategy} model could be executed",
                f"{done}; and a plan that is not divided over GPUs was executed, and does not fit",
                "lower training.batch_size or data.max_length, or set training.gradient_checkpointing=true",
            )
        return done

    def _may_stay_whole(self) -> bool:
        """Whether nobody asked for what divides the model."""
        request = self.request
        return request.model_parallel is None and request.sharding is None

    def _whole_if_it_fits(self, divided: PlacementPlan) -> PlacementPlan:
        """The formula has divided the model: whether that is needed, one GPU tells."""
        whole = replace(self.request, model_parallel=False, processes=1)
        done = self._executed(self.resolve(whole, None, False))
        if isinstance(done, str) or not _fits(done):
            return divided
        plan = self._executed(self.resolve(self.request, _largest(done), False))
        return plan if not isinstance(plan, str) and _fits(plan) else divided

    def _executed(self, plan: PlacementPlan) -> PlacementPlan | str:
        """The plan with what its steps took, or why they could not be made."""
        tried = replace(plan, device="cuda:0", launcher="none") if self._launched else plan
        trial = Trial(config=self.config, plan=tried, gpus=self.hardware.gpus, rows=self.rows)
        answer = self.trials.make(trial)
        if (executed := answer.executed) is None:
            return f"no step could be executed ({answer.failed})"
        if _may_be_squeezed(executed_shares(executed, plan.memory)):
            # What torch keeps in store it gives back where it is short: whether that is enough, that GPU shows.
            squeezed = self.trials.make(replace(trial, snug=True))
            if squeezed.executed is not None:
                answer, executed = squeezed, squeezed.executed
        memory = executed_shares(executed, plan.memory)
        why = f"executed on virtual GPUs: {STEPS} steps, {executed.rows} in a pass"
        if answer.since:
            why += f"; kept from {answer.since}, as nothing that it hangs on has changed (--fresh executes it again)"
        return replace(plan, memory=memory, reasons={**plan.reasons, "memory": why})

    def _too_large(self, plan: PlacementPlan) -> DoesNotFit:
        from trimtab.recipes.table import recipe_of

        device, share = max(plan.memory.items(), key=lambda item: item[1].needed - item[1].capacity)
        shards = self._launched and plan.strategy == "data_parallel" and self.request.sharding is None
        work = recipe_of(self.config).workload(self.config, False)
        ways = [*(["set sharding=true"] if shards else []), *ways_down(work)]
        return DoesNotFit.of(
            f"the {plan.strategy} model does not fit",
            figures(device, share) + rows_told(work, share),
            one_of([*ways, "use more or larger GPUs"]) + "; `trimtab fit` looks for what fits",
        )


def executed_shares(executed: Executed, estimated: Mapping[str, MemoryShare]) -> dict[str, MemoryShare]:
    """What was executed, device by device, beside what each has; what an engine takes beside the training stays."""
    return {
        device: _share(held, estimated[device])
        for device, held in executed.memory.items()
        if device in estimated
    }


def _share(held: Held, estimated: MemoryShare) -> MemoryShare:
    named = {kind: held.kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer", "activations")}
    return MemoryShare(
        **named,
        other=held.peak - sum(named.values()),
        pool=held.reserved - held.peak,
        overhead=held.context,
        reserved=estimated.reserved,
        capacity=estimated.capacity,
        executed=True,
    )


def _fits(plan: PlacementPlan) -> bool:
    return all(share.fits for share in plan.memory.values())


def _may_be_squeezed(memory: Mapping[str, MemoryShare]) -> bool:
    """Whether what does not fit is what the allocator keeps beside what is allocated at once."""
    crowded = [share for share in memory.values() if not share.fits]
    return bool(crowded) and all(share.needed - share.pool <= share.capacity for share in crowded)


def _largest(plan: PlacementPlan) -> MemoryShare:
    return max(plan.memory.values(), key=lambda share: share.needed)


def _surely_fits(plan: PlacementPlan) -> bool:
    return all(share.needed < SURELY * share.capacity for share in plan.memory.values())


def _estimated(plan: PlacementPlan, why: str) -> PlacementPlan:
    return replace(plan, reasons={**plan.reasons, "memory": f"estimated by formula: {why}"})


def _contradiction(estimated: PlacementPlan, executed: PlacementPlan) -> str | None:
    """What to say where formula and execution do not agree on what fits."""
    if estimated.strategy == executed.strategy and _fits(estimated) == _fits(executed):
        return None
    guess, found = (f"{_largest(plan).needed / GIB:.1f} GiB" for plan in (estimated, executed))
    if estimated.strategy != executed.strategy:
        return (
            f"the formula would have divided the model ({estimated.strategy}); executed, the whole of it fits on one "
            f"GPU ({found}): what was executed is followed"
        )
    said, shown = ("fits" if _fits(plan) else "does not fit" for plan in (estimated, executed))
    return (
        f"by the formula it {said} ({guess}); executed, it {shown} ({found}): what was executed is followed"
    )
