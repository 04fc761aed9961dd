"""Which folders of this machine a rehearsal may write to, and where their overlays can lie. Linux; reads only.

An overlay is laid over the topmost folder that the user may write to, not over a whole mount: to write below a folder
that belongs to somebody else, the kernel would have to make a copy of that folder in his name, and may not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

NEVER = (Path("/proc"), Path("/sys"), Path("/dev"), Path("/run"))
"""Devices, shared memory and sockets: a rehearsal needs the real ones, and none is a user's file."""

_NO_FILES = re.compile(
    "proc|sysfs|devtmpfs|devpts|cgroup2?|securityfs|debugfs|tracefs|mqueue|hugetlbfs|bpf|pstore|configfs|autofs|"
    "fusectl|binfmt_misc|rpc_pipefs|nsfs|efivarfs"
)
_HOLDS_LAYERS = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs"))
"""File systems on which the kernel can keep what is written."""
_LEAST_MEMORY = 2**30
"""Bytes that a file system in memory must have; else the namespace gets one of its own."""
_MOST_LOOKED_AT = 2000
"""Entries that are looked at in search of places that nobody named."""
_MOST_PARTS = 100
"""Folders of one folder that get an overlay each."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    path: Path
    kind: str


def mounts() -> list[Mount]:
    """All mounts, each path once: of several on one path the last is what is seen."""
    found: dict[Path, Mount] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        # Octal escapes stand for blanks, tabs, line ends and backslashes.
        path = Path(before.split()[4].encode().decode("unicode_escape").encode("latin-1").decode())
        found[path] = Mount(path, after.split()[0])
    return list(found.values())


def mount_of(path: Path, there: Iterable[Mount]) -> Mount:
    """The mount that a path lies on."""
    return max((mount for mount in there if path.is_relative_to(mount.path)), key=lambda m: len(m.path.parts))


def roots(words: Iterable[str], *, privileged: bool, there: list[Mount]) -> list[Path]:
    """The folders to overlay, outer ones first."""
    found: set[Path] = set()
    for path in _named(words):
        found |= _root_of(path, privileged=privileged, there=there)
    for mount in there:
        if not _NO_FILES.fullmatch(mount.kind):
            for path in _writable_below(mount, there):
                found |= _root_of(path, privileged=privileged, there=there)
    outermost: list[Path] = []
    for root in sorted(found, key=lambda path: len(path.parts)):
        outer = [other for other in outermost if root.is_relative_to(other)]
        if not any(mount_of(other, there) == mount_of(root, there) for other in outer):
            outermost.append(root)
    return outermost


def _named(words: Iterable[str]) -> Iterator[Path]:
    """Where a script writes: its working directory, home, temporary files, and what its words and variables name."""
    yield Path.cwd()
    yield Path(tempfile.gettempdir())
    said = [part for word in words for part in (word, word.partition("=")[2])]
    said += [os.path.expanduser("~"), *os.environ.values()]
    for text in (text for text in said if os.sep in text):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            path = Path(text).expanduser()
            # What is not there yet is made in the first folder above that is.
            yield next((one for one in (path, *path.parents) if one.is_dir()), Path.cwd())


def _writable_below(mount: Mount, there: list[Mount]) -> Iterator[Path]:
    """The mount's own folder, or the folders in its first two levels to which the user may write."""
    left = _MOST_LOOKED_AT
    others = {str(path) for path in (*NEVER, *(other.path for other in there))}
    level = [mount.path]
    for depth in range(3):
        below: list[Path] = []
        for folder in level:
            if folder != Path("/") and os.access(folder, os.W_OK | os.X_OK):
                yield folder
            elif depth < 2 and left > 0:
                with contextlib.suppress(OSError), os.scandir(folder) as entries:
                    for entry in islice(entries, left):
                        left -= 1
                        # What is mounted there is looked at as a mount.
                        if entry.path not in others and entry.is_dir(follow_symlinks=False):
                            below.append(Path(entry.path))
        level = below


def _root_of(path: Path, *, privileged: bool, there: list[Mount]) -> set[Path]:
    """The topmost folder above a path from which the kernel can copy down to it, or its parts; nothing where nothing is
    written."""
    path = path.resolve()
    mount = mount_of(path, there)
    if (
        any(path.is_relative_to(never) for never in NEVER)
        or _NO_FILES.fullmatch(mount.kind)
        or not os.access(path, os.W_OK)
    ):
        return set()
    if not privileged and _is_of_a_group(path):
        return set()
    found: set[Path] = set()
    while True:
        whole = privileged or not _holds_mounts(path, there)
        found = {path} if whole else found | set(_parts_without_mounts(path, there))
        if path == mount.path or not (privileged or path.stat().st_uid == os.getuid()):
            break
        if path.parent == Path("/") or not os.access(path.parent, os.W_OK):
            break
        path = path.parent
    return found - {Path("/")}


def _holds_mounts(folder: Path, there: list[Mount]) -> bool:
    return any(mount.path != folder and mount.path.is_relative_to(folder) for mount in there)


def _parts_without_mounts(folder: Path, there: list[Mount]) -> Iterator[Path]:
    """The folders of a folder beneath which something is mounted. A user who is no administrator cannot lay an overlay
    over that one (the kernel would have to show him what the mount hides), but over those of its folders that hold no
    mount; what is mounted is looked at as a mount. Files that lie in the folder itself stay real, and are listed."""
    if folder.stat().st_mode & stat.S_ISVTX:
        return  # shared by all, as /tmp is: folders come and go there while this looks
    mounted = {mount.path for mount in there}
    with os.scandir(folder) as entries:
        found = islice(entries, _MOST_LOOKED_AT)
        inside = sorted(Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False))
    for path in inside[:_MOST_PARTS]:
        if path in mounted or not os.access(path, os.W_OK) or _is_of_a_group(path):
            continue
        if _holds_mounts(path, there):
            yield from _parts_without_mounts(path, there)
        else:
            yield path


def _is_of_a_group(path: Path) -> bool:
    """Whether what is made in a folder belongs to a group that is not the user's first: a user who is no administrator
    can take no other into the overlay, and could not write there."""
    status = path.stat()
    return bool(status.st_mode & stat.S_ISGID) and status.st_gid != os.getegid()


def scratch_places(there: list[Mount]) -> list[Path]:
    """Folders whose file system can keep what is written: on a disk first, in memory (if there is much of it) last."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    asked = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp"), cache, Path("/dev/shm")]
    usable = [
        path.resolve()
        for path in asked
        if path.is_dir()
        and os.access(path, os.W_OK)
        and mount_of(path.resolve(), there).kind in _HOLDS_LAYERS
    ]
    in_memory = {path for path in usable if mount_of(path, there).kind == "tmpfs"}
    large = {path for path in in_memory if shutil.disk_usage(path).free > _LEAST_MEMORY}
    ordered = sorted(dict.fromkeys(usable), key=lambda path: path in in_memory)
    return [path for path in ordered if path not in in_memory or path in large]
