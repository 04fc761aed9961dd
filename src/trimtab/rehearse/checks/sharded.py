"""FullyShardedDataParallel: gradients that each rank clips by the norm of its own shard. FSDP2's tensors know their
whole norm, and a model that is not sharded has it on every rank: nothing is said of either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import mends_collectives
from trimtab.diagnose.finding import cause_at
from trimtab.rehearse import places, shield
from trimtab.rehearse.checks.base import BaseCheck, around, world_size
from trimtab.virtual import state


class Sharded(BaseCheck):
    """Looks at what torch.nn.utils is given to clip."""

    def install(self) -> None:
        around(nn.utils, "clip_grad_norm_", self._clip)
        nn.utils.clip_grad.clip_grad_norm_ = nn.utils.clip_grad_norm_

    def _clip(self, real: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        shield.call("Sharded", self._look, given)
        return real(given, *args, **kwargs)

    def _look(self, given: list[torch.Tensor]) -> None:
        if world_size() < 2 or not ({id(p) for p in given} & _shards()):
            return
        place = places.here()
        fix = mends_collectives.clip_whole(place)
        self.report(
            "ranks-disagree",
            "torch.nn.utils.clip_grad_norm_ was given the shards of a FullyShardedDataParallel model: every rank "
            "clips by the norm of its own part, each by another factor.",
            place,
            cause_at(place, "this sees only what this rank holds of each gradient"),
            fix=fix.text,
            op="clip_grad_norm_",
            once="clip",
            edits=fix.edits,
        )


def _shards() -> set[int]:
    """The parameters of which this rank holds a part only, by id."""
    here = state.machine()
    found: set[int] = set()
    for module in list(here.modules) if here is not None else ():
        strategy = getattr(module, "sharding_strategy", None)
        if (
            type(module).__name__ == "FullyShardedDataParallel"
            and getattr(strategy, "name", "") != "NO_SHARD"
        ):
            found |= {id(parameter) for parameter in module.parameters()}
    return found
