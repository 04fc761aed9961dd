"""The lock of a run's folder: one run at a time writes there. The system frees it when the process dies, however.

`flock`, on an open file of which forked children close their copy at once and programs that are started get none: what
outlives a killed run (workers, servers, sandboxes) does not hold it. Where a file system cannot lock, the process that
the file names is looked for, and that is said. It removes no file but its own lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trimtab.errors import RequestError
from trimtab.recipes.elastic import restart_number
from trimtab.recipes.run_mark import LOCK

PATIENCE = 2.0
"""Seconds that a lock is tried for: one that only looks holds it for a moment."""
PATIENCE_OF_A_RESTART = 60.0
"""A launcher that starts its processes again may do so before the last of the earlier ones is gone."""
_FAR = 2**30
"""Windows locks bytes, which nobody else can then read: one that is far behind the text."""
_CANNOT = {getattr(errno, name, None) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL")}
_HELD: set[int] = set()

Say = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str
    since: float
    born: float | None = None
    """When the process began by the system's clock: another one may have its number by now."""

    @classmethod
    def me(cls) -> Holder:
        import psutil

        return cls(os.getpid(), platform.node(), round(time.time(), 3), psutil.Process().create_time())

    @classmethod
    def read(cls, file: Path, tries: int = 3) -> Holder | None:
        for _ in range(tries):
            try:
                told = json.loads(file.read_text(encoding="utf-8"))
                born = told.get("born")
                return cls(int(told["pid"]), str(told["host"]), float(told["since"]), born and float(born))
            except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
                time.sleep(0.02)  # it may be about to be written
        return None

    @property
    def alive(self) -> bool | None:
        """None where that cannot be told from here."""
        import psutil

        if self.host != platform.node():
            return None
        try:
            return self.born is None or abs(psutil.Process(self.pid).create_time() - self.born) < 2
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


@contextmanager
def only_run_in(folder: Path, say: Say = print, patience: float | None = None) -> Iterator[None]:
    """Hold the folder's lock while the block runs, or refuse with the name of who holds it."""
    file, owner = folder / LOCK, os.getpid()
    if patience is None:
        patience = PATIENCE_OF_A_RESTART if restart_number() else PATIENCE
    handle = _take(file, patience)
    if handle is None:
        say(f"! {folder}: its file system cannot lock; runs there are told apart by {LOCK} alone")
        before = _claim_by_name(file, folder)
    else:
        before = file.read_bytes()
        _note_a_lost_one(file, say)
        _write(handle, Holder.me())
    try:
        yield
    finally:
        if os.getpid() == owner:  # not in a forked child that ends by an exception
            _let_go(file, handle, before if not _begun(folder) else b"")


def running_in(folder: Path) -> Holder | None:
    """Who runs in the folder now; None where nobody does."""
    file = folder / LOCK
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        _lock(handle, shared=True)
    except OSError as error:
        holder = Holder.read(file)
        if error.errno in _CANNOT and not isinstance(error, BlockingIOError):
            return holder if holder is not None and holder.alive is not False else None
        return holder or Holder(0, "an unknown host", file.stat().st_mtime)
    finally:
        os.close(handle)
    return None


def refuse_if_running(folder: Path, verb: Literal["train", "export", "evaluate"] = "train") -> None:
    """Refuse to write beside a run that goes on, without taking its lock. Its own process may."""
    holder = running_in(folder)
    if holder is None or (holder.pid, holder.host) == (os.getpid(), platform.node()):
        return
    if verb == "train":
        raise _busy(folder)
    elsewhere = ", or write elsewhere with --out" if verb == "export" else ""
    raise RequestError.of(
        f"trimtab {verb} {folder}: a run is going on there: {holder}",
        "the weights that it keeps are about to be replaced, and what is written beside them would tell of others",
        f"wait until it has ended{elsewhere}; `trimtab report` may look at it meanwhile",
    )


def _take(file: Path, patience: float) -> int | None:
    """An open file that is locked; None where the file system cannot."""
    ends = time.monotonic() + patience
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            raise RequestError.of(
                f"output_dir={file.parent}: its lock {file.name} cannot be opened ({error.strerror})",
                "without it another run in the same folder would not be noticed",
                "make the folder and the file writable, or choose another output_dir",
            ) from error
        try:
            _lock(handle, shared=False)
        except OSError as error:
            os.close(handle)
            if error.errno in _CANNOT:
                return None
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK, 36):
                raise
            if time.monotonic() >= ends:
                raise _busy(file.parent) from None
            time.sleep(0.05)
            continue
        # The one that held it may have taken the file away, or the folder was moved aside: then this is no lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(file)):
                _HELD.add(handle)
                return handle
        os.close(handle)


def _let_go(file: Path, handle: int | None, before: bytes) -> None:
    """Leave no trace of a run that never began, and no lock of one that has."""
    with contextlib.suppress(
        OSError
    ):  # the folder may be gone by now; the lock goes with the handle in any case
        if handle is not None and before:
            _write_bytes(handle, before)
        elif handle is not None and sys.platform == "win32":
            _write_bytes(handle, b"")
        elif handle is not None:
            if os.path.samestat(os.fstat(handle), os.stat(file)):
                file.unlink()
        elif before:
            file.write_bytes(before)
        else:
            file.unlink()
    if handle is not None:
        _HELD.discard(handle)
        os.close(handle)


def _begun(folder: Path) -> bool:
    """Whether the run that holds the lock has written to the folder as its own."""
    from trimtab.recipes.run_mark import Mark

    mark, holder = Mark.of(folder), Holder.read(folder / LOCK)
    return mark is not None and holder is not None and mark.started >= holder.since


def _claim_by_name(file: Path, folder: Path) -> bytes:
    """Without locks: whoever is named there and lives has it. Of two at once the last to write, which both look for."""
    holder, me = Holder.read(file), Holder.me()
    if holder is not None and holder.alive is not False:
        raise _busy(folder)
    before = file.read_bytes() if file.is_file() else b""
    from trimtab.files import write_json_whole

    write_json_whole(file, asdict(me))
    time.sleep(0.3)
    if Holder.read(file) != me:
        raise _busy(folder)
    return before


def _note_a_lost_one(file: Path, say: Say) -> None:
    holder = Holder.read(file) if file.stat().st_size else None
    if holder is not None and holder.host != platform.node():
        say(
            f"! {file.parent} was last held by {holder}, which did not let go of it; its lock is free, so that run has "
            "ended, unless this file system keeps the locks of one machine from the others"
        )


def _busy(folder: Path) -> RequestError:
    holder = Holder.read(
        folder / LOCK, tries=25
    )  # one that has just taken it may not have written its name yet
    who = str(holder) if holder is not None else "another process"
    change = "wait until it has ended, or choose another output_dir"
    if holder is not None and holder.alive:
        change = f"wait until it has ended, stop it (kill {holder.pid}), or choose another output_dir"
    elif holder is not None and holder.alive is False:
        others = _have_open(folder / LOCK)
        left = f"; still open in {', '.join(others)}" if others else ""
        who += f" (gone by now{left})"
        change = f"end what it has left behind ({', '.join(others)})" if others else "try again in a moment"
    elif holder is not None:
        change += f"; if nothing runs there on {holder.host} any more, remove {folder / LOCK}"
    return RequestError.of(
        f"output_dir={folder}: a run is going on there: {who}",
        "two runs in one folder would mix their checkpoints, metrics and weights",
        change,
    )


def _have_open(file: Path) -> list[str]:
    """Processes of this machine that have the file open, as far as one may look."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "name"]):
        with contextlib.suppress(psutil.Error, OSError):
            if any(Path(opened.path) == file.absolute() for opened in process.open_files()):
                found.append(f"process {process.pid} ({process.info['name']})")
    return found


def _write(handle: int, holder: Holder) -> None:
    _write_bytes(handle, (json.dumps(asdict(holder)) + "\n").encode())


def _write_bytes(handle: int, content: bytes) -> None:
    """In place: a file renamed over this one would not be the one that is locked."""
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, content)
    os.ftruncate(handle, len(content))


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int, *, shared: bool) -> None:
        os.lseek(handle, _FAR, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        if shared:  # it only looks
            os.lseek(handle, _FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(handle: int, *, shared: bool) -> None:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def _close_in_child() -> None:
        """A forked child shares the lock as long as it has the file open, also when its parent is long gone."""
        while _HELD:
            with contextlib.suppress(OSError):
                os.close(_HELD.pop())

    os.register_at_fork(after_in_child=_close_in_child)
