"""Folders that are whole or not there: work goes on under a temporary name and is renamed at the end.

Nothing here knows what is written.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import RequestError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `target`; it takes `target`'s place when the block ends without an error."""
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    old: Path | None = None
    try:
        yield scratch
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
    """Raise RequestError unless the folder is new, empty, or a model folder as an earlier export left it."""
    if not folder.exists():
        return
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / "config.json").is_file()):
        raise RequestError.of(
            f"--out {folder}: something else is there",
            "an export of this kind replaces its folder as a whole, and nothing of yours is to be lost",
            "give a new or an empty folder",
        )


def readable_size(count: int) -> str:
    """`270.9 MB`, in decimal units as file managers show them."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"
