"""A view of this machine's files in which a rehearsal can write, rename and delete, and nothing of the user's changes.

The kernel lays an overlay over every folder to which the user may write, in a mount namespace that all processes of one
rehearsal share; what they write lands in a scratch folder. Reads see the real files. Where the kernel does not permit
it (another system, a container without user namespaces), `lay` says why and lays nothing: the caller then lists what
is written. Never touches the user's files itself.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.rehearse.overlay_changes import between
from trimtab.rehearse.overlay_places import Mount, mounts, roots, scratch_places
from trimtab.rehearse.written import Written, is_noise

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_BIND, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 14, 1 << 18
_FULL = 32 * 2**20
"""Free bytes below which a failed write is put down to the scratch folder."""

_MEANS = {
    ("unshare", errno.EPERM): "this process may not make namespaces",
    ("unshare", errno.ENOSPC): "namespaces are switched off, or all are in use",
}


@dataclass(frozen=True)
class Layer:
    """One overlaid folder, and where what is written beneath it lies."""

    root: Path
    scratch: Path

    @property
    def upper(self) -> Path:
        return self.scratch / "upper"

    @property
    def work(self) -> Path:
        return self.scratch / "work"


class NotPermittedHere(Exception):
    """The kernel does not let this process lay an overlay; the text says why."""


class Overlay:
    """An overlay that stands. `enter` is for a child between fork and exec; `close` throws everything away."""

    def __init__(self, layers: list[Layer], namespaces: list[int], holder: int) -> None:
        self.layers = layers
        self._namespaces = namespaces
        """Handles of them, users before mounts."""
        self._holder = holder

    def enter(self) -> None:
        """Put this process into the overlay. It must have one thread."""
        where = os.getcwd()
        for handle in self._namespaces:
            _call("setns", handle, 0)
        os.chdir(where)

    def changes(self) -> list[Written]:
        """What differs from the real files."""
        found = (change for layer in self.layers for change in between(layer.root, layer.upper))
        return sorted((one for one in found if not is_noise(one.path)), key=lambda one: one.path)

    def keep(self, folder: Path, written: list[Written]) -> None:
        """Move the files that were written beneath a folder, each by its whole path."""
        for one in written:
            layer = max(
                (layer for layer in self.layers if Path(one.path).is_relative_to(layer.root)),
                key=lambda layer: len(layer.root.parts),
                default=None,
            )
            if layer is None or one.real or one.how == "removed":
                continue
            target = folder / one.path.lstrip(os.sep)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(layer.upper / Path(one.path).relative_to(layer.root), target)

    def full(self) -> Path | None:
        """A scratch folder whose file system has no room left."""
        places = {layer.scratch.parent for layer in self.layers}
        return next((place for place in places if shutil.disk_usage(place).free < _FULL), None)

    def close(self) -> None:
        """Let the namespaces go and delete what was written."""
        for handle in self._namespaces:
            os.close(handle)
        for layer in self.layers:
            _delete(layer.scratch)
        os.close(self._holder)


def lay(words: Sequence[str], session: Path) -> Overlay:
    """Lay an overlay over all that the user may write to. The session's folder stays shared with the parent."""
    if sys.platform != "linux":
        raise NotPermittedHere(f"{sys.platform} has no overlay file system")
    there = mounts()
    places = scratch_places(there)
    for users in (False, True) if _is_admin() else (True,):
        layers = [_layer(root, places) for root in roots(words, privileged=not users, there=there)]
        prepare = functools.partial(_mount_all, layers, there, session)
        try:
            return Overlay(layers, *_namespaces(prepare, users=users))
        except NotPermittedHere:
            for layer in layers:
                _delete(layer.scratch)
            if users:
                raise
    raise AssertionError("the last attempt returns or raises")


def _is_admin() -> bool:
    """Whether this process may mount as it is (CAP_SYS_ADMIN); then it keeps its right to other users' files."""
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> 21 & 1)


def _layer(root: Path, places: list[Path]) -> Layer:
    """Scratch for a folder, outside of it: an overlay cannot lie in what it covers."""
    outside = next((place for place in places if not place.is_relative_to(root)), None)
    if outside is None:
        raise NotPermittedHere(f"no file system was found that could hold what is written beneath {root}")
    layer = Layer(root, Path(tempfile.mkdtemp(prefix="trimtab-files-", dir=outside)))
    layer.work.mkdir()
    layer.upper.mkdir()
    layer.upper.chmod(stat.S_IMODE(root.stat().st_mode))
    return layer


def _namespaces(prepare: Callable[[], None], *, users: bool) -> tuple[list[int], int]:
    """Have another process make the namespaces and prepare them; answers with handles of them and of that process.

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
                _leave()
            _call("unshare", _NEW_MOUNTS | (_NEW_USERS if users else 0))
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
            _close_all_but(held)
            os.read(held, 1)
            _leave()
    os.close(say)
    os.close(held)
    os.waitpid(child, 0)
    try:
        answer = os.read(said, 4096).decode()
        if not answer.startswith("ready "):
            raise NotPermittedHere(f"the kernel does not permit an overlay: {answer}")
        names = ("user", "mnt") if users else ("mnt",)
        process = answer.split()[1]
        return [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in names], hold
    except BaseException:
        os.close(hold)
        raise
    finally:
        os.close(said)


def _close_all_but(handle: int) -> None:
    """Who waits for the end of the parent's output must not wait for this process."""
    os.closerange(0, handle)
    os.closerange(handle + 1, os.sysconf("SC_OPEN_MAX"))


def _leave() -> None:
    """End this process at once; `os._exit` may be a rehearsal's own in a test that runs inside one."""
    os.kill(os.getpid(), 9)


def _mount_all(layers: list[Layer], there: list[Mount], session: Path) -> None:
    """Inside the new namespace: every folder's overlay, and on top again what was mounted beneath it."""
    _call("mount", b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)
    covered = {layer.root: layer for layer in layers}
    shared = {mount.path for mount in there if any(_inside(mount.path, root) for root in covered)} - set(
        covered
    )
    shared = {path for path in shared if not any(_inside(path, outer) for outer in shared)}
    shared |= {session.resolve()}
    # All are opened before anything is covered.
    real = {path: os.open(path, os.O_PATH) for path in (*covered, *shared)}
    scratch = {path: os.open(path, os.O_PATH) for layer in layers for path in (layer.upper, layer.work)}
    for path in sorted(real, key=lambda path: len(path.parts)):
        if path in shared:
            _call(
                "mount",
                _handle(real[path]),
                os.fsencode(path),
                None,
                ctypes.c_ulong(_BIND | _RECURSIVE),
                None,
            )
            continue
        layer = covered[path]
        options = b"lowerdir=%b,upperdir=%b,workdir=%b,userxattr,volatile" % tuple(
            _handle(handle) for handle in (real[path], scratch[layer.upper], scratch[layer.work])
        )
        _call("mount", b"overlay", os.fsencode(path), b"overlay", ctypes.c_ulong(0), options)


def _inside(path: Path, root: Path) -> bool:
    return path != root and path.is_relative_to(root)


def _handle(number: int) -> bytes:
    return b"/proc/self/fd/%d" % number


def _call(name: str, *arguments: object) -> None:
    """A function of the C library; its error as Python's."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        means = _MEANS.get((name, number), os.strerror(number))
        raise OSError(number, f"{name}: {means}")


def _delete(folder: Path) -> None:
    """Delete a scratch folder; the kernel leaves folders in it that nobody may enter."""
    for base, names, _ in os.walk(folder):
        for name in names:
            path = Path(base, name)
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder)
