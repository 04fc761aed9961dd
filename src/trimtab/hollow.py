"""Files of weights that have shapes and no values, as a rehearsal of shapes writes them: how they are marked and known.

Such a file is as large as the real one and names every tensor; in the place of values there is a hole. The mark is
inside of the file, so it stays through renames and copies. Never imports torch.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from typing import Any, BinaryIO

RECORD = "trimtab-shapes-only"
"""In a file of torch.save: the record that lists the storages without values."""
KEY = "trimtab-shapes-only"
"""In the metadata of a safetensors file: the names of the tensors that do have values, as JSON."""
_LONGEST = 100_000_000
"""Bytes of a safetensors head, by its own definition."""


def head_of(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int] | None:
    """The head of a safetensors file, and where its values begin; None where there is none."""
    with open(path, "rb") as file:
        return head_in(file)


def head_in(file: BinaryIO) -> tuple[dict[str, Any], int] | None:
    """The same of what is open at its beginning."""
    first = file.read(9)
    if len(first) < 9 or first[8:] != b"{":
        return None
    (length,) = struct.unpack("<Q", first[:8])
    if length > _LONGEST:
        return None
    try:
        head = json.loads(first[8:] + file.read(length - 1))
    except ValueError:
        return None
    return (head, 8 + length) if isinstance(head, dict) else None


def known_in(head: dict[str, Any]) -> frozenset[str] | None:
    """The tensors that have values, by the head of a hollow safetensors file; None where the file is not hollow."""
    about = head.get("__metadata__")
    said = about.get(KEY) if isinstance(about, dict) else None
    return None if said is None else frozenset(json.loads(said))


def is_hollow(path: str | os.PathLike[str]) -> bool:
    """Whether a file is one of weights without values."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        archive = file.read(4) == b"PK\x03\x04"
    if archive:
        try:
            with zipfile.ZipFile(path) as opened:
                return any(name.endswith(f"/{RECORD}") for name in opened.namelist())
        except zipfile.BadZipFile:
            return False
    found = head_of(path)
    return found is not None and known_in(found[0]) is not None
