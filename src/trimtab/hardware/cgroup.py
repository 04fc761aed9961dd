"""Reads the memory limit that a container or a batch system set for this process (cgroup v1 and v2).

The kernel's own figures are the whole machine's: a process that believes them is killed at its limit. It only
reads; it never sets a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# What cgroup v1 writes for "no limit" is a page short of 2^63; no machine has this much.
_UNLIMITED = 2**60


@dataclass(frozen=True)
class MemoryLimit:
    limit_bytes: int
    free_bytes: int


def memory_limit(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> MemoryLimit | None:
    """The limit that leaves the least, of this process's group and the groups around it; None without any."""
    found = [limit for folder in _folders(root, own) if (limit := _limit_of(folder)) is not None]
    if not found:
        return None
    return MemoryLimit(min(f.limit_bytes for f in found), min(f.free_bytes for f in found))


def _folders(root: Path, own: Path) -> Iterator[Path]:
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = root / "memory" if controllers else root
            folder = top / path.lstrip("/")
            # Inside a container the path may be the host's; then only the top is there, and it is this group's own.
            yield from (f for f in (folder, *folder.parents) if f.is_relative_to(top) and f.is_dir())


def _limit_of(folder: Path) -> MemoryLimit | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _text(folder / limit_name)
        if limit.isdecimal() and int(limit) < _UNLIMITED:
            used = int(_text(folder / used_name) or 0)
            stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines())
            # Cached files count as used, and are dropped when memory is needed.
            held = max(0, used - int(stat.get(cache_name, 0)))
            return MemoryLimit(int(limit), max(0, int(limit) - held))
    return None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
