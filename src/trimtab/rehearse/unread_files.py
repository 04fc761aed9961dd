"""Where shapes only are rehearsed: big files of weights are not read. What lies in them has its shape from their heads.

For `torch.load` and safetensors' `load_file`; small files, and small tensors and whole numbers in big ones, are read.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab import hollow
from trimtab.virtual import unknown

BIG = 1 << 26
"""A file with more bytes than this is not read whole."""
_FLOATS = 1 << 20
"""Tensors of floating-point numbers with more elements than this are not read from it."""
TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
TYPES |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"}
TYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64"}
TYPES |= {"U64": "uint64", "U32": "uint32", "U16": "uint16"}


def leave_unread() -> None:
    """From now on torch.load leaves big tensors of floating-point numbers in their files."""
    real = torch.load

    @functools.wraps(real)
    def load(f: Any, map_location: Any = None, *args: Any, mmap: Any = None, **kwargs: Any) -> Any:
        if callable(map_location) or not _is_big(f) or not zipfile.is_zipfile(f) or hollow.is_hollow(f):
            return real(f, map_location, *args, mmap=mmap, **kwargs)
        places: dict[int, str] = {}

        def stay(storage: Any, location: str) -> Any:
            places[storage._cdata] = location
            return storage

        with _by_shapes(lambda storage: _meant(map_location, places.get(storage._cdata, "cpu"))):
            return real(f, stay, *args, **kwargs)

    torch.load = load


def leave_safetensors_unread(module: Any) -> None:
    """The same for safetensors' `load_file`."""
    real = module.load_file

    @functools.wraps(real)
    def load_file(filename: Any, device: Any = "cpu", **kwargs: Any) -> Any:
        if not _is_big(filename) and not hollow.is_hollow(filename):
            return real(filename, device=device, **kwargs)
        return {name: tensor.to(device) for name, tensor in _tensors(os.fspath(filename))}

    module.load_file = load_file


def _is_big(file: Any) -> bool:
    return isinstance(file, str | os.PathLike) and os.path.isfile(file) and os.path.getsize(file) > BIG


def _meant(map_location: Any, location: str) -> Any:
    """Where torch.load is to put what was saved at a location."""
    if isinstance(map_location, dict):
        return map_location.get(location, location)
    return location if map_location is None else map_location


def _left(dtype: torch.dtype | None, elements: int) -> bool:
    return dtype is not None and dtype.is_floating_point and elements > _FLOATS


def _tensors(file: str) -> Iterator[tuple[str, torch.Tensor]]:
    found = hollow.head_of(file)
    if found is None:
        raise ValueError(f"{file}: no head of a safetensors file")
    head, start = found
    known = hollow.known_in(head)
    with open(file, "rb") as opened:
        for name, about in head.items():
            if name == "__metadata__":
                continue
            dtype, shape = getattr(torch, TYPES[about["dtype"]]), about["shape"]
            if known is not None and name not in known:
                yield name, unknown.shape_on_host(shape, dtype)
                continue
            if _left(dtype, math.prod(shape)):
                yield name, torch.empty(shape, dtype=dtype)
                continue
            first, last = about["data_offsets"]
            opened.seek(start + first)
            held = bytearray(opened.read(last - first))
            flat = torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)
            yield name, flat.reshape(shape)


def shape_in(file: str, name: str) -> torch.Tensor:
    """A tensor of a safetensors file, of which the shape is known and nothing else."""
    found = hollow.head_of(file)
    assert found is not None, file
    about = found[0][name]
    return unknown.shape_on_host(about["shape"], getattr(torch, TYPES[about["dtype"]]))


class _Reader:
    """A reader of torch's files that gives big tensors of floating-point numbers no memory."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> Any:
        # torch names the type to its own caller, and asks here for bytes.
        dtype = sys._getframe(1).f_locals.get("dtype")
        if dtype is None or not _left(dtype, size // dtype.itemsize):
            return self._reader.get_storage_from_record(name, size, kind)
        return torch.empty(size, dtype=torch.uint8, device="meta")


@contextmanager
def _by_shapes(place_of: Callable[[Any], Any]) -> Iterator[None]:
    """While one file is loaded: storages without memory become tensors of which only the shape is known."""
    serialization: Any = torch.serialization
    utils: Any = torch._utils
    opened, rebuilt = serialization._open_zipfile_reader, utils._rebuild_tensor
    whole: dict[int, torch.Tensor] = {}

    class Opened(opened):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            return _Reader(super().__enter__())

    def rebuild(storage: Any, offset: int, size: Any, stride: Any) -> Any:
        untyped = storage._untyped_storage
        place = place_of(untyped)
        if untyped.device.type != "meta":
            return rebuilt(storage, offset, size, stride).to(place)
        key = untyped._cdata
        if key not in whole:
            elements = untyped.nbytes() // storage.dtype.itemsize
            whole[key] = torch.empty(elements, dtype=storage.dtype, device=place)
        return whole[key].as_strided(tuple(size), tuple(stride), offset)

    serialization._open_zipfile_reader, utils._rebuild_tensor = Opened, rebuild
    try:
        yield
    finally:
        serialization._open_zipfile_reader, utils._rebuild_tensor = opened, rebuilt
