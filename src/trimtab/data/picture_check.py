"""Looks at every picture before training, in threads: is it there, is it whole, is it the same as another.

A row with a broken picture is dropped and counted, or stops the run (`data.bad_rows`). Keeps no pixels.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from trimtab.data.clean import BadRow, Tally
from trimtab.data.pictures import Picture, PictureRow, content_key, decode
from trimtab.data.sources import Cell

MOST_THREADS = 8

_Looked = tuple[str, tuple[int, int] | None]
"""A picture's digest, and its size where it was decoded."""


def checked_rows(
    rows: Sequence[PictureRow], max_pixels: int, decoded: bool, tally: Tally, repeats: bool
) -> tuple[list[PictureRow], list[frozenset[str]]]:
    """The rows whose pictures are all right, each with its key, and beside each the digests of its pictures.

    Unless `repeats`, a row that equals an earlier one in content is dropped. `decoded` opens every picture in full.
    """
    from rich.console import Console
    from rich.progress import track

    rows = [_limited(row, max_pixels) for row in rows]
    kept: list[PictureRow] = []
    digests: list[frozenset[str]] = []
    seen: set[str] = set()
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="pictures")
    try:
        looked: dict[Path | bytes | Cell, Future[_Looked]] = {}
        for picture in (picture for row in rows for picture in row.pictures):
            if picture.source not in looked:
                looked[picture.source] = pool.submit(_look, picture, decoded)
        for row in track(
            rows,
            description=f"checking {len(looked):,} pictures",
            console=Console(stderr=True),
            transient=True,
            disable=not (looked and sys.stderr.isatty()),
        ):
            found, pictures = [], []
            try:
                for picture in row.pictures:
                    where = picture.where
                    digest, size = looked[picture.source].result()
                    found.append(digest)
                    pictures.append(replace(picture, size=size))
            except BadRow as bad:
                tally.bad(str(bad), where)
                continue
            whole = replace(row, pictures=tuple(pictures), key=content_key(row, tuple(found)))
            if whole.key in seen and not repeats:
                tally.drop("repeats an earlier row", row.where)
                continue
            seen.add(whole.key)
            kept.append(whole)
            digests.append(frozenset(found))
    finally:
        pool.shutdown(cancel_futures=True)
    return kept, digests


def groups(rows: Sequence[PictureRow], digests: Sequence[frozenset[str]]) -> list[str]:
    """A name for each row, the same for all rows that a picture ties together, directly or through other rows."""
    parent: dict[str, str] = {}

    def root(digest: str) -> str:
        parent.setdefault(digest, digest)
        while parent[digest] != digest:
            parent[digest] = digest = parent[parent[digest]]
        return digest

    for tied in digests:
        # The least digest names the group, so that the name does not depend on the order of rows.
        first, *others = sorted(root(digest) for digest in tied) or [""]
        for other in others:
            parent[other] = first
    return [root(next(iter(tied))) if tied else row.key for row, tied in zip(rows, digests, strict=True)]


def _limited(row: PictureRow, max_pixels: int) -> PictureRow:
    return replace(row, pictures=tuple(replace(picture, most_pixels=max_pixels) for picture in row.pictures))


def _look(picture: Picture, decoded: bool) -> _Looked:
    data, size = picture.read(), None
    if decoded:
        size = decode(data, picture.most_pixels).size
    elif not data:
        raise BadRow("picture is empty (0 bytes)")
    return hashlib.sha256(data).hexdigest(), size
