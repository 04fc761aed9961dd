"""Where the processes of a run meet before the first exchange: which of them have come, by number.

torch alone would say how many are missing, after half an hour; here it is said who, while it is waited for and at the
end. Under a launcher without a meeting place of its own rank 0 opens one, which torch's process group then uses too.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError
from trimtab.hardware import Launcher, detect_launcher
from trimtab.monitor.watchdog import current
from trimtab.monitor.wording import duration
from trimtab.recipes.elastic import restart_number

if TYPE_CHECKING:
    from trimtab.config import Config
    from trimtab.placement import PlacementPlan

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_kept: list[Any] = []


def meet_the_others(config: Config, plan: PlacementPlan, say: Callable[[str], None]) -> None:
    """Of several processes: wait until all are there, before the first exchange."""
    from trimtab.rehearse.session import VARIABLE as REHEARSED

    if plan.processes == 1 or REHEARSED in os.environ:
        return
    watchdog = current()
    alive = watchdog.beat if watchdog is not None else lambda doing: None
    settings = config.monitor
    meet(detect_launcher(), settings.start_stuck_after_seconds, settings.slow_after_seconds, say, alive)


def meet(
    launcher: Launcher,
    seconds: float,
    say_every: float,
    say: Callable[[str], None],
    alive: Callable[[str], None],
) -> None:
    """Wait until every rank is there; raise an error that names those which are not. `alive` hears that it waits."""
    import torch.distributed as dist

    rank, world = launcher.rank, launcher.world_size
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get(_AGENT_STORE) != "True"
    alive("meeting the other ranks")
    try:
        store = dist.TCPStore(
            host, port, None, hosts, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError) as error:
        here = "rank 0 cannot open" if hosts else f"rank {rank} cannot reach"
        raise TrimtabError(
            f"{here} the meeting place {host}:{port} ({str(error).splitlines()[0]})\n"
            "  why: " + _why_not_met(hosts) + "\n"
            "  change: see the first error in the output of rank 0; check MASTER_ADDR, MASTER_PORT and the network"
        ) from error
    if os.environ.get(_AGENT_STORE) != "True":
        # The process group meets at the same address: it must find this place, not open its own.
        _kept.append(store)
        os.environ[_AGENT_STORE] = "True"
        os.environ.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
    place = f"trimtab/{restart_number()}/{world}"
    store.set(f"{place}/rank{rank}", f"{platform.node()} {os.getpid()}")
    began = said = time.monotonic()
    while True:
        if rank == 0 and not (missing := _missing(store, place, world)):
            store.set(f"{place}/all", "here")
            return
        if rank and store.check([f"{place}/all"]):
            return
        now = time.monotonic()
        alive("meeting the other ranks")
        if now - began > seconds:
            missing = _missing(store, place, world)
            raise TrimtabError(
                f"{_ranks(missing)} of {world} did not arrive within {duration(seconds)}; rank {rank} on "
                f"{platform.node()} waited\n"
                "  why: it ended or hangs before the first exchange: its own output tells, on its own machine\n"
                "  change: mend that, or raise monitor.start_stuck_after_seconds where loading takes so long"
            )
        if rank == 0 and now - said > say_every:
            said, say_every = now, 2 * say_every
            say(f"waiting for {_ranks(missing)} of {world} to arrive ({duration(now - began)})")
        time.sleep(0.2 if now - began < 10 else 1.0)


def _why_not_met(hosts: bool) -> str:
    return "the port is taken, or not allowed" if hosts else "rank 0 has not started there, or has ended"


def _missing(store: Any, place: str, world: int) -> list[int]:
    return [rank for rank in range(world) if not store.check([f"{place}/rank{rank}"])]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:12])) + (f" and {len(ranks) - 12} more" if len(ranks) > 12 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + shown
