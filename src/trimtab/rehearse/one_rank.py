"""Where shapes only are rehearsed, one rank stands for all: a launcher starts rank 0 and nobody else.

Ranks of a data-parallel run differ in their rows; what they hold and compute has one shape. What ranks do to each other
is not rehearsed so: for that, rehearse with values.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.virtual.state import Machine


def variables(rank: int, per_node: int, world: int, port: int, run: str) -> dict[str, str]:
    """What torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(world // per_node),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"rehearsal-{run}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


_in_place = False


def go_on_as_first(count: int) -> None:
    """From now on this process is rank 0 of those that a launcher would start: it is not started anew."""
    global _in_place
    _in_place = True
    os.environ.update(variables(0, count, count, 29500, "rehearsal"))


def goes_on_as_first() -> bool:
    """Whether this process has taken the place of the first rank."""
    return _in_place


def start_only_the_first() -> None:
    """From now on torchrun (also the one inside `accelerate launch`) starts rank 0 alone, in this process's place."""
    from torch.distributed.launcher import api

    def launch(self: Any, *arguments: Any) -> dict[int, Any]:
        config, entry = self._config, self._entrypoint
        per_node = int(config.nproc_per_node)
        given = variables(0, per_node, per_node * int(config.max_nodes), 29500, str(config.run_id))
        if not isinstance(entry, str):
            os.environ.update(given)
            return {0: entry(*arguments)}
        status = subprocess.call([entry, *map(str, arguments)], env={**os.environ, **given})
        if status:
            sys.exit(status)
        return {0: None}

    api.elastic_launch.__call__ = launch  # type: ignore[method-assign]


def save_its_own_part(machine: Machine) -> None:
    """torch.distributed.checkpoint shares out what all ranks hold, and asks whether their parts make up the whole.

    Of the others, which hold what this one holds, nothing is there to see: this one writes its own part.
    """
    from trimtab.virtual import imports

    name = "torch.distributed.checkpoint.default_planner"

    def change(_: Any) -> None:
        module: Any = sys.modules[name]
        validated, shared_out = module._validate_global_plan, module.dedup_save_plans

        @functools.wraps(validated)
        def validate(*args: Any) -> Any:
            # Asked of nothing: it warns of each tensor whose other parts it misses.
            return validated([], SimpleNamespace(state_dict_metadata={}))

        @functools.wraps(shared_out)
        def dedup(plans: Any, save_to_lowest_rank: bool = False) -> Any:
            return shared_out(plans, True)

        module._validate_global_plan, module.dedup_save_plans = validate, dedup

    imports.when_imported(machine, machine.undo, {name: change})
