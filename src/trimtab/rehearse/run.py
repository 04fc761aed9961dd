"""The parent of a rehearsal: starts the script's process (or its ranks), waits within a time limit, gives the verdict.

It never imports torch and never runs the user's code in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError
from trimtab.rehearse import (
    excerpts,
    files_aside,
    hints,
    instead,
    left_behind,
    one_rank,
    rank_variables,
    room_here,
    traffic,
)
from trimtab.rehearse.process import SETUP
from trimtab.rehearse.room_here import ValuesDoNotFit, Watch
from trimtab.rehearse.session import VARIABLE, Settings, gather
from trimtab.rehearse.target import Target, parse_target
from trimtab.rehearse.verdict import Result, judge
from trimtab.rehearse.waiting import Child, end_group, let_all_tell, signal_all, wait
from trimtab.virtual import bootstrap


@dataclass(frozen=True)
class Rank:
    """A process that is to be started."""

    arguments: Sequence[str]
    """The words for `trimtab.rehearse.child`."""
    environment: dict[str, str]
    interpreter: Sequence[str] = ()
    """Options of python itself."""
    enter: Callable[[], None] | None = None
    """To be called in the new process before anything else: puts it where its writes change nothing."""


Start = Callable[[Rank], Child]


class EndedFull(Exception):
    """The program caught the error of a full GPU, and did no more work: it is rehearsed past the end of the memory."""

    def __init__(self, handlers: list[str]) -> None:
        super().__init__(*handlers)
        self.handlers = handlers


def _start(rank: Rank) -> Child:
    command = [sys.executable, *rank.interpreter, "-m", "trimtab.rehearse.child", *rank.arguments]
    return subprocess.Popen(command, env=rank.environment, start_new_session=True, preexec_fn=rank.enter)


def rehearse(
    words: list[str],
    settings: Settings,
    *,
    ranks: int | None = None,
    timeout: float = 600.0,
    start: Start = _start,
    keep: Path | None = None,
    in_place: bool = False,
    tells_stopped: bool = False,
) -> Result:
    """Rehearse what the words name. The script's output goes where ours goes.

    What the script writes is thrown away, or moved to the folder `keep`; with `in_place` it is written for real. Where
    this machine has no room for the program's values it begins again with shapes, and so do later rehearsals with
    these settings; and so where it ends by a full GPU whose error it had caught, to see how much is missing. Ctrl-C
    ends it all; with `tells_stopped` the answer is then what was seen until there.
    """
    begun, said = time.monotonic(), ""
    while True:
        left = max(1.0, timeout - (time.monotonic() - begun)) if said or settings.no_way_on else timeout
        try:
            result = _rehearse(
                words,
                settings,
                ranks=ranks,
                timeout=left,
                start=start,
                keep=keep,
                in_place=in_place,
                tells_stopped=tells_stopped,
            )
        except ValuesDoNotFit as why:
            settings.shapes_only = True
            said = f"{why}: it was rehearsed by shapes alone (--shapes-only)"
        except EndedFull as full:
            settings.no_way_on += full.handlers
        else:
            result.notes[:0] = [said] if said else []
            return result


def _rehearse(
    words: list[str],
    settings: Settings,
    *,
    ranks: int | None,
    timeout: float,
    start: Start,
    keep: Path | None,
    in_place: bool,
    tells_stopped: bool,
) -> Result:
    place = Path(tempfile.gettempdir())
    left_behind.sweep([place])
    held = left_behind.make(left_behind.SESSION, place)
    folder, dismiss = held.path, left_behind.guard(held)
    try:
        target = parse_target(words, scratch=folder, gpus=settings.gpus if settings.gpus_given else None)
        visible = target.visible_gpus()
        if visible is not None and not settings.gpus_given:
            settings.gpus = max([0, *visible]) + 1
        per_node = ranks or target.ranks or (settings.gpus if visible is None else len(visible)) or 1
        world = per_node * target.nodes
        settings.launched = world if target.launched or ranks is not None else 0
        if not settings.gpus_given and visible is None:
            settings.gpus = max(settings.gpus, per_node, target.gpus)
        by_values = not settings.shapes_only and not in_place
        if by_values and (why := room_here.known_before(target.arguments, settings.launched)):
            raise ValuesDoNotFit(why)
        with files_aside.files(words, folder, settings, keep=keep, in_place=in_place) as files:
            settings.save(folder)
            started = time.monotonic()
            with _reserved_port() as port:
                launch = _Launch(port, secrets.token_hex(4), per_node, world)
                children = [
                    start(
                        Rank(
                            target.for_rank(rank % per_node),
                            _environment(folder, settings, rank, launch, target),
                            target.interpreter,
                            files.enter,
                        )
                    )
                    for rank in range(1 if settings.one_rank else world)
                ]
                try:
                    room = Watch(folder) if not settings.shapes_only else None
                    timed_out, standstill, stopped = False, None, False
                    try:
                        timed_out, standstill = wait(children, started + timeout, folder, room)
                    except KeyboardInterrupt:
                        if not tells_stopped:
                            raise
                        stopped = True
                        let_all_tell(folder)
                    # Before the rest is ended: a rank that sees another go would report that.
                    gathered = gather(folder)
                finally:
                    for child in children:
                        end_group(child)
                    signal_all(folder, signal.SIGKILL)
            seconds = time.monotonic() - started
            if (why := room_here.said(folder)) and not settings.shapes_only:
                if not in_place and not stopped:
                    raise ValuesDoNotFit(why)
                # What it has written for real would be written twice.
                gathered.unproven = True
                gathered.notes.append(f"{why}: rehearse shapes only (--shapes-only)")
            if gathered.ended_full and not in_place and not timed_out and not stopped:
                raise EndedFull(gathered.ended_full)
            if gathered.refused:
                raise RequestError(gathered.refused)
            gathered.notes += target.notes
            hints.set_aside(gathered, files)
            result = judge(folder, gathered, children, timed_out, timeout, seconds, standstill, stopped)
            result.stopped = stopped
            result.notes += hints.hints(result.findings, gathered, target, shapes_only=settings.shapes_only)
            result.target, result.shapes_only, result.files = (
                target.name,
                settings.shapes_only,
                files.gather(),
            )
            result.instead = sorted(instead.used(folder))
            result.collectives = traffic.gathered(folder)
            result.placement = gathered.placement
            result.sources = excerpts.of(result.findings, result.asked, result.memory)
        return result
    finally:
        dismiss()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held.lock)


@dataclass(frozen=True)
class _Launch:
    """What the ranks of one rehearsal share."""

    port: int
    run: str
    per_node: int
    world: int


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A port for the ranks to meet at. It is bound and not listened on: the system gives it to nobody else, and the
    ranks' store, which asks for reuse as well, may still take it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def _environment(
    folder: Path, settings: Settings, rank: int, launch: _Launch, target: Target
) -> dict[str, str]:
    # Which GPUs of this machine may be used says nothing about the virtual ones; what the line itself says, does.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment.update(target.environment)
    visible = target.visible_gpus()
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
    environment[VARIABLE] = str(folder)
    environment[bootstrap.VARIABLE] = json.dumps(_machine(settings))
    path = (str(bootstrap.SITE), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if settings.instead:
        environment[bootstrap.START] = instead.START
    if settings.launched:
        given = one_rank.variables(rank, launch.per_node, launch.world, launch.port, launch.run)
        environment.update(rank_variables.of(target.launcher, given))
    return environment


def _machine(settings: Settings) -> dict[str, Any]:
    """The virtual machine that every process of the rehearsal gets when it imports torch."""
    return {
        "count": settings.gpus,
        "memory": settings.memory_bytes,
        "name": settings.gpu_name,
        "capability": list(settings.capability),
        "on_fault": "repair",
        "shapes": settings.shapes_only,
        "every_rank": settings.every_rank,
        "visible_at_install": None,
        "setup": SETUP,
    }
