"""A view of this machine's files in which a rehearsal can write, rename and delete, and nothing of the user's changes.

The kernel lays an overlay over every folder to which the user may write, in a mount namespace that all processes of one
rehearsal share; what they write lands in a scratch folder. Reads see the real files. Where the kernel does not permit
it (another system, a container without user namespaces), `lay` says why and lays nothing: the caller then lists what
is written. Never touches the user's files itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.rehearse import left_behind, namespaces
from trimtab.rehearse.namespaces import NotPermittedHere, call, is_admin
from trimtab.rehearse.overlay_changes import between
from trimtab.rehearse.overlay_places import Mount, mounts, roots, scratch_places
from trimtab.rehearse.written import Written, is_noise

_BIND, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 14, 1 << 18
_FULL = 32 * 2**20
"""Free bytes below which a failed write is put down to the scratch folder."""


@dataclass(frozen=True)
class Layer:
    """One overlaid folder, and where what is written beneath it lies."""

    root: Path
    scratch: Path
    held: left_behind.Held | None = None
    """The scratch folder as this rehearsal's own; None where it lies in memory that only the namespace sees."""

    @property
    def in_memory(self) -> bool:
        return self.held is None

    @property
    def upper(self) -> Path:
        return self.scratch / "upper"

    @property
    def work(self) -> Path:
        return self.scratch / "work"


class Overlay:
    """An overlay that stands. `enter` is for a child between fork and exec; `close` throws everything away."""

    def __init__(self, layers: list[Layer], handles: list[int], holder: int, process: int) -> None:
        seen_from_here = Path(f"/proc/{process}/root")
        self.layers = [
            replace(layer, scratch=seen_from_here / layer.scratch.relative_to("/"))
            if layer.in_memory
            else layer
            for layer in layers
        ]
        self._handles = handles
        """The namespaces, users before mounts."""
        self._holder = holder

    def enter(self) -> None:
        """Put this process into the overlay. It must have one thread."""
        namespaces.enter(self._handles)

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
        for handle in self._handles:
            os.close(handle)
        _delete(self.layers)
        os.close(self._holder)


def lay(words: Sequence[str], session: Path, places: Sequence[Path] | None = None) -> Overlay:
    """Lay an overlay over all that the user may write to. The session's folder stays shared with the parent.

    `places`: folders that may hold what is written, best first; without any it is held in memory.
    """
    if sys.platform != "linux":
        raise NotPermittedHere(f"{sys.platform} has no overlay file system")
    there = mounts()
    places = scratch_places(there) if places is None else places
    left_behind.sweep(places)
    for users in (False, True) if is_admin() else (True,):
        layers = [_layer(root, places, session) for root in roots(words, privileged=not users, there=there)]
        prepare = functools.partial(_mount_all, layers, there, session)
        try:
            return Overlay(layers, *namespaces.make(prepare, users=users))
        except NotPermittedHere:
            _delete(layers)
            if users:
                raise
    raise AssertionError("the last attempt returns or raises")


def _layer(root: Path, places: Sequence[Path], session: Path) -> Layer:
    """Scratch for a folder, outside of it: an overlay cannot lie in what it covers."""
    outside = next((place for place in places if not place.is_relative_to(root)), None)
    if outside is None:
        return Layer(root, session / "memory" / str(root).replace(os.sep, "-"))
    held = left_behind.make(left_behind.FILES, outside, session)
    layer = Layer(root, held.path, held)
    _make(layer)
    return layer


def _make(layer: Layer) -> None:
    layer.work.mkdir(parents=True)
    layer.upper.mkdir()
    layer.upper.chmod(stat.S_IMODE(layer.root.stat().st_mode))


def _mount_all(layers: list[Layer], there: list[Mount], session: Path) -> None:
    """Inside the new namespace: every folder's overlay, and on top again what was mounted beneath it."""
    _mount(b"none", Path("/"), None, _RECURSIVE | _PRIVATE)
    held_in_memory = [layer for layer in layers if layer.in_memory]
    if held_in_memory:
        (session / "memory").mkdir()
        _mount(b"tmpfs", session / "memory", b"tmpfs", options=b"mode=700")
    for layer in held_in_memory:
        _make(layer)
    covered = {layer.root: layer for layer in layers}
    shared = {mount.path for mount in there if any(_inside(mount.path, root) for root in covered)}
    shared = (shared - set(covered)) | {session.resolve()}
    # All are opened before anything is covered.
    real = {path: os.open(path, os.O_PATH) for path in (*covered, *shared)}
    scratch = {path: os.open(path, os.O_PATH) for layer in layers for path in (layer.upper, layer.work)}
    for path in sorted(real, key=lambda path: len(path.parts)):
        if path in shared:
            _mount(_handle(real[path]), path, None, _BIND | _RECURSIVE)
            continue
        layer = covered[path]
        options = b"lowerdir=%b,upperdir=%b,workdir=%b,userxattr,volatile" % tuple(
            _handle(handle) for handle in (real[path], scratch[layer.upper], scratch[layer.work])
        )
        _mount(b"overlay", path, b"overlay", options=options)


def _mount(
    what: bytes, where: Path, kind: bytes | None, flags: int = 0, options: bytes | None = None
) -> None:
    call("mount", what, os.fsencode(where), kind, ctypes.c_ulong(flags), options)


def _inside(path: Path, root: Path) -> bool:
    return path != root and path.is_relative_to(root)


def _handle(number: int) -> bytes:
    return b"/proc/self/fd/%d" % number


def _delete(layers: list[Layer]) -> None:
    for held in (layer.held for layer in layers):
        if held is not None:
            held.delete()
