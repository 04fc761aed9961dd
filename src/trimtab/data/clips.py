"""A clip of a row: a file with sound, kept as its path and decoded when a codec needs it.

`Clip.sound(rate)` gives one channel at the rate that is asked for. A clip that cannot be decoded whole is an error that
names the row.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trimtab.data.sound import Samples, read_sound, resample
from trimtab.errors import RequestError

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus")
"""What files with clips are called, where a folder is searched for them."""


@dataclass(frozen=True)
class Clip:
    """A file with sound, and the row that it belongs to."""

    path: Path
    where: str
    """File and row (and the clip's name), as errors tell it."""

    def sound(self, rate: int) -> Samples:
        """All of it, mixed down to one channel, at `rate` samples a second."""
        found = read_sound(self.path, self.where)
        return resample(found.samples, found.rate, rate)

    @property
    def key(self) -> str:
        """The SHA-256 of the file's content: the same for two files of the same bytes."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise RequestError.of(
                f"{self.where}: clip cannot be read ({error.strerror or error})",
                "a row is nothing without its clip",
                "put the file back, or remove the row",
            ) from None
