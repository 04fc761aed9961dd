"""What the system tells of the disk behind a path: free room, files that may still be made, limits; and sizes in words.

It only looks: nothing is written, freed or deleted.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileSystem:
    """The file system that a path lies on, as far as the system tells. A quota it does not tell."""

    mount: Path
    total: int
    free: int
    """What this user may still write."""
    files_free: int | None
    """How many files may still be made; None where that is not limited or not told."""
    read_only: bool


def file_system_of(path: Path) -> FileSystem:
    """Of the nearest folder that is there."""
    there = nearest(path)
    usage = shutil.disk_usage(there)
    mount = there
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    if not hasattr(os, "statvfs"):  # Windows tells neither inodes nor whether it may be written
        return FileSystem(mount, usage.total, usage.free, None, False)
    found = os.statvfs(there)
    # Some file systems (btrfs, network ones) count no files and tell 0 of 0.
    files = found.f_favail if found.f_files else None
    return FileSystem(mount, usage.total, usage.free, files, bool(found.f_flag & os.ST_RDONLY))


def largest_file() -> int | None:
    """The largest file that this process may write (`ulimit -f`), or None."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    path = Path(os.path.abspath(path))
    # os.path.exists answers False where a folder above may not be entered; Path.exists raises.
    return next(place for place in (path, *path.parents) if os.path.exists(place) or place == place.parent)


def amount(count: int) -> str:
    """`640 bytes`, `3.4 MiB`, `12 GiB`: about two figures, in the unit that fits."""
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1000:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size >= 9.95 or unit == "bytes" else f"{size:.1f} {unit}"


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what vanishes meanwhile, or may not be read, counts nothing."""
    if not path.is_dir() or path.is_symlink():
        return _bytes_of(path)
    return sum(_bytes_of(Path(folder, name)) for folder, _, names in os.walk(path) for name in names)


def _bytes_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
