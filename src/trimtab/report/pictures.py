"""Pictures of a run inside its page. Reads PNG files of the run's own folder alone; what is not there is said."""

from __future__ import annotations

import base64
from pathlib import Path

from trimtab.report.frame import text

LARGEST = 2**21
"""Bytes of one picture at most: a page must stay one that a browser opens at once."""
_PNG = b"\x89PNG\r\n\x1a\n"


def shown(folder: Path, names: object, label: str) -> str:
    """The pictures of these names, which a summary tells and nobody need believe."""
    listed = names if isinstance(names, list) else []
    return "".join(_one(folder, str(name), label) for name in listed)


def _one(folder: Path, name: str, label: str) -> str:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return text(f"{name} is missing")
    if file.stat().st_size > LARGEST:
        return text(f"{name} is too large for the page")
    content = file.read_bytes()
    if not content.startswith(_PNG):
        return text(f"{name} is no picture")
    coded = base64.b64encode(content).decode("ascii")
    return f'<img src="data:image/png;base64,{coded}" alt="{text(label)}">'
