"""Files of packages that were installed beside the interpreter's own folders (`pip install --target`, PYTHONPATH).

Reads what installers wrote down (`*.dist-info/RECORD`), once for each folder of sys.path; never imports anything.
"""

from __future__ import annotations

import csv
import os
import sys
from functools import cache
from pathlib import Path


def installed_in(folder: Path) -> set[str]:
    """What installed packages brought into a folder: modules, and folders with a separator at their end.

    The rest of the folder may be the user's own: programs are shipped with their packages beside them.
    """
    found: set[str] = set()
    for record in folder.glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                top, below, _ = row[0].partition("/") if row else ("", "", "")
                if top not in ("", "..") and not top.endswith(".dist-info"):
                    found.add(str(folder / top) + (os.sep if below else ""))
    return found


@cache
def _brought(entries: tuple[str, ...]) -> tuple[str, ...]:
    folders = {form(entry) for entry in entries for form in (os.path.abspath, os.path.realpath)}
    return tuple(sorted({path for folder in folders for path in installed_in(Path(folder))}))


def brought_along() -> tuple[str, ...]:
    """Prefixes of the files of installed packages that lie on sys.path outside site-packages."""
    outside = (
        entry for entry in sys.path if os.path.basename(entry) not in ("site-packages", "dist-packages")
    )
    return _brought(tuple(entry for entry in outside if os.path.isdir(entry or ".")))
