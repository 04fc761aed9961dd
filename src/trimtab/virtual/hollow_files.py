"""torch.save and torch.load where tensors have shapes only: in the place of values that nobody has the file has a hole.

The file is as large as it would be, and takes next to no room; a record of it lists what has no values, and what is
loaded again has none either. Nothing is written where it could be taken for a checkpoint: the machine says where
(`Machine.hollow_to`); without a word of it, only into memory.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import Any

import torch

from trimtab.hollow import RECORD
from trimtab.virtual import state
from trimtab.virtual.storage import hollow_storage, is_hollow
from trimtab.virtual.unknown import refuse_more


def may_write(where: Any, nbytes: int) -> None:
    """Raise NotSimulated where weights without values are not to be written."""
    machine = state.machine()
    if isinstance(where, io.BytesIO):
        refuse_more(nbytes)  # a hole in memory takes room
    elif machine is None or machine.hollow_to is None:
        raise state.NotSimulated(
            "weights that have shapes only are written in a rehearsal alone (trimtab rehearse --shapes-only), which "
            "keeps them apart from real checkpoints"
        )
    else:
        named = where if hasattr(where, "name") else getattr(where, "raw", where)
        name = getattr(named, "name", named)
        machine.hollow_to(os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else None)


class _Records:
    """What torch writes to a file, held until all of it is known: a file in whose place it may not be stays whole."""

    def __init__(self) -> None:
        self.records: list[tuple[str, Any, int]] = []

    def write_record(self, name: str, data: Any, size: int) -> None:
        self.records.append((name, data, size))

    def write_record_metadata(self, name: str, size: int) -> None:
        """Room for what somebody writes later."""
        self.records.append((name, None, size))


class _Opened:
    """What torch opens to write to."""

    def __init__(self, opened: Callable[[Any], Any], where: Any) -> None:
        self._opened, self._where = opened, where

    def __enter__(self) -> _Records:
        self._held = _Records()
        return self._held

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            return
        records = self._held.records
        hollow = {name: size for name, data, size in records if _has_no_values(data)}
        if hollow:
            may_write(self._where, sum(hollow.values()))
            said = json.dumps(list(hollow))
            records.append((RECORD, said, len(said)))
        is_path = isinstance(self._where, str | os.PathLike)
        with self._opened(self._where if is_path or not hollow else _Stream(self._where)) as writer:
            for name, data, size in records:
                if data is None or name in hollow:
                    writer.write_record_metadata(name, size)
                else:
                    writer.write_record(name, data, size)


class _Stream:
    """A stream that is written to: it, or what it wraps, leaves holes; where neither can, there are noughts."""

    def __init__(self, stream: Any) -> None:
        self.write, self.flush = stream.write, stream.flush
        inner = (stream, getattr(stream, "raw", None))
        self._seeks = next((one for one in inner if one is not None and one.seekable()), None)

    def seek(self, distance: int, whence: int = os.SEEK_SET) -> None:
        if self._seeks is not None:
            self._seeks.seek(distance, whence)
        else:
            refuse_more(distance)
            self.write(bytes(distance))


def _has_no_values(data: Any) -> bool:
    return isinstance(data, torch.UntypedStorage) and is_hollow(data)


class _Record:
    """A record of which torch asks the storage."""

    def __init__(self, size: int) -> None:
        self._size = size

    def _typed_storage(self) -> torch.TypedStorage:
        return torch.TypedStorage(wrap_storage=hollow_storage(self._size), dtype=torch.uint8, _internal=True)


class _Reader:
    """torch's reader of a file, which does not read what is not there."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._hollow = frozenset(json.loads(reader.get_record(RECORD)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> Any:
        if name in self._hollow:
            return _Record(size)
        return self._reader.get_storage_from_record(name, size, kind)


def patches(machine: state.Machine) -> list[state.Patch]:
    """What has to be replaced while a machine with shapes only is in force."""
    if not machine.shapes:
        return []
    serialization: Any = torch.serialization
    opened, loaded = serialization._open_zipfile_writer, serialization._load

    def _open_zipfile_writer(name_or_buffer: Any) -> _Opened:
        return _Opened(opened, name_or_buffer)

    def _load(zip_file: Any, *args: Any, **kwargs: Any) -> Any:
        if zip_file.has_record(RECORD):
            kwargs["overall_storage"] = None  # a map of the file's memory: there are noughts in it
            zip_file = _Reader(zip_file)
        return loaded(zip_file, *args, **kwargs)

    replaced: list[tuple[str, Callable[..., Any]]] = [
        ("_open_zipfile_writer", _open_zipfile_writer),
        ("_load", _load),
    ]
    return [(serialization, name, new) for name, new in replaced]
