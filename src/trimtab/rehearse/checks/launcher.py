"""A process group that waits for ranks that nobody started: rank variables left over from an earlier launch.

The process says in the rehearsal's folder that it is waiting. If no process that could be a peer exists, the fault
is reported and the group is made with this process alone, so that the rehearsal goes on. Where a peer was there and
has failed, its error is the fault: this process ends, and says nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import agreement, one_rank, places, shield
from trimtab.rehearse.checks.base import BaseCheck
from trimtab.rehearse.session import read_lines, stands_file
from trimtab.rehearse.system import processes

_NAMES = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
_PATIENCE_ALONE = 3.0
_PATIENCE_WITH_OTHERS = 60.0


class StaleLauncher(BaseCheck):
    """Looks at every rendezvous before it is entered."""

    def install(self) -> None:
        self._looking, self._begun = False, time.time()
        self._read: Place | None = None
        self._set: Place | None = None
        self._watch_environment()
        if dist.is_available():
            self._watch_rendezvous()

    def _watch_environment(self) -> None:
        kind = type(os.environ)
        real_get, real_set = kind.__getitem__, kind.__setitem__

        def get(environment: Any, key: Any) -> Any:
            if key in _NAMES and not self._looking:
                self._read = places.here() or self._read
            return real_get(environment, key)

        def put(environment: Any, key: Any, value: Any) -> None:
            if key in _NAMES:
                self._set = places.here() or self._set
            real_set(environment, key, value)

        kind.__getitem__, kind.__setitem__ = get, put  # type: ignore[method-assign]

    def _watch_rendezvous(self) -> None:
        real = torch.distributed.init_process_group

        def init_process_group(*args: Any, **kwargs: Any) -> None:
            # Our own look at the variables, and torch's in the rendezvous, are not the program's.
            self._looking = True
            if world := shield.call("StaleLauncher", self._nobody_comes, args, kwargs, otherwise=0):
                shield.call("StaleLauncher", self._report, world)
                kwargs = {k: v for k, v in kwargs.items() if k not in {"rank", "world_size", "init_method"}}
                kwargs.update(rank=0, world_size=1, store=dist.HashStore())
                args = args[:1]
            try:
                real(*args, **kwargs)
            finally:
                self._looking = False
            shield.call("agreement of the ranks", agreement.joined, self.process)

        init_process_group.__wrapped__ = real  # type: ignore[attr-defined]
        # Device meshes have taken the function by name: they make the group when the program has not.
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed") and vars(module).get("init_process_group") is real:
                module.init_process_group = init_process_group  # type: ignore[attr-defined]

    def _nobody_comes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The size of the group that is waited for in vain; 0 where the others come, or none is due."""
        named = dict(
            zip(("backend", "init_method", "timeout", "world_size", "rank", "store"), args, strict=False)
        )
        named.update(kwargs)
        settings = self.process.settings
        if named.get("store") is not None or settings.launched:
            return 0
        if settings.one_rank and (self._launched() or one_rank.goes_on_as_first()):
            return 0
        method = named.get("init_method") or "env://"
        if not str(method).startswith("env://"):
            return 0
        given = named.get("world_size")
        text = str(given) if given not in (None, -1) else os.environ.get("WORLD_SIZE", "1")
        world = int(text) if text.isdecimal() else 1
        if world <= 1:
            return 0
        waiting = self.process.folder / f"rendezvous-{os.environ.get('MASTER_PORT', '0')}-{os.getpid()}"
        waiting.touch()
        started = time.monotonic()
        while True:
            waited = time.monotonic() - started
            pattern = f"rendezvous-{os.environ.get('MASTER_PORT', '0')}-*"
            if len(list(self.process.folder.glob(pattern))) >= world:
                return 0
            if not self._launched() and self._peer_failed():
                self.process.finish("a peer failed", 1)
                self.process.hard_exit(1)
            if not self._launched() and waited > (
                _PATIENCE_WITH_OTHERS if _possible_peers() else _PATIENCE_ALONE
            ):
                return world
            time.sleep(0.05)

    def _launched(self) -> bool:
        """Whether a launcher that is part of this rehearsal started this process: the others come when they come."""
        return "TORCHELASTIC_RUN_ID" in os.environ and stands_file(self.process.folder, os.getppid()).exists()

    def _peer_failed(self) -> bool:
        """Whether a process that was started beside this one, by the same parent, has met an error since."""
        for path in self.process.folder.glob("records-*.jsonl"):
            # A shell starts its commands one after the other: what failed before this one began is not its peer.
            if multiprocessing.parent_process() is None and path.stat().st_mtime < self._begun:
                continue
            records = list(read_lines(path))
            beside = any(one["t"] == "start" and one["parent"] == os.getppid() for one in records)
            if beside and any(one["t"] == "failed" for one in records):
                return True
        return False

    def _report(self, world: int) -> None:
        read = self._read or self._set
        self.report(
            "stale-launcher",
            f"init_process_group would wait for {world} ranks, but no launcher started any: "
            "DistStoreError: Timed out waiting for clients.",
            places.here(),
            cause_at(
                read, "WORLD_SIZE and RANK are taken at their word, though no launcher set them for this run"
            ),
            fix='Trust the rank variables only under a launcher ("TORCHELASTIC_RUN_ID" in os.environ); '
            "otherwise unset WORLD_SIZE and RANK.",
            op="init_process_group",
        )


def _possible_peers() -> bool:
    """Whether there are other processes in this run that could be the missing ranks."""
    if multiprocessing.parent_process() is not None or multiprocessing.active_children():
        return True
    return any(group == os.getpgrp() and pid != os.getpid() for pid, group in processes())
