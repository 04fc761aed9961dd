"""What lies in a folder of data, which part of it is a split, and where a path in a row leads.

Only looks at names; no file is opened.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from trimtab.data.read import Row
from trimtab.data.sources import SPLITS
from trimtab.errors import RequestError


def inside(path: Path) -> list[Path]:
    """All files of a folder and of those in it, but hidden ones, in order."""
    names = (file for file in sorted(path.rglob("*")) if file.is_file())
    return [f for f in names if not any(part.startswith((".", "__")) for part in f.relative_to(path).parts)]


def of_split(path: Path, files: list[Path], split: str, setting: str) -> tuple[list[Path], list[str]]:
    """Where folders are named for splits (`train/`, `test/`), only those of the split that is asked for."""
    named = {folder.name: SPLITS[folder.name.lower()] for folder in path.iterdir() if _is_split(folder)}
    if not named:
        return files, []
    wanted = SPLITS.get(split, split)
    chosen = [name for name, of in named.items() if of == wanted]
    if not chosen:
        raise RequestError.of(
            f"{setting}={path}: no folder of the split `{split}`",
            f"the folders there are {', '.join(sorted(named))}",
            "set data.split to one of them, or name the folder itself",
        )
    left = sorted(set(named) - set(chosen))
    notes = [f"data.split={split} left out {', '.join(f'{name}/' for name in left)}"] if left else []
    return [file for file in files if file.relative_to(path).parts[0] not in left], notes


def _is_split(folder: Path) -> bool:
    return folder.is_dir() and folder.name.lower() in SPLITS


def from_folder(text: str, row: Row, what: str) -> Path:
    """The file that a path in a row names: absolute, from the home folder, or from the folder of the row's file.

    One that leads out of the data's folder is refused, also by a link: rows may come from others, and would name files
    of this machine that are not meant.
    """
    start = row.folder or Path()
    path = start / (Path(text).expanduser() if text.startswith("~/") else Path(text))
    roots = row.roots or ((start,) if row.folder is not None else ())
    try:
        there = _true_place(path)
    except (OSError, ValueError, RuntimeError):
        return path  # a name that no file can have, or links in a ring: reading it says so
    if not any(there.is_relative_to(root) for root in map(_resolved, roots)):
        raise RequestError.of(
            f"{row.where}: {what} {text[:200]!r} leads out of the data's folder"
            + (f" (to {there})" if str(there) != text else ""),
            "rows that came from others could name any file of this machine",
            f"put the {what}s beside the rows, or allow their folder: data.media_root={there.parent}",
        )
    return path


def is_there(path: Path) -> bool:
    """Whether a file of that name is there; one that no file can have is not."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _true_place(path: Path) -> Path:
    """Where a path leads when links are followed. Folders are looked at once: a set has millions of files in few."""
    parent, name = path.parent, path.name
    if name in ("", ".."):
        return path.resolve()
    there = _resolved(parent) / name
    return there.resolve() if there.is_symlink() else there


@lru_cache(maxsize=4096)
def _resolved(folder: Path) -> Path:
    return folder.resolve()
