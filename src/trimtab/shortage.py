"""Tells an error that means "no room" (a full disk, a quota, a folder that may not be written, no memory left) from any
other, whichever library raised it and in whatever words, and looks at the file system that it concerns.

It writes, frees and deletes nothing, and never imports torch: an error of torch's is there only where torch is.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from trimtab.errors import TrimtabError
from trimtab.file_system import FileSystem, amount, file_system_of, largest_file, nearest

Kind = Literal["full", "files", "quota", "read-only", "forbidden", "file size", "device", "unknown"]
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
_SCRATCH = re.compile(r"^\.(.+)\.[0-9a-f]{8}\.partial$")
"""The name under which a file is made that is whole or not there at all (files.py)."""
_GPU_MEMORY = re.compile(
    r"(CUDA|HIP|MPS|XPU).{0,40}out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
    r"cudaErrorMemoryAllocation|Tried to allocate .* (GPU|MPS)",
    re.IGNORECASE | re.DOTALL,
)
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator|alloc_cpu\.cpp|std::bad_alloc|Cannot allocate memory|not enough memory: you tried|"
    r"unable to mmap .* bytes|malloc of size .* failed|Unable to allocate .* for an array|"
    r"memory allocation of .* failed|can't start new thread",
    re.IGNORECASE | re.DOTALL,
)
_WORKER = re.compile(
    r"DataLoader worker.{0,60}(exited unexpectedly|killed by signal: (Killed|Bus error))", re.DOTALL
)


class NoRoomOnDisk(TrimtabError):
    """A write was refused by the system, and the work ended there."""


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


@contextmanager
def refusals_told() -> Iterator[None]:
    """Around a verb: what the system refuses, disk or memory, goes up as an error of ours; any other as it is."""
    try:
        yield
    except Exception as error:
        if (lack := memory_fault(error)) is not None:
            raise TrimtabError(
                f"out of memory\n  why: {lack.said}\n  change: give the process more memory, end other programs, "
                "or ask for less at once"
            ) from error
        fault = write_fault(error, [Path(os.sep)])
        if fault is None:
            raise
        folder = nearest(fault.path.parent if fault.path is not None else Path())
        found, why, change = in_words(fault, folder, f"free room on {file_system_of(folder).mount}")
        raise NoRoomOnDisk(f"{found}\n  why: {why}\n  change: {change}") from error


def in_words(fault: WriteFault, folder: Path, to_free: str) -> tuple[str, str, str]:
    """What was found, why, and what to change; `to_free` says what would make room in the folder."""
    system = file_system_of(folder)
    kind, limit = _likely(fault.kind, system), largest_file()
    name = None if fault.path is None else _SCRATCH.sub(r"\1", fault.path.name)
    what = f"a file in {folder}" if name is None else f"{name} in {folder}"
    there = f"{amount(system.free)} of {amount(system.total)} are free on {system.mount}"
    if kind == "files":
        there += ", but no more files can be made there (no free inodes)"
    found, change = {
        "full": (f"no space left on {system.mount}", to_free),
        "files": (
            f"no space left for one more file on {system.mount}",
            "delete files there that are not needed",
        ),
        "quota": ("the disk quota is used up", f"{to_free}, or ask for a larger quota"),
        "read-only": (
            f"{system.mount} is read-only",
            "mount it for writing (the system takes that away from a disk that fails: see `dmesg`), or choose another "
            "folder",
        ),
        "forbidden": (
            f"{folder} may not be used by this user",
            "let this user read and write there, or choose another folder",
        ),
        "file size": (
            "a file would be larger than this process or this file system allows",
            f"raise the limit (`ulimit -f`, now {amount(limit)})"
            if limit is not None
            else "use a file system without such a limit (FAT holds files of up to 4 GiB)",
        ),
        "device": (f"the disk behind {system.mount} failed", "see `dmesg`, and use another disk"),
        "unknown": ("a write failed", f"{to_free}; look for a quota, which is not shown here"),
    }[kind]
    return f"{found}: {what} could not be written", f"{there} (said was: {fault.said})", change


def _likely(kind: Kind, system: FileSystem) -> Kind:
    """Why a write failed, where the error leaves it open. A half-written file may be gone by now, and its room free."""
    if kind == "full" and system.files_free is not None and system.files_free < 1:
        return "files"
    if kind != "unknown":
        return kind
    if system.read_only:
        return "read-only"
    if largest_file() is not None:
        return "file size"
    return "full" if system.free < max(2**20, system.total // 20) else kind


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
    # A library's own class, or a plain Exception (tokenizers): a text that only mentions it is no such error.
    if not isinstance(error, OSError | RuntimeError) and type(error) is not Exception:
        return None
    low = text.lower()
    found = next((kind for words, kind in SAID.items() if words in low), None)
    return found or ("unknown" if _STREAM.search(text) else None)


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
