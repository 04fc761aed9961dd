"""A picture opens upright, whole and as RGB, whatever its file is like; or it is refused by name."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from trimtab.data.clean import BadRow
from trimtab.data.picture_modes import as_rgb
from trimtab.data.pictures import Picture, decode
from trimtab.errors import RequestError

Encode = Callable[..., bytes]
RED = (200, 30, 60)


def saved(image: Image.Image, form: str, **save: Any) -> bytes:
    held = io.BytesIO()
    image.save(held, form, **save)
    return held.getvalue()


def first(image: Image.Image, place: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    assert image.mode == "RGB"
    found = image.getpixel(place)
    assert isinstance(found, tuple)
    return found


def pixel(data: bytes, place: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    return first(decode(data), place)


def near(found: tuple[int, ...], wanted: tuple[int, ...], by: int = 4) -> bool:
    return all(abs(one - other) <= by for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_every_format_gives_its_colour(form: str, picture: Encode) -> None:
    Image.init()
    if form not in Image.SAVE:
        pytest.skip(f"this build of PIL writes no {form}")
    data = picture(RED, form)
    assert decode(data).size == (8, 6)
    assert near(pixel(data), RED)


@pytest.mark.parametrize(
    ("mode", "colour", "form", "wanted"),
    [
        ("1", 1, "PNG", (255, 255, 255)),
        ("1", 0, "TIFF", (0, 0, 0)),
        ("L", 77, "PNG", (77, 77, 77)),
        ("LA", (77, 255), "PNG", (77, 77, 77)),
        ("LA", (77, 0), "PNG", (255, 255, 255)),
        ("RGBA", (*RED, 255), "PNG", RED),
        ("RGBA", (0, 0, 0, 0), "PNG", (255, 255, 255)),
        ("RGBA", (0, 0, 0, 128), "PNG", (127, 127, 127)),
        ("RGBA", (0, 0, 0, 0), "WEBP", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "TIFF", (255, 0, 0)),
        ("YCbCr", (76, 85, 255), "TIFF", (254, 0, 0)),
        ("YCbCr", (76, 85, 255), "JPEG", (254, 0, 0)),
        ("LAB", (128, 128, 128), "TIFF", (119, 119, 119)),
    ],
)
def test_every_mode_shows_what_the_file_means(
    mode: str, colour: Any, form: str, wanted: tuple[int, ...], picture: Encode
) -> None:
    data = picture(colour, form, mode)
    assert near(pixel(data), wanted)


def test_a_palette_with_a_transparent_entry_is_laid_over_white() -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([10, 20, 30, *RED])
    image.putpixel((1, 0), 1)
    data = saved(image, "PNG", transparency=0)
    assert pixel(data) == (255, 255, 255)
    assert pixel(data, (1, 0)) == RED
    assert pixel(saved(image, "GIF", transparency=0)) == (255, 255, 255)
    partly = saved(image, "PNG", transparency=bytes([128, 255]))
    assert near(pixel(partly), (132, 137, 142), by=2)


def test_a_grey_and_a_colour_that_are_named_transparent(picture: Encode) -> None:
    assert pixel(picture(9, "PNG", "L", transparency=9)) == (255, 255, 255)
    assert pixel(picture(RED, "PNG", transparency=RED)) == (255, 255, 255)
    assert pixel(picture(RED, "PNG", transparency=(1, 2, 3))) == RED


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_and_not_clipped(form: str) -> None:
    image = Image.fromarray(np.array([[0, 257, 32896, 65535]], np.uint16))
    data = saved(image, form)
    assert [pixel(data, (x, 0))[0] for x in range(4)] == [0, 1, 128, 255]


def test_sixteen_bits_with_a_transparent_value() -> None:
    image = Image.fromarray(np.array([[0, 1000, 65535]], np.uint16))
    data = saved(image, "PNG")
    # tRNS of a grey picture of sixteen bits is one value of two bytes, and stands before the pixels.
    body = b"tRNS" + struct.pack(">H", 1000)
    chunk = struct.pack(">I", 2) + body + struct.pack(">I", zlib.crc32(body))
    data = data.replace(data[data.index(b"IDAT") - 4 :], chunk + data[data.index(b"IDAT") - 4 :])
    assert [pixel(data, (x, 0))[0] for x in range(3)] == [0, 255, 255]


def test_numbers_of_32_bits_are_scaled_by_what_they_hold() -> None:
    whole = Image.fromarray(np.array([[-100, 0, 100]], np.int32))
    assert [pixel(saved(whole, "TIFF"), (x, 0))[0] for x in range(3)] == [0, 128, 255]
    share = Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32))
    assert [pixel(saved(share, "TIFF"), (x, 0))[0] for x in range(3)] == [0, 128, 255]
    bytes_as_floats = Image.fromarray(np.array([[0.0, 7.0, 200.0]], np.float32))
    assert [pixel(saved(bytes_as_floats, "TIFF"), (x, 0))[0] for x in range(3)] == [0, 7, 200]
    metres = Image.fromarray(np.array([[-2.0, 0.0, 2.0]], np.float32))
    assert [pixel(saved(metres, "TIFF"), (x, 0))[0] for x in range(3)] == [0, 128, 255]
    with pytest.raises(BadRow, match="not finite"):
        decode(saved(Image.fromarray(np.array([[0.0, np.nan]], np.float32)), "TIFF"))


def test_a_cmyk_jpeg_of_either_convention(picture: Encode) -> None:
    adobe = picture((0, 255, 255, 0), "JPEG", "CMYK", quality=95)
    assert near(pixel(adobe), (255, 0, 0))
    # Without Adobe's mark the same bytes are the ink itself: full cyan under full black.
    start = adobe.index(b"\xff\xee")
    length = int.from_bytes(adobe[start + 2 : start + 4], "big")
    plain = adobe[:start] + adobe[start + 2 + length :]
    assert near(pixel(plain), (0, 0, 0))
    inverted = picture((255, 0, 0, 255), "JPEG", "CMYK", quality=95)
    plain = inverted[:start] + inverted[start + 2 + length :]
    assert near(pixel(plain), (255, 0, 0))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture_upright(form: str, orientation: int) -> None:
    upright = Image.new("RGB", (32, 16), "white")
    upright.paste((0, 0, 255), (0, 0, 8, 8))
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(stored, form, exif=exif)
    assert decode(data).size == (32, 16)
    assert near(pixel(data, (3, 3)), (0, 0, 255), by=12)
    assert near(pixel(data, (28, 12)), (255, 255, 255), by=12)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "noise", [b"Exif\0\0MM\0*garbage and more garbage", b"Exif\0\0no header of TIFF at all"]
)
def test_broken_exif_leaves_the_picture_as_it_is_stored(noise: bytes, picture: Encode) -> None:
    data = picture(RED, "JPEG")
    block = b"\xff\xe1" + struct.pack(">H", len(noise) + 2) + noise
    assert near(pixel(data[:2] + block + data[2:]), RED)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(form: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in (RED, (0, 255, 0), (0, 0, 255))]
    data = saved(frames[0], form, save_all=True, append_images=frames[1:])
    assert near(pixel(data), RED)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that declares a size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    pixels = b"IDAT" + zlib.compress(b"\0" * 64)
    rest = struct.pack(">I", len(pixels) - 4) + pixels + struct.pack(">I", zlib.crc32(pixels))
    return b"\x89PNG\r\n\x1a\n" + chunk + rest


def test_a_bomb_is_refused_by_what_it_declares(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS
    file = tmp_path / "bomb.png"
    file.write_bytes(bomb(9000, 9000))
    with pytest.raises(
        RequestError, match=r"rows\.jsonl, line 3: picture declares 9,000 × 9,000 pixels, over vis"
    ):
        Picture(file, "rows.jsonl, line 3").open()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(BadRow, match="picture declares"):
            decode(bomb(12000, 12000))
        with pytest.raises(BadRow, match="more pixels than PIL decodes"):
            decode(bomb(60000, 60000))
    assert before == Image.MAX_IMAGE_PIXELS
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_the_limit_is_a_setting(picture: Encode) -> None:
    data = picture(size=(100, 100))
    assert Picture(data, "here", most_pixels=10_000).open().size == (100, 100)
    with pytest.raises(RequestError, match=r"over vision\.max_pixels=9999"):
        Picture(data, "here", most_pixels=9_999).open()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_a_truncated_picture_is_refused(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    data = saved(Image.fromarray(noise), form)
    assert decode(data).size == (64, 64)
    with pytest.raises(BadRow, match=r"picture is (damaged|none of)"):
        decode(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"picture is empty \(0 bytes\)"),
        (b"this is a text, not a picture", "picture is none of PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "picture is none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "picture is none of PNG"),
        (b"\x89PNG\r\n\x1a\n", "picture is none of PNG"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(data)
    with pytest.raises(RequestError, match=f"rows.jsonl, line 9 .x.: {reason}"):
        Picture(file, "rows.jsonl, line 9 (x)").open()


def test_a_missing_file_a_folder_and_an_impossible_name(tmp_path: Path) -> None:
    for source, reason in (
        (tmp_path / "no.png", "picture is not there"),
        (tmp_path, "picture is not a file"),
        (tmp_path / ("x" * 300), "picture (cannot be read|is not there)"),
        (Path("a\0b.png"), "picture (has a path that no file can have|is not there)"),
    ):
        with pytest.raises(RequestError, match=f"^line 1: {reason}"):
            Picture(source, "line 1").open()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"])
def test_damaged_bytes_end_in_a_picture_or_in_a_bad_row(form: str) -> None:
    chance = random.Random(form)
    noise = np.random.default_rng(1).integers(0, 255, (16, 16, 3), np.uint8)
    whole = saved(Image.fromarray(noise), form)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(min(len(data), 200))] = chance.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                image = decode(bytes(data), most_pixels=1_000_000)
            except BadRow:
                continue
        assert image.mode == "RGB"
        assert image.width * image.height <= 1_000_000


def _size(picture: Picture) -> tuple[int, int]:
    return picture.open().size


def test_a_picture_is_small_to_send_and_opens_in_a_forked_worker(tmp_path: Path, picture: Encode) -> None:
    file = tmp_path / "large.png"
    file.write_bytes(picture(size=(2000, 1000)))
    one = Picture(file, "rows.jsonl, line 1")
    one.open()
    assert len(pickle.dumps(one)) < 500
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_size, [one, Picture(picture(), "x")]) == [(2000, 1000), (8, 6)]


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [("RGBa", (227, 142, 157)), ("PA", (227, 142, 157)), ("HSV", RED), ("RGBX", RED), ("YCbCr", RED)],
)
def test_modes_that_only_a_decoder_gives(mode: str, wanted: tuple[int, ...]) -> None:
    image = Image.new("RGBA", (2, 2), (*RED, 128)).convert(mode)
    assert near(first(as_rgb(image, None)), wanted)


def test_premultiplied_grey_is_laid_over_white() -> None:
    image = Image.new("LA", (2, 2), (200, 128)).convert("La")
    assert near(first(as_rgb(image, None)), (227, 227, 227))
