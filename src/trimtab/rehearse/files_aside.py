"""Where a rehearsal's writes go: into an overlay where the kernel permits it, else to the real files, which are listed.

The one place that decides between the two; the overlay itself is `overlay`, the list `written`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.rehearse import hollow_weights
from trimtab.rehearse.overlay import NotPermittedHere, Overlay, lay
from trimtab.rehearse.overlay_places import mount_of, mounts
from trimtab.rehearse.session import Settings
from trimtab.rehearse.written import IN_PLACE, Files, Look

_ERRNO = re.compile(r"\[Errno (\d+)\][^']*(?:'([^']+)')?")
_NO_ROOM = re.compile(r"\[Errno (28|122)\]|No space left on device|PytorchStreamWriter failed writing")


class Apart:
    """What a rehearsal's files are, while it runs."""

    def __init__(self, folder: Path, overlay: Overlay | None, why: str, keep: Path | None) -> None:
        self._folder = folder
        self._overlay = overlay
        self._keep = keep
        self._why = why
        here = Path.cwd()
        covered = overlay is not None and any(here.is_relative_to(layer.root) for layer in overlay.layers)
        self._look = Look(None if covered else here)

    @property
    def enter(self) -> Callable[[], None] | None:
        """Puts a new process into the overlay."""
        return self._overlay.enter if self._overlay is not None else None

    def blamed(self, message: str) -> str | None:
        """Why an error with this message is the overlay's, not the script's; None when it is not."""
        if self._overlay is None:
            return None
        if _NO_ROOM.search(message) and (place := self._overlay.full()) is not None:
            return (
                f"no room was left in {place}, where the files that the script writes are held until the end; set "
                "TMPDIR to a folder on a larger disk"
            )
        found = _ERRNO.search(message)
        # To change another user's file, the kernel would have to copy it in his name.
        if found and found.group(1) in ("1", "13", "75") and found.group(2):
            path = Path(found.group(2))
            nearest = next((one for one in (path, *path.parents) if one.exists()), path)
            if os.access(nearest, os.W_OK):
                return f"the overlay could not take a write to {path}, which belongs to another user; try --in-place"
        return None

    def gather(self) -> Files:
        """What was written. Moves it where it is to be kept."""
        real = hollow_weights.take_away(self._look.changes(self._folder))
        if self._overlay is None:
            return Files(False, self._why, "", real)
        written = sorted([*self._overlay.changes(), *real], key=lambda one: one.path)
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            self._overlay.keep(self._keep, written)
            run = self._folder / "run"
            if run.is_dir():
                shutil.move(run, self._keep / "run")
            hollow_weights.rename_hollow(self._keep)
        why = "outside of the folders that could be overlaid" if real else ""
        return Files(True, why, str(self._keep or ""), written)


@contextlib.contextmanager
def files(
    words: Sequence[str], folder: Path, settings: Settings, *, keep: Path | None, in_place: bool
) -> Iterator[Apart]:
    """Lay the overlay for a rehearsal with this session folder, if it can be and should be; take it down afterwards."""
    if keep is not None and (in_place or (keep.exists() and (not keep.is_dir() or any(keep.iterdir())))):
        raise RequestError.of(
            f"--keep-files {keep}" + (" with --in-place" if in_place else ": it is not empty"),
            "files that are written in place are there already"
            if in_place
            else "what is there could be overwritten",
            "leave one of the two options out" if in_place else "name a folder that is new or empty",
        )
    settings.apart = {}
    overlay, why = None, IN_PLACE
    if not in_place:
        try:
            overlay = lay(words, folder)
        except NotPermittedHere as error:
            if keep is not None:
                raise RequestError.of(
                    f"--keep-files {keep}: there is no overlay to keep files of",
                    str(error),
                    "leave it out: the report lists what is written for real",
                ) from None
            why = str(error)
    try:
        if overlay is not None:
            there = mounts()
            settings.apart = {
                str(layer.root): str(mount_of(layer.root, there).path) for layer in overlay.layers
            }
        yield Apart(folder, overlay, why, keep)
    finally:
        if overlay is not None:
            overlay.close()
