"""torch.save, torch.load and safetensors where tensors have shapes only: in the place of values that nobody has a file
has a hole, or it is not written.

The file is as large as it would be, and takes next to no room; a record of it lists what has no values, and what is
loaded again has none either. Written into memory (as Lightning does, before it writes the file) it is that list
alone. Nothing is written where it could be taken for a checkpoint: the machine says where (`Machine.hollow_to`);
without a word of it, only into memory. How safetensors leaves holes a rehearsal knows; elsewhere what it would write is
refused.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from trimtab.hollow import RECORD
from trimtab.virtual import imports, stand_in, state
from trimtab.virtual.storage import VirtualStorage, hollow_storage, is_hollow, is_shape
from trimtab.virtual.unknown import is_unknown, refuse_more

_SAFETENSORS = "safetensors.torch"
_TAKING = ("_flatten_as_ptr", "_flatten", "save_file", "save")
"""Functions of it that are given the tensors of a file. Its own are asked for by the functions that a program has
imported by name, in whichever version."""


def may_write(where: Any, nbytes: int) -> None:
    """Raise NotSimulated where weights without values are not to be written."""
    machine = state.machine()
    if _in_memory(where):
        refuse_more(nbytes)  # a hole in memory takes room
    elif machine is None or machine.hollow_to is None:
        raise state.NotSimulated(
            "weights that have shapes and no values are to be written to a file, which would pass for a checkpoint: "
            "leave saving out, or rehearse the program (trimtab rehearse --shapes-only), which keeps such files apart"
        )
    else:
        named = where if hasattr(where, "name") else getattr(where, "raw", where)
        name = getattr(named, "name", named)
        machine.hollow_to(os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else None)


def _in_memory(where: Any) -> bool:
    return isinstance(where, io.BytesIO) and not isinstance(where, _Late)


class _Late(io.BytesIO):
    """A file of the old format, opened once all of it is known: one in whose place it may not be stays whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.name = os.fspath(path)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            with open(self.name, "wb") as file:
                file.write(self.getbuffer())


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
        listed = bool(hollow) and _in_memory(self._where)
        if hollow:
            may_write(self._where, 0 if listed else sum(hollow.values()))
            said = json.dumps(list(hollow))
            records.append((RECORD, said, len(said)))
        is_path = isinstance(self._where, str | os.PathLike)
        with self._opened(self._where if is_path or not hollow else _Stream(self._where)) as writer:
            for name, data, size in records:
                if listed and name in hollow:
                    writer.write_record(name, b"", 0)
                elif data is None or name in hollow:
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


def _refuse_in_safetensors(machine: state.Machine) -> Callable[[Any], None]:
    """A setting for when it is imported: no file of tensors without values where nobody keeps it apart."""

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            given = tensors.values() if isinstance(tensors, dict) else ()
            if machine.hollow_to is None and any(map(is_unknown, given)):
                may_write(None, 0)
            return real(tensors, *args, **kwargs)

        return call

    def put_in(undo: Any) -> None:
        module = sys.modules[_SAFETENSORS]
        for name in _TAKING:
            if (real := getattr(module, name, None)) is not None:
                setattr(module, name, guarded(real))
                undo.callback(setattr, module, name, real)

    return put_in


def keep_out_of_files(machine: state.Machine, undo: Any) -> None:
    """Refuse what safetensors would write of shapes, where no rehearsal says how."""
    if machine.shapes:
        imports.when_imported(machine, undo, {_SAFETENSORS: _refuse_in_safetensors(machine)})


def _write_file(storage: Any, file: Any, *rest: Any) -> None:
    """A storage in torch's old format, which has no holes."""
    if is_shape(storage):
        may_write(file, storage.nbytes())
    _written(storage, file, *rest)


_written = VirtualStorage._write_file


def patches(machine: state.Machine) -> list[state.Patch]:
    """What has to be replaced while a machine with shapes only is in force."""
    if not machine.shapes:
        return []
    serialization: Any = torch.serialization
    opened, loaded = serialization._open_zipfile_writer, serialization._load
    opened_plainly = serialization._open_file_like

    def _open_zipfile_writer(name_or_buffer: Any) -> _Opened:
        return _Opened(opened, name_or_buffer)

    def _open_file_like(name_or_buffer: Any, mode: str) -> Any:
        late = "w" in mode and isinstance(name_or_buffer, str | os.PathLike)
        return _Late(name_or_buffer) if late else opened_plainly(name_or_buffer, mode)

    def _load(zip_file: Any, *args: Any, **kwargs: Any) -> Any:
        if zip_file.has_record(RECORD):
            kwargs["overall_storage"] = None  # a map of the file's memory: there are noughts in it
            zip_file = _Reader(zip_file)
        with serialization.safe_globals(
            [stand_in.again]
        ):  # numbers that were kept beside the weights: a best score
            return loaded(zip_file, *args, **kwargs)

    replaced: list[tuple[str, Callable[..., Any]]] = [
        ("_open_zipfile_writer", _open_zipfile_writer),
        ("_open_file_like", _open_file_like),
        ("_load", _load),
    ]
    patched: list[state.Patch] = [(serialization, name, new) for name, new in replaced]
    return [*patched, (VirtualStorage, "_write_file", _write_file)]
