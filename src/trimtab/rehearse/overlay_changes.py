"""What the upper layer of an overlay says was written, changed or removed in the folder beneath. Reads only."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trimtab.rehearse.written import Written


def between(real: Path, upper: Path) -> Iterator[Written]:
    """What a folder of the upper layer says about the folder that it lies over."""
    names = set()
    with os.scandir(upper) as entries:
        for entry in entries:
            names.add(entry.name)
            path, status = real / entry.name, entry.stat(follow_symlinks=False)
            there = os.path.lexists(path)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                yield from _removed(path) if there else ()
            elif stat.S_ISDIR(status.st_mode):
                yield from between(path, Path(entry.path))
            elif not there:
                yield Written(str(path), "new", False)
            elif _differs(path.lstat(), status):
                yield Written(str(path), "changed", False)
    if _is_opaque(upper) and real.is_dir():
        # The folder was deleted and made anew: what the new one lacks is gone.
        for name in sorted(set(os.listdir(real)) - names):
            yield from _removed(real / name)


def _removed(path: Path) -> Iterator[Written]:
    """A path that is gone; of a folder, its files."""
    if path.is_symlink() or not path.is_dir():
        yield Written(str(path), "removed", False)
        return
    for base, _, names in os.walk(path):
        for name in names:
            yield Written(os.path.join(base, name), "removed", False)


def _differs(old: os.stat_result, new: os.stat_result) -> bool:
    """A file that was only opened to be written is copied up with its time."""
    return (old.st_size, old.st_mtime_ns, old.st_mode) != (new.st_size, new.st_mtime_ns, new.st_mode)


def _is_opaque(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    return False
