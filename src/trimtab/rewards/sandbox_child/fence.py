"""Takes rights away from a process: files, network, other processes, memory and time, as far as the kernel can.

Three fences stand behind each other, and each holds where another is missing: a room of its own (`room`), Landlock
(`landlock`), and a list of the calls that it may make (`filter`). Below them are limits, which every Unix has.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from dataclasses import dataclass

from . import filter as calls
from . import kernel, landlock, room

THREADS = 64
USERS = range(61184, 65520)
"""Numbers of users that are nobody's by convention; each job gets its own, so that none owns another's files."""


@dataclass(frozen=True)
class Fence:
    """What holds for one job: which folder, how much, and which of the fences could be built around it."""

    folder: str
    megabytes: int
    seconds: float
    in_room: bool
    user: int | None
    """Whom the job runs as, where we may choose."""
    readable: tuple[str, ...]
    beside: int = 0
    """How many threads this user has already, where a job's are counted with them."""

    def take_rights(self, own_user_count: bool = False) -> None:
        """Give up, for good, what this job does not need."""
        self._limit(own_user_count or self.user is not None)
        if kernel.linux():
            kernel.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
            if self.user is not None:
                _become(self.user)
            kernel.drop_capabilities()
            kernel.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: with its parent it ends
            hide()
            landlock.keep_to(self.readable, [self.folder, *room.DEVICES])
        if not calls.install(own_files=self.in_room):
            _limit(resource.RLIMIT_NPROC, 0)  # no list of calls keeps it from forking; threads go with that

    def _limit(self, counted_alone: bool) -> None:
        _limit(resource.RLIMIT_CPU, int(self.seconds) + 1)
        _limit(resource.RLIMIT_FSIZE, 2**20)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_NOFILE, 64)
        if sys.platform != "darwin":
            _limit(resource.RLIMIT_AS, self.megabytes * 2**20)
        if counted_alone:
            _limit(resource.RLIMIT_NPROC, THREADS)
        elif self.beside:
            _limit(resource.RLIMIT_NPROC, self.beside + 8 * THREADS)


def may_choose_user(in_room: bool) -> bool:
    """Whether jobs can run as users without rights: we are root, and Python is readable for others too."""
    if not kernel.linux() or os.geteuid() != 0:
        return False
    if not (room.anyone_can_read() if in_room else room.anyone_can_reach()):
        return False
    pid = os.fork()  # a try: a user namespace may have no such user, and root no right to change
    if pid == 0:
        try:
            _become(USERS[-1])
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def threads_of_this_user() -> int:
    """All of them on this machine; 0 where that cannot be seen."""
    count = 0
    for process in filter(
        str.isdigit, os.listdir("/proc") if kernel.linux() and os.path.isdir("/proc") else []
    ):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if os.stat(f"/proc/{process}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{process}/task"))
    return count


def network_is_cut(in_room: bool) -> bool:
    """Whether this process, behind its fence, is without a way to others."""
    try:
        socket.socket().close()
    except OSError:
        return True
    return in_room


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def hide() -> None:
    """Let no other process of this user look into this one."""
    if kernel.linux():
        kernel.prctl(4, 0)  # PR_SET_DUMPABLE


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))
