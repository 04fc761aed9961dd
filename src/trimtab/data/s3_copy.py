"""The copy of a remote object in the cache: used only when its bytes are those that came, whole.

Beside each copy lies a note of its size and SHA-256, and a copy is hashed again each time it is used: a file that was
shortened, damaged or edited since is fetched anew. A connection that breaks off is tried again a few times. Never
talks to a store itself and never leaves half a file under a final name.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.files import whole_file, write_json_whole

TRIES = 4
"""How often an object is fetched before its broken connection is an error."""
_PAUSES = (0.2, 1.0, 4.0)
_STALE = 24 * 3600
_MD5 = re.compile(r"[0-9a-f]{32}")


class Broken(Exception):
    """A download that broke off; the text says how."""


class Version(NamedTuple):
    """What a store says of an object before it is fetched."""

    etag: str
    size: int


def is_whole(path: Path, size: int) -> bool | None:
    """Whether the copy is what was noted when it came; None where there is none, or none that can be vouched for."""
    note = _note(path)
    if note is None or not path.is_file():
        return None
    if path.stat().st_size != note.get("size") or note.get("size") != size:
        return False
    return hash_of(path, "sha256") == note.get("sha256")


def fetch_whole(path: Path, version: Version, get: Callable[[Path], None]) -> None:
    """Bring the object to `path` by `get`, which writes it into the file that it is given and raises Broken.

    An ETag that looks like an MD5 is held against the bytes. Stores that encrypt have other ETags of that form.
    """
    _clear(path)
    before: str | None = None
    told = "it broke off"
    for attempt in range(TRIES):
        if attempt:
            time.sleep(_PAUSES[attempt - 1])
        try:
            with whole_file(path) as scratch:
                get(scratch)
                found = scratch.stat().st_size
                if found != version.size:
                    raise Broken(f"it came as {found:,} bytes, and the store says {version.size:,}")
                made = hash_of(scratch, "sha256")
                etag = version.etag.strip('"')
                # What came twice the same is whole, and the ETag no MD5.
                if _MD5.fullmatch(etag) and made != before and hash_of(scratch, "md5") != etag:
                    before = made
                    raise Broken("its MD5 is not its ETag")
        except Broken as broken:
            told = str(broken)
            continue
        write_json_whole(_note_of(path), {"size": version.size, "sha256": made, "etag": version.etag})
        return
    raise Broken(told)


def hash_of(path: Path, kind: str) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _clear(path: Path) -> None:
    """Takes away what downloads of this copy left that were killed a day ago or before."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE:
                left.unlink()


def _note_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.whole.json")


def _note(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(_note_of(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
