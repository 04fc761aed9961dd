"""A run that has no room for rows as long as its settings let them be: whether it has for those that its data has.

Only then the data is read before the plan stands. What is executed are its longest rows together in one batch: no batch
of the run has more tokens. One with fewer, of which more are trained on, may take more where the loss holds all logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trimtab.config.schema import Config
from trimtab.hardware import Hardware
from trimtab.placement.sizing import GIB, DoesNotFit
from trimtab.recipes.planning import Planned, plan_run
from trimtab.recipes.table import recipe_of
from trimtab.recipes.trials import Trials


def plan_by_own_rows(
    config: Config, trials: Trials, worst: DoesNotFit, hardware: Hardware | None = None
) -> Planned:
    """The plan by the rows that there are; `worst`, by those that the settings allow, where that is no other."""
    before = plan_run(config, hardware, refuses=False)
    if before.hardware.launcher.name != "none":
        raise worst  # how the model is laid out all processes decide alike, by the settings
    prepared = recipe_of(config).prepare(config, before.plan, _unheard)
    if prepared.length is None:
        raise worst
    lengths = {place: prepared.length(row) for place, row in enumerate(prepared.train)}
    most = sorted(lengths, key=lengths.__getitem__, reverse=True)[: config.training.batch_size]
    if not most or lengths[most[-1]] >= config.data.max_length:
        raise worst
    longest = lengths[most[0]]
    rows: tuple[Any, ...] = tuple(prepared.train[place] for place in most)
    shorter = config.model_copy(update={"data": config.data.model_copy(update={"max_length": longest})})
    planned = plan_run(shorter, before.hardware, before=before, trials=trials, rows=rows)
    need = max(share.needed for share in planned.plan.memory.values()) / GIB
    note = (
        f"rows of data.max_length={config.data.max_length:,} tokens would not fit; the data's longest have "
        f"{longest:,} and take {need:.1f} GiB: what the data has is followed"
    )
    return replace(planned, plan=replace(planned.plan, notes=(*planned.plan.notes, note)))


def _unheard(text: str) -> None:
    """The run itself tells of its data."""
