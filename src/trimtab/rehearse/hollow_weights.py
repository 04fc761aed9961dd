"""Where shapes only are rehearsed: where weights without values may be written, and safetensors files of them.

They go where the rehearsal keeps its writes apart from the user's files. Where there is no such place (--in-place, a
system without overlays) they are written beside them and taken away at the end, and never over a file that has values.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trimtab import manifest
from trimtab.hollow import KEY, head_in, head_of, is_hollow, known_in
from trimtab.rehearse.session import Recorder
from trimtab.rehearse.written import Written


def keep_apart(recorder: Recorder, apart: Iterable[str]) -> Callable[[str | None], None]:
    """What a machine asks before such a file is written. `apart`: the folders whose writes go to an overlay."""
    roots = [os.path.join(os.path.realpath(root), "") for root in map(str, (recorder.folder, *apart))]
    overlaid = len(roots) > 1

    def is_apart(path: str) -> bool:
        inside = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        return any(inside.startswith(root) for root in roots)

    def refuse(path: str) -> None:
        from trimtab.virtual.state import NotSimulated

        raise NotSimulated(
            f"{path} is a file of yours, and what would take its place here has shapes and no values: it is left as it "
            "is (rehearse where writes go to an overlay)"
        )

    def may(path: str | None) -> None:
        if path is None:
            if not overlaid:
                refuse("what is written to")
        elif not is_apart(path):
            there = os.path.lexists(path) and not is_hollow(path)
            if there and os.path.getsize(path):
                refuse(path)
            recorder.write(t="wrote", path=os.path.abspath(path), how="changed" if there else "new")

    def guarded(real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
            over = os.path.isfile(dst) and not is_apart(os.fsdecode(dst)) and not is_hollow(dst)
            if over and is_hollow(src):
                refuse(os.fsdecode(dst))
            real(src, dst, *args, **kwargs)

        return move

    manifest.holds_nothing = is_hollow  # of holes no checksum is made
    if not overlaid:
        os.rename, os.replace = guarded(os.rename), guarded(os.replace)
    return may


def take_away(written: Iterable[Written]) -> list[Written]:
    """Delete those of the files that a rehearsal wrote for real that have no values; answers with the rest.

    One that was there before, and empty, is empty again.
    """
    left = []
    for one in written:
        if one.real and one.how != "removed" and is_hollow(one.path):
            if one.how == "changed":
                os.truncate(one.path, 0)
            else:
                os.unlink(one.path)
        else:
            left.append(one)
    return left


def rename_hollow(folder: Path) -> None:
    """Give files without values that are kept a name by which nobody takes them for weights."""
    for path in [path for path in folder.rglob("*") if not path.is_symlink() and is_hollow(path)]:
        path.rename(path.with_name(f"{path.name}.shapes-only"))


_FLATTENING = ("_flatten_as_ptr", "_flatten")
"""Functions of safetensors, by its version, that are given the tensors of a file, and whose result is then written."""


class _Hollow:
    """What is handed to the writer in the place of tensors' bytes: the tensors, of which some have no values."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors


def read_and_write_shapes(module: Any) -> None:
    """safetensors.torch: files of tensors without values are written with holes, and read again as shapes.

    Put where its functions ask each other: so whoever has them by name from before has them so too.
    """
    to_file, to_bytes, from_bytes = module.serialize_file, module.serialize, module.load

    @functools.wraps(to_file)
    def serialize_file(flat: Any, filename: Any, metadata: Any = None) -> None:
        if not isinstance(flat, _Hollow):
            return to_file(flat, filename, metadata=metadata)  # type: ignore[no-any-return]
        return _write(flat.tensors, filename, metadata or {})

    @functools.wraps(to_bytes)
    def serialize(flat: Any, metadata: Any = None) -> Any:
        if not isinstance(flat, _Hollow):
            return to_bytes(flat, metadata=metadata)
        into = io.BytesIO()
        _write(flat.tensors, into, metadata or {})
        return into.getvalue()

    @functools.wraps(from_bytes)
    def load(data: bytes) -> dict[str, Any]:
        from trimtab.virtual import unknown

        found = head_in(io.BytesIO(data))
        known = None if found is None else known_in(found[0])
        tensors: dict[str, Any] = from_bytes(data)
        return {
            name: tensor
            if known is None or name in known
            else unknown.shape_on_host(tensor.shape, tensor.dtype)
            for name, tensor in tensors.items()
        }

    module.serialize_file, module.serialize, module.load = serialize_file, serialize, load
    for name in _FLATTENING:
        if (real := getattr(module, name, None)) is not None:
            setattr(module, name, _left_whole(module, real))


def _left_whole(module: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors without values are not looked into."""

    @functools.wraps(real)
    def flatten(tensors: Any, *args: Any) -> Any:
        from trimtab.virtual.unknown import is_unknown

        if not isinstance(tensors, dict) or not any(map(is_unknown, tensors.values())):
            return real(tensors, *args)
        if refused := _refused_by_safetensors(module, tensors):
            # It says so in its own words before it looks at a value.
            real({name: tensors[name] for name in refused}, *args)
        return _Hollow(tensors)

    return flatten


def _refused_by_safetensors(module: Any, tensors: Any) -> set[str]:
    together = [names for names in module._find_shared_tensors(tensors) if len(names) > 1]
    refused = {name for names in together for name in names} | {
        name for name, tensor in tensors.items() if tensor.layout.__str__() != "torch.strided"
    }
    return refused | {name for name in tensors.keys() - refused if not tensors[name].is_contiguous()}


def _write(tensors: dict[str, Any], where: Any, metadata: dict[str, str]) -> None:
    """To a path, or to memory, where a hole takes room."""
    import torch

    from trimtab.rehearse.unread_files import TYPES
    from trimtab.virtual.hollow_files import may_write
    from trimtab.virtual.unknown import is_unknown

    names = {getattr(torch, dtype): name for name, dtype in TYPES.items()}
    known = {name: tensor for name, tensor in tensors.items() if not is_unknown(tensor)}
    head: dict[str, Any] = {"__metadata__": {**metadata, KEY: json.dumps(sorted(known))}}
    end = 0
    # The widest first, as safetensors does: then each begins where its numbers may.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        dtype = names[tensor.dtype]
        head[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    may_write(where, end)
    with nullcontext(where) if isinstance(where, io.BytesIO) else open(where, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if end:
            file.seek(8 + len(text) + end - 1)
            file.write(bytes(1))
        for name, tensor in known.items():
            file.seek(8 + len(text) + head[name]["data_offsets"][0])
            plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(plain.numpy().tobytes())


def open_shapes(module: Any) -> None:
    """safetensors' `safe_open`: of a file without values it gives shapes."""
    real = module.safe_open

    @functools.wraps(real, updated=())
    def safe_open(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        found = head_of(filename) if os.path.isfile(filename) else None
        known = None if found is None else known_in(found[0])
        opened = real(filename, framework, device=device, **kwargs)
        return opened if known is None else _Opened(opened, filename, known, device)

    module.safe_open = safe_open


class _Opened:
    """An open safetensors file of which some tensors have no values."""

    def __init__(self, opened: Any, filename: Any, known: frozenset[str], device: Any) -> None:
        self._opened, self._file, self._known, self._device = opened, os.fspath(filename), known, device

    def __enter__(self) -> _Opened:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._opened.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> Any:
        """A tensor, or its shape."""
        if name in self._known or name not in self._opened.keys():  # noqa: SIM118
            return self._opened.get_tensor(name)
        from trimtab.rehearse import unread_files

        return unread_files.shape_in(self._file, name).to(self._device)

    def get_tensors(self) -> dict[str, Any]:
        """All of them."""
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> Any:
        """What can be cut: of a tensor without values, the tensor itself."""
        return self._opened.get_slice(name) if name in self._known else _Slice(self.get_tensor(name))


class _Slice:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getitem__(self, where: Any) -> Any:
        return self._tensor[where]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        from trimtab.rehearse.unread_files import TYPES

        return next(name for name, dtype in TYPES.items() if f"torch.{dtype}" == str(self._tensor.dtype))
