"""Tells an error that means "no room" (a full disk, a quota, a folder that may not be written, no memory left) from any
other, whichever library raised it and in whatever words, and looks at the file system that it concerns.

It writes, frees and deletes nothing, and never imports torch: an error of torch's is there only where torch is.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from trimtab.errors import TrimtabError

Kind = Literal["full", "quota", "read-only", "forbidden", "file size", "device", "unknown"]
SYSTEM: dict[int, Kind] = {
    errno.ENOSPC: "full",
    getattr(errno, "EDQUOT", -1): "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
    errno.EFBIG: "file size",
    errno.EIO: "device",
    errno.ENXIO: "device",
    errno.ENODEV: "device",
    getattr(errno, "ESTALE", -1): "device",
    getattr(errno, "ENOTCONN", -1): "device",
}
SAID: dict[str, Kind] = {
    "no space left on device": "full",
    "not enough space on the disk": "full",  # Windows
    "disk full": "full",
    "disk quota exceeded": "quota",
    "read-only file system": "read-only",
    "permission denied": "forbidden",
    "file too large": "file size",
    "input/output error": "device",
}
"""The system's words, as libraries that drop the number repeat them."""
_NUMBER = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)
_STREAM = re.compile(
    r"PytorchStreamWriter failed|inline_container\.cc|basic_ios::clear|iostream error|file write failed"
)
"""A C++ stream says that a write failed, and not why."""
_GPU_MEMORY = re.compile(
    r"(CUDA|HIP|MPS|XPU).{0,40}out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
    r"cudaErrorMemoryAllocation|Tried to allocate .* (GPU|MPS)",
    re.IGNORECASE | re.DOTALL,
)
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|alloc_cpu\.cpp|std::bad_alloc|Cannot allocate memory|not enough memory: you tried to allocate|"
    r"unable to mmap .* bytes|malloc of size .* failed|Unable to allocate .* for an array|memory allocation of .* failed",
    re.IGNORECASE | re.DOTALL,
)
_WORKER = re.compile(
    r"DataLoader worker.{0,60}(exited unexpectedly|killed by signal: (Killed|Bus error))", re.DOTALL
)


@dataclass(frozen=True)
class WriteFault:
    """A write that the system refused."""

    kind: Kind
    path: Path | None
    """What was written, where the error or the place where it was raised tells it."""
    said: str
    """The library's words, on one line."""


@dataclass(frozen=True)
class MemoryFault:
    """No memory left."""

    where: Literal["device", "host", "worker"]
    """On the accelerator, in the machine's own memory, or in a process of the data loader."""
    said: str


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


def write_fault(error: BaseException, places: Sequence[Path] = ()) -> WriteFault | None:
    """The refused write behind an error, or None. An error of ours has said what it is already.

    `places` are the folders that are written to. An error without a path is looked up by where it was raised; a
    "permission denied" of a path outside them concerns what is read, and is no fault of this kind.
    """
    if isinstance(error, TrimtabError):
        return None
    for one in _chain(error):
        kind = _kind_of(one)
        if kind is None:
            continue
        path = _named(one) or _path_where_raised(error, places)
        if kind == "forbidden" and (path is None or not any(_inside(path, place) for place in places)):
            continue
        return WriteFault(kind, path, _line(one))
    return None


def memory_fault(error: BaseException) -> MemoryFault | None:
    """The lack of memory behind an error, or None. An error of ours has said what it is already."""
    if isinstance(error, TrimtabError):
        return None
    for one in _chain(error):
        text = str(one)
        if type(one).__name__ == "OutOfMemoryError" or _GPU_MEMORY.search(text):
            return MemoryFault("device", _line(one))
        if isinstance(one, RuntimeError) and _WORKER.search(text):
            return MemoryFault("worker", _line(one))
        no_memory = isinstance(one, OSError) and one.errno == errno.ENOMEM
        if isinstance(one, MemoryError) or no_memory or _HOST_MEMORY.search(text):
            return MemoryFault("host", _line(one))
    return None


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


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _kind_of(error: BaseException) -> Kind | None:
    if isinstance(error, OSError) and error.errno in SYSTEM:
        return SYSTEM[error.errno]
    text = str(error)
    if number := _NUMBER.search(text):
        return SYSTEM.get(int(number[1] or number[2]))
    if isinstance(error, RuntimeError) and _STREAM.search(text):
        return "unknown"
    low = text.lower()
    found = next((kind for words, kind in SAID.items() if words in low), None)
    # A library's own class, or a plain Exception (tokenizers): a text that only mentions it is no such error.
    return found if isinstance(error, OSError | RuntimeError) or type(error) is Exception else None


def _named(error: BaseException) -> Path | None:
    name = getattr(error, "filename", None)
    return Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None


def _path_where_raised(error: BaseException, places: Sequence[Path]) -> Path | None:
    """The innermost local variable, on the way to where the error was raised, that is a path into one of the places."""
    frames: list[FrameType] = []
    for one in _chain(error):
        trace = one.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        for frame in reversed(frames):
            for value in list(frame.f_locals.values()):
                path = _as_path(value)
                if path is not None and any(_inside(path, place) for place in places):
                    return path
        frames.clear()
    return None


def _as_path(value: object) -> Path | None:
    if not isinstance(value, str | os.PathLike):
        value = getattr(value, "name", None) if hasattr(value, "write") else None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    # A word is no path; a text is none either.
    if (
        not isinstance(value, str)
        or os.sep not in value
        or len(value) > 4096
        or "\n" in value
        or "\0" in value
    ):
        return None
    return Path(value)


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
