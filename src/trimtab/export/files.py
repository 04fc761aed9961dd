"""Folders that are whole or not there, and what may be replaced: only what an export wrote, by the list it left.

Nothing here knows what is written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.files import write_json_whole
from trimtab.reading import parse_json, read_text

MARK = ".trimtab-export.json"


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`; it takes `target`'s place when the block ends without an error."""
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    old: Path | None = None
    try:
        yield scratch
        write_json_whole(scratch / MARK, {"entries": sorted(os.listdir(scratch))})
        scratch.chmod(0o755)
        for file in scratch.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
            target.rename(old / target.name)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if old is not None:
            if not target.exists():
                (old / target.name).rename(target)
            shutil.rmtree(old, ignore_errors=True)


def check_replaceable(folder: Path) -> None:
    """Raise RequestError unless the folder is new, empty, or as an earlier export left it, with nothing put in."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or set(os.listdir(folder)) - {MARK, *_written(folder)}:
        raise RequestError.of(
            f"--out {folder}: something else is there",
            "an export of this kind replaces its folder as a whole, and nothing of yours is to be lost",
            "give a new or an empty folder",
        )


def check_free(target: Path) -> None:
    """Raise RequestError where a file is that no export is known to have written."""
    if os.path.lexists(target) and target.name not in _written(target.parent):
        raise RequestError.of(
            f"{target}: a file that no export is known to have written",
            "it would be replaced, and nothing of yours is to be lost",
            "move it away, or give another --out",
        )


def claim_file(target: Path) -> None:
    """The file is about to be written: from now on it is on its folder's list."""
    check_free(target)
    entries = {*_written(target.parent), target.name}
    write_json_whole(target.parent / MARK, {"entries": sorted(entries)})


def _written(folder: Path) -> list[str]:
    """What exports have written into a folder, as its list says; nothing where it has none that can be read."""
    try:
        return [str(name) for name in parse_json(read_text(folder / MARK))["entries"]]
    except (FileNotFoundError, NotADirectoryError, RequestError, ValueError, TypeError, LookupError):
        return []


def readable_size(count: int) -> str:
    """`270.9 MB`, in decimal units as file managers show them."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
