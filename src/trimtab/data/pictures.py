"""A picture of a row, and a row with pictures: kept as a path or as encoded bytes, opened when a batch needs it.

`Picture.open()` gives an upright RGB image on the CPU, whatever mode the file has. A picture that cannot be decoded
whole is an error that names the row; nothing is ever put in its place, and no setting of PIL is changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from trimtab.data.clean import BadRow
from trimtab.data.picture_modes import as_rgb
from trimtab.data.sources import Cell
from trimtab.errors import RequestError

Message = dict[str, Any]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats that are decoded in this process by a codec. Others that PIL knows start programs, or are not pictures."""

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2"),
)
"""What files of these formats are called, where a folder is searched for pictures."""

MOST_PIXELS = 64_000_000
"""Largest width × height that is decoded where nothing else is said (`vision.max_pixels`)."""


@dataclass(frozen=True)
class Picture:
    """A picture, not yet opened: where its bytes are, and the row that it belongs to."""

    source: Path | bytes | Cell
    """A file, the encoded bytes themselves, or their place in a table on disk."""

    where: str
    """File and row (and the picture's name), as errors tell it."""

    most_pixels: int = MOST_PIXELS
    """A picture that declares more is refused before it is decoded."""

    size: tuple[int, int] | None = field(default=None, compare=False)
    """Width and height as `open` gives them, where it was opened before."""

    def open(self) -> Image.Image:
        """The picture, upright, as RGB; what was transparent is white."""
        try:
            return decode(self.read(), self.most_pixels)
        except BadRow as bad:
            raise RequestError.of(
                f"{self.where}: {bad}",
                "the row is nothing without its picture, and no other may stand in for it",
                "repair or remove the row; data.bad_rows=drop with vision.check_pictures=true leaves such rows out "
                "before training",
            ) from bad

    def read(self) -> bytes:
        """The encoded bytes; a file that is not there is a bad row."""
        source = self.source
        if isinstance(source, Cell):
            held = source.value() or {}
            if held.get("bytes") is not None:
                return bytes(held["bytes"])
            if held.get("path") is None:
                raise BadRow(f"`{source.column}` is null")
            source = _in_hub_cache(str(held["path"]))
        return source if isinstance(source, bytes) else _read(source, self.most_pixels)


@dataclass(frozen=True)
class PictureRow:
    """One conversation about pictures, or about none."""

    messages: tuple[Message, ...]
    """[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": …}]}, {"role": "assistant", …}]; each
    content is a list of parts, and the last message is the answer that is trained on."""

    pictures: tuple[Picture, ...]
    """In the order of the image parts."""

    answers: tuple[str, ...]
    """Every accepted answer to the last question, as often as it was given; the first is the one trained on."""

    where: str
    """File and row."""

    key: str = ""
    """The same for two rows of the same content; set when the pictures have been read."""


def asked(
    question: str, answers: tuple[str, ...], pictures: tuple[Picture, ...], where: str, key: str = ""
) -> PictureRow:
    """The plain row: pictures, then a question, then its answer. Without a question the pictures stand alone."""
    parts: list[Message] = [{"type": "image"} for _ in pictures]
    parts += [{"type": "text", "text": question}] if question else []
    messages = (
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": answers[0]}]},
    )
    return PictureRow(messages, pictures, answers, where, key)


def content_key(row: PictureRow, digests: tuple[str, ...]) -> str:
    """What two rows share that teach the same: messages, accepted answers, and the bytes of their pictures."""
    whole = json.dumps([row.messages, row.answers, digests], sort_keys=True)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def decode(data: bytes, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """Bytes of a picture as an upright RGB image; BadRow with the reason where that cannot be done in full."""
    if not data:
        raise BadRow("picture is empty (0 bytes)")
    formats = _formats()
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            check_size(image.size, most_pixels)
            image.load()  # the first frame of an animation
            # Some formats tell the true size only now.
            check_size(image.size, most_pixels)
            upright, form = _upright(image), image.format
    except (BadRow, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        raise BadRow(f"picture is none of {', '.join(formats)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadRow(
            "picture declares more pixels than PIL decodes: a decompression bomb, or to be made smaller"
        ) from None
    except Exception as error:
        # Codecs raise almost anything at a damaged file; all of it means that this picture is not whole.
        text = str(error).splitlines()
        raise BadRow(
            f"picture is damaged ({_without_counts(text[0] if text else type(error).__name__)})"
        ) from error
    # Past the codecs: what fails in a conversion of ours is not the picture's fault.
    return as_rgb(upright, form)


def check_size(size: tuple[int, int], most_pixels: int) -> None:
    """Refuse a picture by the size that it declares, before memory is taken for its pixels."""
    width, height = size
    if width < 1 or height < 1:
        raise BadRow(f"picture declares a size of {width} × {height}")
    if width * height > most_pixels:
        raise BadRow(
            f"picture declares {width:,} × {height:,} pixels, over vision.max_pixels={most_pixels}: "
            "a decompression bomb, or to be made smaller"
        )


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How to turn what a camera stored, by the orientation that EXIF gives."""


def _upright(image: Image.Image) -> Image.Image:
    try:
        told = image.getexif().get(ExifTags.Base.Orientation)
    except (SyntaxError, ValueError, TypeError, LookupError, OSError, struct.error):
        return image  # whole pixels under broken notes: nothing tells another way up than the stored one
    turn = _TURNS.get(told) if isinstance(told, int) else None
    return image if turn is None else image.transpose(turn)


def _in_hub_cache(text: str) -> Path:
    """A path that a data set of the hub names: of a file that came with it, not of any other on this machine."""
    import datasets
    from huggingface_hub import constants

    path = Path(text)
    roots = (datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE, constants.HF_HUB_CACHE)
    try:
        there = path.resolve()
        inside = any(there.is_relative_to(Path(root).expanduser().resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):
        raise BadRow("picture has a path that no file can have") from None
    if not inside:
        raise BadRow("picture has a path that leads out of the hub's cache")
    return path


def _read(file: Path, most_pixels: int) -> bytes:
    try:
        if file.is_file():
            # No format takes more bytes a pixel than sixteen, uncompressed.
            if file.stat().st_size > 16 * most_pixels + (1 << 20):
                raise BadRow(f"picture is a file of more bytes than vision.max_pixels={most_pixels} can take")
            return file.read_bytes()
        there = file.exists()
    except OSError as error:
        raise BadRow(f"picture cannot be read ({error.strerror or error})") from None
    except ValueError:
        raise BadRow("picture has a path that no file can have") from None
    raise BadRow("picture is not a file" if there else "picture is not there")


@cache
def _formats() -> tuple[str, ...]:
    """Those of the formats that this build of PIL can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _without_counts(text: str) -> str:
    """`image file is truncated (8 bytes not processed)` without its count, so that equal faults are counted as one."""
    return text.partition(" (")[0]
