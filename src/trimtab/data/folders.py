"""What lies in a folder of data, which part of it is a split, and where a path in a row leads.

Only looks at names; no file is opened.
"""

from __future__ import annotations

from pathlib import Path

from trimtab.data.clean import Tally
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


def from_folder(text: str, folder: Path, what: str, tally: Tally) -> Path:
    """The file that a path in a row names: absolute, from the home folder, or from the folder of the row's file."""
    path = Path(text).expanduser() if text.startswith("~/") else Path(text)
    if path.is_absolute():
        return path
    depth = 0
    for part in path.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            tally.change(f"{what} path that leads out of the folder of its file")
            break
    return folder / path
