"""How many rows one optimizer step takes (per device × processes × accumulated passes), shown and held to.

The number of processes is the plan's, under an outer launcher the launcher's. It changes no setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import RequestError

if TYPE_CHECKING:
    from trimtab.config.schema import Config
    from trimtab.placement.plan import PlacementPlan


class EffectiveBatch(NamedTuple):
    """The three factors of one step's rows; as text `2 × 8 × 32 = 512`."""

    per_device: int
    processes: int
    accumulation: int

    @property
    def rows(self) -> int:
        return self.per_device * self.processes * self.accumulation

    def __str__(self) -> str:
        return f"{self.per_device} × {self.processes} × {self.accumulation} = {self.rows}"


def effective_batch(config: Config, plan: PlacementPlan) -> EffectiveBatch:
    """What a step of this plan takes. A model that is split over GPUs is one process, and takes one batch."""
    training = config.training
    return EffectiveBatch(training.batch_size, plan.processes, training.gradient_accumulation_steps)


def check_effective_batch(config: Config, plan: PlacementPlan) -> None:
    """Refuse a plan whose step has other than `training.effective_batch_size` rows, with the ways to make it so."""
    wanted = config.training.effective_batch_size
    batch = effective_batch(config, plan)
    if wanted is None or batch.rows == wanted:
        return
    raise RequestError.of(
        f"training.effective_batch_size={wanted}, but a step takes {batch} rows",
        f"that is training.batch_size {batch.per_device} × {batch.processes} process{'es' * (batch.processes > 1)} × "
        f"training.gradient_accumulation_steps {batch.accumulation}",
        _ways_out(wanted, batch),
    )


def _ways_out(wanted: int, batch: EffectiveBatch) -> str:
    """Every single setting that makes it right; where none does, the nearest sizes that these processes can make."""
    per_device, processes, accumulation = batch
    ways = []
    if wanted % (per_device * processes) == 0:
        ways.append(f"training.gradient_accumulation_steps={wanted // (per_device * processes)}")
    if wanted % (processes * accumulation) == 0:
        ways.append(f"training.batch_size={wanted // (processes * accumulation)}")
    if wanted % (per_device * accumulation) == 0:
        count = wanted // (per_device * accumulation)
        ways.append(f"start {count} process{'es' * (count > 1)} (processes={count}, or by the launcher)")
    if not any(way.startswith("training") for way in ways):
        each = per_device * processes
        below = wanted // each * each
        sizes = [size for size in (below, below + each) if size]
        ways += [
            f"training.effective_batch_size={size} with training.gradient_accumulation_steps={size // each}"
            for size in sizes
        ]
    return "set " + ", or ".join(ways) if not ways[0].startswith("start") else ", or set ".join(ways)
