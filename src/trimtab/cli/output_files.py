"""Files that a verb writes when its work is over, looked at before it begins: nothing long is done for nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trimtab.errors import RequestError


def check_outputs(outputs: Sequence[tuple[str, Path | None]]) -> None:
    """Refuse an option's file whose folder is not there, that may not be written, or that another option names too."""
    taken: dict[str, str] = {}
    for option, file in outputs:
        if file is None:
            continue
        folder = file.absolute().parent
        if not folder.is_dir():
            raise RequestError.of(
                f"{option} {file}: there is no folder {file.parent}",
                "it is written when the work is over, and would be lost",
                "make the folder, or name another file",
            )
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise RequestError.of(
                f"{option} {file}: it may not be written",
                "the file or its folder is read-only for you, or its disk is; it is written when the work is over",
                "name a file in another folder",
            )
        if (also := taken.setdefault(os.path.realpath(file), option)) != option:
            raise RequestError.of(
                f"{option} {file}: {also} writes the same file",
                "the one would replace the other",
                "name two files",
            )
