"""The manifest of a folder: the list of what was written into it, with sizes and checksums, written last.

By it a reader tells whether the folder is still what was written, and a deletion removes nothing else. No file outside
the folder is ever opened by a name that a manifest tells, but for the names that the caller allows.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from trimtab import __version__
from trimtab.errors import TrimtabError
from trimtab.files import sync_file, sync_folder, write_json_whole

MANIFEST = "trimtab-manifest.json"
FORMAT = 1
_LONGEST = 1 << 26
"""Bytes of a manifest: room for some hundred thousand files."""
_CHUNK = 1 << 20
_READ_BY_LIBRARIES = frozenset(
    (".bin", ".ckpt", ".distcp", ".json", ".jinja", ".model", ".pkl", ".pt", ".pth", ".safetensors")
)
"""What a library may read in place of what was written, if it lies there."""


class Damaged(TrimtabError):
    """A folder is not what was written; the text says why, and starts with the name of the file."""


@dataclass(frozen=True)
class Part:
    """A file, or the first bytes of one that grows."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a folder says of itself."""

    files: Mapping[str, Part]
    """By name inside the folder, with forward slashes."""
    beside: Mapping[str, Part] = field(default_factory=dict)
    """Files elsewhere that it relies on, up to a size: each grows on."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What its writer tells of it, its step for example."""


def seal(
    folder: Path,
    about: Mapping[str, Any],
    beside: Mapping[str, Part] | None = None,
    without: Iterable[str] = (),
) -> None:
    """List all that is in the folder. When this returns, everything is on the disk, the list after the rest.

    `without`: names that will change later.
    """
    names = sorted(_inside(folder).keys() - {MANIFEST, *without})
    with _workers() as pool:
        parts = pool.map(lambda name: part_of(folder / name), names)
        list(pool.map(lambda name: sync_file(folder / name), names))
        files = dict(zip(names, parts, strict=True))
    for below, _, _ in os.walk(folder):
        sync_folder(Path(below))
    write_json_whole(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "written_by": f"trimtab {__version__}",
            **about,
            "files": {name: vars(part) for name, part in files.items()},
            "beside": {name: vars(part) for name, part in (beside or {}).items()},
        },
    )


def is_sealed(folder: Path) -> bool:
    """Whether there is a manifest, whatever is in it."""
    return os.path.lexists(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """The folder's manifest; raises Damaged where it cannot be trusted."""
    path = folder / MANIFEST
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Damaged(f"{MANIFEST} is no file")
        with path.open("rb") as file:
            text = file.read(_LONGEST + 1)
        found = json.loads(text) if len(text) <= _LONGEST else None
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{MANIFEST} cannot be read: it was cut short or changed") from None
    if not isinstance(found, dict):
        raise Damaged(f"{MANIFEST} cannot be read: it holds no list of files")
    if found.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} has format {str(found.get('format'))[:20]}; this version reads {FORMAT}")
    about = {k: v for k, v in found.items() if k not in ("format", "files", "beside")}
    return Manifest(_parts(found.get("files"), "/"), _parts(found.get("beside"), ""), about)


def verify(folder: Path, *, contents: bool = True, beside: Path | None = None) -> Manifest:
    """The manifest of a folder that is as it was written; raises Damaged with the first thing that is not.

    `contents=False` looks at names and sizes alone. `beside` is the folder of the files that it relies on.
    """
    manifest = read_manifest(folder)
    there = _inside(folder)
    for name, part in manifest.files.items():
        if name not in there:
            raise Damaged(f"{name} is missing")
        if there[name] != part.size:
            raise Damaged(f"{name} has {there[name]:,} bytes, and had {part.size:,} when it was written")
    for name in there.keys() - manifest.files.keys() - {MANIFEST}:
        if PurePosixPath(name).suffix in _READ_BY_LIBRARIES or name.endswith(".metadata"):
            raise Damaged(f"{name} was not there when it was written")
    if contents:
        with _workers() as pool:
            now = pool.map(lambda name: part_of(folder / name), manifest.files)
            for name, part in zip(manifest.files, now, strict=True):
                if part != manifest.files[name]:
                    raise Damaged(f"{name}: its content has changed since it was written")
    if beside is not None:
        for name, part in manifest.beside.items():
            _verify_beside(beside / name, part)
    return manifest


def _verify_beside(path: Path, part: Part) -> None:
    if not path.is_file():
        raise Damaged(f"{path.name} is missing, which it relies on")
    if path.stat().st_size < part.size:
        raise Damaged(f"{path.name}, which it relies on, ends before it")
    if part_of(path, part.size) != part:
        raise Damaged(f"{path.name}, which it relies on: its content has changed since it was written")


def _never(path: Path) -> bool:
    return False


holds_nothing: Callable[[Path], bool] = _never
"""Whether a file holds no values, so that its name and size say all: a rehearsal of shapes puts its own answer here. In
any other process such a file is not what its checksum says."""


def part_of(path: Path, size: int | None = None) -> Part:
    """The file as it is, or its first bytes."""
    if holds_nothing(path):
        return Part(path.stat().st_size, "0" * 64)
    digest, count = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while size is None or count < size:
            taken = file.readinto(buffer if size is None else buffer[: min(_CHUNK, size - count)])
            if not taken:
                break
            digest.update(buffer[:taken])
            count += taken
    return Part(count, digest.hexdigest())


def remove_listed(folder: Path) -> bool:
    """Delete what the folder's manifest lists, the list last; whether the folder is gone.

    What is not on the list stays, and the folder with it. Cut short, it is taken up again by another call.
    """
    if not only_listed(folder):
        return False
    for name in _inside(folder):
        if name != MANIFEST:
            (folder / name).unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    for below, _, _ in os.walk(folder, topdown=False):
        Path(below).rmdir()
    return True


def only_listed(folder: Path, besides: Iterable[str] = ()) -> bool:
    """Whether all that is in the folder is on its list: then it is ours to delete."""
    try:
        there = _inside(folder).keys() - {*besides}
        return not there or not there - read_manifest(folder).files.keys() - {MANIFEST}
    except Damaged:
        return False


def _inside(folder: Path) -> dict[str, int]:
    """Every file below the folder by its name, with its size; raises Damaged at a link, which may lead anywhere."""
    return dict(_walk(folder, ""))


def _walk(folder: Path, above: str) -> Iterator[tuple[str, int]]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{folder.name} is missing") from None
    for entry in entries:
        name = above + entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, name + "/")
        elif entry.is_file(follow_symlinks=False):
            yield name, entry.stat(follow_symlinks=False).st_size
        else:
            raise Damaged(f"{name} is no plain file")


def _parts(found: Any, separator: str) -> dict[str, Part]:
    """Checked entries of a manifest; names may have folders where `separator` is a slash."""
    if not isinstance(found, dict):
        raise Damaged(f"{MANIFEST} cannot be read: it holds no list of files")
    parts = {}
    for name, entry in found.items():
        if not _stays_inside(name.split(separator) if separator else [name]):
            raise Damaged(f"{MANIFEST} names {name[:100]!r}, which lies outside of the folder")
        size, digest = (entry.get(key) if isinstance(entry, dict) else None for key in ("size", "sha256"))
        if type(size) is not int or size < 0 or not isinstance(digest, str):
            raise Damaged(f"{MANIFEST} cannot be read: it tells no size and checksum of {name[:100]!r}")
        parts[name] = Part(size, digest)
    return parts


def _stays_inside(pieces: Iterable[str]) -> bool:
    leads_on = set("/\\:\0" if os.name == "nt" else "/\0")
    return all(piece not in ("", ".", "..") and not set(piece) & leads_on for piece in pieces)


def _workers() -> ThreadPoolExecutor:
    # Hashing and syncing leave Python's lock alone; more threads than this a disk does not serve.
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))
