"""A store that breaks off, sends other bytes than it says, or changes an object; and copies that were damaged since.

The server is a real one on the loopback that speaks as much HTTP as S3's HEAD and GET need, and no signatures.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trimtab.config.schema import DataSettings
from trimtab.data import s3_copy
from trimtab.data.sources import Loaded, load_rows
from trimtab.errors import RequestError

pytest.importorskip("s3fs")

BODY = b"".join(b'{"text": "row %d"}\n' % number for number in range(2000))
SOURCE = "s3://sets/a.jsonl"


class Store:
    """What the server does with the next requests."""

    def __init__(self) -> None:
        self.body = BODY
        self.etag: str | None = None
        """None: the MD5 of the body, as S3 has it."""
        self.cuts = 0
        """How many more answers break off in the middle."""
        self.flips = 0
        """How many more answers have a flipped bit."""
        self.changes = 0
        """How many more times the object becomes another just before it is fetched."""
        self.waits: threading.Event | None = None
        """Where it is set, an answer stops in its middle until this comes."""
        self.stopped = threading.Event()
        self.fetched = 0
        self.url = ""

    def tag(self) -> str:
        return self.etag or hashlib.md5(self.body).hexdigest()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    held = Store()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.begin(200, held.body)

        def do_GET(self) -> None:
            held.fetched += 1
            if held.changes:
                held.changes -= 1
                held.body += b'{"text": "one more"}\n'
            if self.headers.get("If-Match", held.tag()).strip('"') != held.tag():
                told = b"<Error><Code>PreconditionFailed</Code></Error>"
                self.begin(412, told)
                self.wfile.write(told)
                return
            body, start = held.body, 0
            if asked := self.headers.get("Range"):
                start = int(asked.removeprefix("bytes=").partition("-")[0])
            self.begin(206 if start else 200, body[start:])
            half = start + (len(body) - start) // 2
            if held.cuts:
                held.cuts -= 1
                self.wfile.write(body[start:half])
                self.close_connection = True
                return
            if held.flips:
                held.flips -= 1
                body = body[:half] + bytes([body[half] ^ 1]) + body[half + 1 :]
            self.wfile.write(body[start:half])
            if held.waits is not None:
                held.stopped.set()
                held.waits.wait(60)
            self.wfile.write(body[half:])

        def begin(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("ETag", f'"{held.tag()}"')
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Last-Modified", "Mon, 16 Nov 2026 12:00:00 GMT")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    held.url = f"http://127.0.0.1:{server.server_port}"
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(s3_copy, "_PAUSES", (0, 0, 0))
    yield held
    server.shutdown()
    server.server_close()


def load(store: Store) -> Loaded:
    return load_rows(SOURCE, DataSettings(source=SOURCE, endpoint_url=store.url))


def files(tmp_path: Path) -> list[Path]:
    return [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_a_connection_that_breaks_off_is_tried_again(store: Store) -> None:
    store.cuts = 3
    assert len(load(store).rows) == 2000
    assert store.fetched > 3


def test_one_that_always_breaks_off_is_an_error_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    store.cuts = 1000
    with pytest.raises(RequestError, match=r"did not come whole in 4 tries.*\n.*nothing was kept"):
        load(store)
    assert not files(tmp_path)
    store.cuts = 0
    assert load(store).cache == "downloaded"


def test_bytes_that_are_not_of_the_etag_are_fetched_again(store: Store) -> None:
    store.flips = 1
    assert [row.values["text"] for row in load(store).rows] == [f"row {n}" for n in range(2000)]
    assert store.fetched == 2


def test_an_etag_that_is_no_md5_is_no_fault(store: Store) -> None:
    for etag in (
        "0123456789abcdef" * 2,
        f"{'0123456789abcdef' * 2}-3",
    ):  # encrypted by a key; of several parts
        store.etag = etag
        assert len(load(store).rows) == 2000
        assert load(store).cache == "from the cache (etag unchanged, checksum verified)"


def test_an_object_that_changes_meanwhile_is_taken_as_it_is_then(store: Store) -> None:
    store.changes = 1
    assert len(load(store).rows) == 2001
    store.changes = 1000
    store.body += b'{"text": "another"}\n'
    with pytest.raises(RequestError, match="changed 4 times while it was fetched"):
        load(store)


def test_a_copy_that_is_not_what_came_is_fetched_anew_and_said(store: Store, tmp_path: Path) -> None:
    load(store)
    (copy,) = (tmp_path / "cache").rglob("a.jsonl")
    lines = BODY.splitlines(keepends=True)
    flipped = bytes([BODY[100] ^ 2])
    for damaged in (b"".join(lines[:-1]), BODY[:100] + flipped + BODY[101:], b"", BODY + lines[0]):
        copy.write_bytes(damaged)
        found = load(store)
        assert len(found.rows) == 2000
        assert found.notes == [f"the cached copy of {SOURCE} was damaged, and was downloaded again"]
        assert copy.read_bytes() == BODY
    for note in copy.parent.glob(".*.json"):  # a copy that nobody can vouch for
        note.write_text("[]")
    assert load(store).cache == "downloaded"


def test_a_cache_that_cannot_be_written_to_is_said(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(RequestError, match="set TRIMTAB_CACHE to a folder of yours"):
        load(store)


READ = f"""
import sys
from trimtab.config.schema import DataSettings
from trimtab.data.sources import load_rows
print(len(load_rows({SOURCE!r}, DataSettings(source={SOURCE!r}, endpoint_url=sys.argv[1])).rows))
"""


def test_a_killed_download_leaves_no_file_and_two_at_once_are_both_right(
    store: Store, tmp_path: Path
) -> None:
    def reader() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", READ, store.url], stdout=subprocess.PIPE, text=True)

    store.waits = threading.Event()
    killed = reader()
    assert store.stopped.wait(60)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    assert all(file.name.endswith(".partial") for file in files(tmp_path))
    store.waits.set()
    store.waits = None
    pair = [reader(), reader()]
    assert [one.communicate(timeout=60)[0].strip() for one in pair] == ["2000", "2000"]
    (copy,) = (tmp_path / "cache").rglob("a.jsonl")
    assert copy.read_bytes() == BODY
