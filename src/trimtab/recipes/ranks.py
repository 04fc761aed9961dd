"""The processes of one run as a loop of our own sees them: who is who, and a yes of one that counts for all."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

from trimtab.placement import PlacementPlan
from trimtab.zeroth.peers import gather


class Ranks:
    """Joins the processes of a plan for as long as the context lasts. One process joins nothing."""

    def __init__(self, plan: PlacementPlan) -> None:
        self.count = plan.processes
        self.rank = 0

    def __enter__(self) -> Ranks:
        if self.count > 1:
            # A few numbers a step, on the CPU: gloo carries them wherever the model is.
            dist.init_process_group("gloo")
            self.rank = dist.get_rank()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.count > 1:
            dist.destroy_process_group()

    @property
    def main(self) -> bool:
        return self.rank == 0

    def any(self, answer: bool) -> bool:
        """Whether one of the processes says yes. Every process has to ask."""
        if self.count == 1:
            return answer
        return any(gather(answer))
