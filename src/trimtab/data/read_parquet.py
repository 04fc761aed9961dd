"""Reads the rows of a Parquet file, and says which column and which rows cannot be read where it is damaged.

Checksums of pages are held against the bytes where a file has them. Never guesses a value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.errors import RequestError, some_of

_BATCH = 256
"""Small: a row with a picture may have megabytes."""
_MOST_ROWS_A_BYTE = 100
"""Equal rows take less than a byte each; so many of them teach nothing."""


def parquet_items(path: Path, shown: str, most: int | None) -> list[dict[str, Any]]:
    """The rows as they are, at least `most` of them where that is given and the file has so many."""
    items: list[dict[str, Any]] = []
    try:
        with _opened(path) as file:
            _check(file, path, shown, most)
            for batch in file.iter_batches(batch_size=_BATCH):
                items += batch.to_pylist()
                if most is not None and len(items) >= most:
                    break
    except RequestError:
        raise
    except _errors() as error:
        column = _column(path, len(items) + _BATCH)
        at = f", after row {len(items):,}" if items else ""
        raise RequestError.of(
            f"{shown}{at}{f', column `{column}`' if column else ''}: not a readable Parquet file",
            _said(error),
            "write or download the file again",
        ) from None
    return items


def _opened(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, page_checksum_verification=True)


def _errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises over a damaged file: almost anything, but nothing of ours can raise these here."""
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)


def _check(file: Any, path: Path, shown: str, most: int | None) -> None:
    names = file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RequestError.of(
            f"{shown}: a column of the name {some_of(twice, 3)} twice",
            "one value would hide the other",
            "rename or remove one of the columns",
        )
    rows, size = file.metadata.num_rows, path.stat().st_size
    if most is None and rows > max(1_000_000, _MOST_ROWS_A_BYTE * size):
        raise RequestError.of(
            f"{shown}: says {rows:,} rows in {size:,} bytes",
            "a few bytes that stand for so many rows are a decompression bomb, or a damaged count",
            "check where the file comes from; data.max_rows reads only its first rows",
        )


def _column(path: Path, rows: int) -> str | None:
    """The first column that cannot be read by itself, in the rows up to the place of a fault."""
    try:
        with _opened(path) as file:
            names = file.schema_arrow.names
    except _errors():
        return None
    for name in names:
        try:
            with _opened(path) as file:
                seen = 0
                for batch in file.iter_batches(batch_size=_BATCH, columns=[name]):
                    batch.to_pylist()
                    seen += len(batch)
                    if seen >= rows:
                        break
        except _errors():
            return str(name)
    return None


def _said(error: BaseException) -> str:
    told = str(error).strip().splitlines()
    return told[0][:300] if told else type(error).__name__
