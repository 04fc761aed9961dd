"""Files that are written whole or not at all: the work is done under a temporary name beside the target, and renamed.

Also what JSON needs before it can be written. Nothing here knows what is written.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.redaction import hiding
from trimtab.shortage import look_at_the_disk


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield an empty file beside `target`, which takes `target`'s place when the block ends without an error.

    A reader finds the old content or the new, also after a kill or a loss of power; an error leaves the old. The
    folder is made where it is missing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    # By hand rather than by tempfile, whose files only the owner may read: a run's folder is often shared.
    os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield scratch
        sync_file(scratch)
        scratch.replace(target)
        sync_folder(target.parent)
    except BaseException as error:
        look_at_the_disk(error, target.parent)
        raise
    finally:
        scratch.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Return when the file's content is on the disk, whoever wrote it."""
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Return when the folder's names are on the disk, where the system can be asked for that."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems know no folder that could be synced; their renames are in order all the same.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write the text (as UTF-8) or the bytes, whole or not at all."""
    with whole_file(path) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json_whole(path: Path, content: Any) -> None:
    """Write the content as JSON that others can read, whole or not at all. NaN, which JSON lacks, becomes text.

    No secret goes into it: it is kept, shown and sent around.
    """
    hide = hiding()
    plain = plain_value(content, of_text=hide)
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False, default=lambda v: hide(str(v)))
    write_whole(path, text + "\n")


def plain_value(
    value: Any, of_nonfinite: Callable[[float], Any] = str, of_text: Callable[[str], str] = str
) -> Any:
    """The value as JSON can hold it; array scalars become numbers, non-finite numbers become strings."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return of_nonfinite(value)
    if isinstance(value, Mapping):
        return {of_text(str(key)): plain_value(entry, of_nonfinite, of_text) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(entry, of_nonfinite, of_text) for entry in value]
    if isinstance(value, str):
        return of_text(value)
    return value
