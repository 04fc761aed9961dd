"""Files that are hostile, cut off or of another kind end in an error that says where; none is waited for."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trimtab.data import read as reading
from trimtab.data.pictures import Picture
from trimtab.data.read import read_file
from trimtab.errors import RequestError, shown

GOOD = b'{"text": "a"}\n'


def refused(path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RequestError, match=why):
        read_file(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2: .*nested deeper than 100 levels"),
        (b'{"text": ' + b"[" * 300 + b"]" * 300 + b"}", "line 2: .*nested deeper than 100 levels"),
        (b'{"text": "a", "text": "b"}', r"line 2: .*the key 'text' stands twice in one object, column 15"),
        (b'{"x": {"a": 1, "b": 2, "a": 1}}', "line 2: .*the key 'a' stands twice"),
        (b'{"text": ' + b"9" * 400 + b"}", "line 2: .*a number of 400 digits"),
        (b'{"text": ' + b"9" * 5000 + b"}", "line 2: .*a number of 5,000 digits"),
        (b'{"text": -1e400}', "line 2: .*beyond what a number type holds"),
        (b'{"\\udc00": 1}', r"line 2: the column '\\udc00'"),
        (b'{"text": "\xed\xa0\x80"}', "line 2: byte 0xed is not UTF-8"),
        (b'{"text": "a"}\r{"text": "b"}', r"line 2: .*Extra data.*\n.*\n.*a CR alone ends none"),
        (b"\0" * 50, "line 2: not valid JSON"),
    ],
)
def test_lines_of_json_that_are_not_what_they_seem(tmp_path: Path, line: bytes, why: str) -> None:
    refused(tmp_path / "rows.jsonl", GOOD + line + b"\n", why)


def test_rows_of_a_list_are_named(tmp_path: Path) -> None:
    text = b'[{"text": "a"},\n {"text": "b",\n  "text": "c"}, {"text": "d"}]'
    refused(tmp_path / "rows.json", text, r"line 2 \(row 2\): .*the key 'text' stands twice")
    refused(tmp_path / "rows.json", b"[" * 100_000, "line 1.*nested deeper")
    refused(
        tmp_path / "rows.json",
        b'[{"a": ' + b"[" * 200 + b"]" * 200 + b"}]",
        r"line 1 \(row 1\): .*nested deeper",
    )


def test_one_endless_line_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LONGEST_LINE", 1 << 20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD)
    os.truncate(path, 1 << 40)  # a terabyte of zeros that takes no room
    with pytest.raises(RequestError, match="line 2: longer than 1 MiB"):
        read_file(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet", "rows.csv"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(RequestError, match="not a file"):
            read_file(tmp_path / name)
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    with pytest.raises(RequestError, match="not a file"):
        read_file(tmp_path / "zero.jsonl")


def test_archives_are_named_and_not_unpacked(tmp_path: Path) -> None:
    import gzip
    import zipfile

    refused(tmp_path / "rows.jsonl", gzip.compress(GOOD * 100), "a compressed file or an archive")
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../evil.jsonl", os.urandom(4000))
    refused(tmp_path / "rows.json", held.getvalue(), "a compressed file or an archive")


def test_csv_with_what_no_text_has(tmp_path: Path) -> None:
    refused(tmp_path / "rows.csv", b"a,b\n1,2\n1,\x002\n", "line 3: a NUL character")
    refused(tmp_path / "rows.csv", "a,b\n1,é\n".encode("utf-16-le"), "NUL character|not UTF-8")
    refused(tmp_path / "rows.csv", b'"a\nb","a\nb"\n1,2\n', r"names a column twice \(a b, a b\)")


def test_parquet_names_the_column_and_the_rows_before_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    offsets = struct.pack("<601i", *range(0, 1202, 2))
    text = b"ab" * 500 + b"\xff\xfe" + b"ab" * 99
    broken = pa.StringArray.from_buffers(600, pa.py_buffer(offsets), pa.py_buffer(text))
    pq.write_table(pa.table({"a": ["x"] * 600, "b": broken}), path, use_dictionary=False)
    with pytest.raises(RequestError, match=r"after row 256, column `b`: not a readable Parquet file"):
        read_file(path)
    pq.write_table(
        pa.table({"a": ["xyzzy" * 9] * 9}),
        path,
        use_dictionary=False,
        write_page_checksum=True,
        compression="none",
    )
    raw = path.read_bytes()
    refused(path, raw.replace(b"xyzzy", b"xyzzx"), "column `a`")
    refused(path, raw[:-20], "not a readable Parquet file")
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(RequestError, match="a column of the name a twice"):
        read_file(path)
    pq.write_table(pa.table({"a": pa.nulls(3_000_000)}), path)
    with pytest.raises(RequestError, match="a decompression bomb"):
        read_file(path)
    assert len(read_file(path, most=5)) >= 5


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG that declares a size, whatever its pixels are."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(pixels))
        + chunk(b"IEND", b"")
    )


def test_pictures_that_are_bombs_or_not_whole(picture: Callable[..., bytes], tmp_path: Path) -> None:
    def said(data: bytes | Path, most: int = 64_000_000) -> str:
        with pytest.raises(RequestError) as error:
            Picture(data, "rows.jsonl, line 3", most).open()
        assert str(error.value).startswith("rows.jsonl, line 3: picture")
        return str(error.value)

    assert "decompression bomb" in said(png(100_000, 100_000))
    assert "decompression bomb" in said(png(1, (1 << 31) - 1))
    assert "decompression bomb" in said(picture(), most=10)
    said(png(0, 5))
    said(png(5, 5, b"\0"))
    noise = os.urandom(60 * 50 * 3)
    jpeg = io.BytesIO()
    Image.frombytes("RGB", (60, 50), noise).save(jpeg, "JPEG")
    assert "damaged" in said(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    big = tmp_path / "big.png"
    big.write_bytes(picture())
    os.truncate(big, 1 << 40)
    assert "more bytes than" in said(big)
    os.mkfifo(tmp_path / "fifo.png")
    assert "not a file" in said(tmp_path / "fifo.png")


def test_pictures_of_odd_kinds_are_opened(picture: Callable[..., bytes]) -> None:
    frames = [Image.new("P", (8, 6), colour) for colour in (1, 2)]
    moving = io.BytesIO()
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    nonsense = b"Exif\0\0II*\0\xff\xff\xff\xff\xff\xff" + b"\xff" * 30
    for data in (
        moving.getvalue(),
        picture((0, 200, 200, 0), "JPEG", "CMYK"),
        picture(40_000, "PNG", "I;16"),
        picture(form="JPEG", exif=nonsense),
    ):
        opened = Picture(data, "x").open()
        assert (opened.mode, opened.size) == ("RGB", (8, 6))


def wav(channels: int = 1, rate: int = 24_000, samples: bytes = b"\x10\x00" * 4800, **sizes: int) -> bytes:
    """A WAV with whatever its header says."""
    kind, bits = (3, 32) if sizes.pop("floats", 0) else (1, 16)
    width = max(channels, 1) * bits // 8
    told = struct.pack("<HHIIHH", kind, channels, rate, (rate * width) & 0xFFFFFFFF, width, bits)
    body = b"WAVEfmt " + struct.pack("<I", sizes.get("fmt", 16)) + told
    body += b"data" + struct.pack("<I", sizes.get("data", len(samples))) + samples
    return b"RIFF" + struct.pack("<I", sizes.get("riff", len(body))) + body


@pytest.mark.parametrize(
    "data",
    [
        wav(channels=0),
        wav(channels=1000),
        wav(rate=0),
        wav(rate=(1 << 32) - 1),
        wav(samples=b""),
        wav(data=1 << 30),
        wav(fmt=7),
        wav(samples=np.array([0.0, float("nan")] * 900, "<f4").tobytes(), floats=1),
        wav()[:30],
        b"RIFF",
        b"",
    ],
)
def test_clips_whose_header_lies(data: bytes, tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="clips are decoded by soundfile (extra `voice`)")
    from trimtab.data.sound import read_sound

    path = tmp_path / "clip.wav"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(RequestError, match=r"rows\.jsonl, line 3: clip"):
            read_sound(source, "rows.jsonl, line 3")


def test_a_clip_of_ten_hours_is_refused_before_it_is_decoded(
    sound: Callable[..., bytes], tmp_path: Path
) -> None:
    from trimtab.data.sound import read_sound

    path = tmp_path / "long.wav"
    seconds = 36_000
    path.write_bytes(wav(rate=8_000, samples=b"", data=seconds * 16_000, riff=36 + seconds * 16_000))
    os.truncate(path, 44 + seconds * 16_000)
    with pytest.raises(RequestError, match=r"clip is longer than the 9\.3 h that are decoded of such a one"):
        read_sound(path, "long.wav")
    assert len(read_sound(sound(), "short.wav").samples) == 12_000


def test_a_message_shows_what_a_file_held_and_steers_no_terminal() -> None:
    error = RequestError.of("\x1b[31m\ud800" + "x" * 5000, "a\u202eb", "c\td")
    assert str(error).encode()
    assert "\x1b" not in str(error)
    assert "\u202e" not in str(error)
    assert len(str(error)) < 2200
    assert shown("plain é\ntext") == "plain é\ntext"
    assert json.dumps(shown("\udfff")) == '"\\\\udfff"'
