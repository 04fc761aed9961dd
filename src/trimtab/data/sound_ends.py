"""Whether a sound file ends before its own header says, where libsndfile would not tell.

It shortens a wav to the bytes that are there, and an ogg to its last page, without a word. Only reads a few bytes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

# Programs that write to a pipe put a length here that no file has: 0x7ffff000 (espeak-ng), 0xffffffff (ffmpeg).
_UNKNOWN = 0x7FFF0000
# An ogg page has at most 27 + 255 + 255 * 255 bytes.
_LONGEST_PAGE = 65_307
_LAST_PAGE = 4


def declared_bytes_missing(source: Path | bytes, form: str) -> bool:
    """True where the file is shorter than it says. `form` is `wav`, `ogg` or another, of which nothing is told."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        if form == "wav":
            return _wav_is_short(file)
        return form == "ogg" and _ogg_is_short(file)


def _wav_is_short(file: BinaryIO) -> bool:
    """Whether the chunk of samples declares more bytes than follow it."""
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(12)
    # RIFX is the same with its bytes turned; the lengths of RF64 stand elsewhere, and libsndfile holds to them.
    order = {b"RIFF": "little", b"RIFX": "big"}.get(head[:4])
    if order is None:
        return False
    while len(start := file.read(8)) == 8:
        size = int.from_bytes(start[4:], "little" if order == "little" else "big")
        if start[:4] == b"data":
            return size < _UNKNOWN and file.tell() + size > length
        file.seek(size + size % 2, io.SEEK_CUR)
    return False


def _ogg_is_short(file: BinaryIO) -> bool:
    """Whether the last page is not marked as the end of its stream."""
    length = file.seek(0, io.SEEK_END)
    file.seek(max(0, length - _LONGEST_PAGE))
    tail = file.read()
    page = tail.rfind(b"OggS")
    return page < 0 or len(tail) < page + 6 or not tail[page + 5] & _LAST_PAGE
