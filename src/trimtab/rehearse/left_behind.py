"""The folders of a rehearsal, and what is left of one that was killed: its processes are ended, its folders deleted.

A guard, a process of its own, waits for the end of it and does so; what even the guard leaves, the next one deletes.
A rehearsal holds a lock in each of its folders; the kernel lets go of it when the process ends, however it ends. Never
touches a folder that has no such lock, that belongs to another user, or of whose rehearsal any process still lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trimtab.rehearse.namespaces import close_all_but, leave
from trimtab.rehearse.system import belongs, processes

SESSION, FILES = "trimtab-rehearsal-", "trimtab-files-"
_OWNER = "owner"
"""The file that is locked. It names the session to which the processes of the rehearsal belong."""


@dataclass(frozen=True)
class Held:
    """A folder that is this rehearsal's while the lock is held."""

    path: Path
    lock: int

    def delete(self) -> None:
        """Delete it; the lock last, so that nobody else does so at the same time."""
        try:
            _delete(self.path)
        finally:
            os.close(self.lock)


def make(prefix: str, place: Path, session: Path | None = None) -> Held:
    """A new folder in a place; of that session, or a session's own."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    # Locked before it has its name: a sweep sees no owner, or one that lives.
    unnamed = folder / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, os.fsencode(session or folder))
    unnamed.rename(folder / _OWNER)
    return Held(folder, lock)


def guard(held: Held) -> Callable[[], None]:
    """Have a process wait for the end of ours; answers with what sends it away. Without /proc it does nothing."""
    heard, hold = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setsid()  # what a terminal tells this rehearsal is not for the guard
            close_all_but(heard, held.lock)
            os.read(heard, 1)  # nothing is ever written: it returns when the other end is closed
            while left := [one for one, _ in processes() if belongs(held.path, one)]:
                for one in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                time.sleep(0.05)
            if processes():  # where the system tells of none, they may still write there
                _delete(held.path)
        finally:
            leave()
    os.close(heard)

    def dismiss() -> None:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(hold)

    return dismiss


def sweep(places: Iterable[Path]) -> None:
    """Delete what rehearsals that are no more left in these places."""
    found = [path for place in places for prefix in (SESSION, FILES) for path in place.glob(f"{prefix}*")]
    for held in filter(None, map(_abandoned, found)):
        # What cannot be deleted (another sweep was quicker, a file of somebody else) stays for another time.
        with contextlib.suppress(OSError):
            held.delete()


def _abandoned(folder: Path) -> Held | None:
    """The folder, held, when its rehearsal has ended without deleting it."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return None
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        session = Path(os.fsdecode(os.read(lock, 4096)))
        # Ranks may outlive a parent that was killed, and they still write here.
        if not any(belongs(session, process) for process, _ in processes()):
            return Held(folder, lock)
    except BlockingIOError:
        pass
    os.close(lock)
    return None


def _delete(folder: Path) -> None:
    """An overlay leaves folders that nobody may enter."""
    for base, names, _ in os.walk(folder):
        for path in (Path(base, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder)
