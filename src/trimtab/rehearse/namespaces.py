"""A mount namespace (and where needed a user namespace) that other processes can enter. Linux, through the C library.

Never changes the namespaces of the calling process, unless it calls `enter` or is the child that prepares them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_MEANS = {
    ("unshare", errno.EPERM): "this process may not make namespaces",
    ("unshare", errno.ENOSPC): "namespaces are switched off, or all are in use",
}


class NotPermittedHere(Exception):
    """The kernel does not let this process make one; the text says why."""


def is_admin() -> bool:
    """Whether this process may mount as it is (CAP_SYS_ADMIN); then it keeps its right to other users' files."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> 21 & 1)


def make(prepare: Callable[[], None], *, users: bool) -> tuple[list[int], int, int]:
    """Have another process make the namespaces and prepare them; answers with handles of them, and with a handle and
    the id of that process.

    It holds the namespaces until its handle is closed: the kernel takes its time to take the mounts down, and whoever
    lets go last has to wait for that.
    """
    said, say = os.pipe()
    held, hold = os.pipe()
    user, group = os.getuid(), os.getgid()
    child = os.fork()
    if child == 0:
        message = b"the process that prepares the overlay failed"
        try:
            if os.fork() != 0:
                leave()
            call("unshare", _NEW_MOUNTS | (_NEW_USERS if users else 0))
            if users:
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
                Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
            prepare()
            message = b"ready %d" % os.getpid()
        except OSError as error:
            message = str(error.strerror or error).encode()
        finally:
            # Whatever happened: this copy of the parent must not go on as the parent.
            os.write(say, message)
            close_all_but(held)
            os.read(held, 1)
            leave()
    os.close(say)
    os.close(held)
    os.waitpid(child, 0)
    try:
        answer = os.read(said, 4096).decode()
        if not answer.startswith("ready "):
            raise NotPermittedHere(f"the kernel does not permit an overlay: {answer}")
        names = ("user", "mnt") if users else ("mnt",)
        process = answer.split()[1]
        handles = [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names]
        return handles, hold, int(process)
    except BaseException:
        os.close(hold)
        raise
    finally:
        os.close(said)


def close_all_but(*handles: int) -> None:
    """Who waits for the end of the parent's output must not wait for this process."""
    edges = [-1, *sorted(handles), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(edges):
        os.closerange(before + 1, after)


def leave() -> None:
    """End this process at once; `os._exit` may be a rehearsal's own in a test that runs inside one."""
    os.kill(os.getpid(), 9)


def call(name: str, *arguments: object) -> None:
    """A function of the C library; its error as Python's."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        means = _MEANS.get((name, number), os.strerror(number))
        raise OSError(number, f"{name}: {means}")


def enter(handles: list[int]) -> None:
    """Put this process, which must have one thread, into the namespaces; it stays in its folder."""
    where = os.getcwd()
    for handle in handles:
        call("setns", handle, 0)
    os.chdir(where)
