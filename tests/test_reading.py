"""Small files that are no files, of another encoding, too big, too deep, or say two things."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from trimtab import reading
from trimtab.errors import RequestError
from trimtab.reading import parse_json, read_bytes, read_json_object, read_text


def test_what_is_no_file_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIPE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match="is a pipe"):
        read_bytes(tmp_path / "pipe")
    with pytest.raises(RequestError, match="is a folder"):
        read_bytes(tmp_path)
    with pytest.raises(RequestError, match="is a device"):
        read_bytes(Path("/dev/zero"))
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        with pytest.raises(RequestError, match="is a socket"):
            read_bytes(Path("socket"))
    assert read_bytes(Path("/dev/null")) == b""


def test_a_pipe_that_is_written_to_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"seed: 1\n" * 20_000))
    writer.start()
    assert read_bytes(pipe) == b"seed: 1\n" * 20_000
    writer.join()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a: é".encode("utf-16"), "is UTF-16 text"),
        ("a: é".encode("utf-32"), "is UTF-32 text"),
        (b"a: 1\nb: \0", "zero byte in line 2"),
        (b"a: 1\nb: \xe9\n", "line 2, byte 4 of it"),
        (b"x" * 101, "more than 100 bytes"),
    ],
)
def test_text_of_another_kind(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(RequestError, match=told):
        read_text(tmp_path / "a", 100)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * 200 + "]" * 200, "nested deeper"),
        ('{"a": 1,\n "b": 2,\n "a": 3}', r"'a' stands twice with different values \(lines 1, 3\)"),
        ("9" * 5000, "digits"),
        ('{"a": ', "line 1 column"),
    ],
)
def test_json_that_cannot_be_taken(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_json(text)


def test_json_that_can_be_taken(tmp_path: Path) -> None:
    assert parse_json('{"a": 1, "a": 1}') == {"a": 1}
    assert parse_json("NaN", {"NaN": "nan"}) == "nan"
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(RequestError, match="holds a list"):
        read_json_object(tmp_path / "a.json", "it", "write it again")
