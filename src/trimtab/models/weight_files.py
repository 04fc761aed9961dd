"""What the safetensors files of a local folder hold, by their headers: names, shapes, which file. No values are read.

A file that is cut off, two files with one tensor, an index that names what is not there or what lies outside of the
folder is an error that names the file; a shard that the loader does not read is said. Nothing is repaired.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.errors import RequestError, some_of
from trimtab.models.whole import say

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_CHANGE = "\n  change: "
_LONGEST_INDEX = 256 << 20


class Stored(NamedTuple):
    """Where a tensor lies, and its shape."""

    file: Path
    shape: tuple[int, ...]


def model_tensors(folder: Path, what: str) -> dict[str, Stored] | None:
    """Every tensor of a model's folder, as the loader takes them: the single file, else the shards of the index.

    None where there is neither, which the loader says. `what` begins an error: the setting and its value.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return file_tensors(single, what)
    return _sharded(folder, index, what) if index.exists() else None


def check_folder(folder: Path, what: str, change: str | None = None) -> None:
    """Refuse a local folder whose weight files are not whole, or that would load more than a model.

    `change`: what is to be done about it, where that is something else than to fetch the files again.
    """
    if not folder.is_dir():
        return
    if (folder / "adapter_config.json").exists() and (folder / "config.json").exists():
        raise RequestError.of(
            f"{what}: the folder holds a model and an adapter_config.json",
            "the adapter would be put on top of the model without a word",
            "give each a folder of its own; to go on from an adapter, merge it first",
        )
    try:
        held = model_tensors(folder, what)
    except RequestError as error:
        if change is None:
            raise
        raise RequestError(f"{str(error).partition(_CHANGE)[0]}{_CHANGE}{change}") from None
    if held is not None:
        _say_unread(folder, {stored.file for stored in held.values()}, what)


def _say_unread(folder: Path, read: set[Path], what: str) -> None:
    """The loader takes the single file, else the shards of the index, and passes over any other shard."""
    left = sorted(file.name for file in folder.iterdir() if _SHARD.fullmatch(file.name) and file not in read)
    if left:
        taken = f"{SINGLE} alone" if folder / SINGLE in read else f"what {INDEX} names"
        say(
            f"{what}: {some_of(left, 3)} lie beside the model's weights and are not read: the loader takes {taken}. "
            "Remove whichever are of another version"
        )


def file_tensors(file: Path, what: str) -> dict[str, Stored]:
    """The tensors of one file."""
    from safetensors import SafetensorError, safe_open

    try:
        if not file.is_file():
            raise _unreadable(what, file, "it is not a file" if file.exists() else "it is not there")
        with safe_open(file, framework="pt") as opened:
            return {
                name: Stored(file, tuple(opened.get_slice(name).get_shape()))
                for name in opened.keys()  # noqa: SIM118 (not a mapping)
            }
    except (OSError, SafetensorError, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise _unreadable(what, file, _said(error)) from None


def _sharded(folder: Path, index: Path, what: str) -> dict[str, Stored]:
    named = _weight_map(index, what)
    held: dict[str, Stored] = {}
    for file in sorted(set(named.values())):
        here = file_tensors(folder / file, f"{what}: {INDEX} names {file[:200]}")
        for name in here.keys() & held.keys():
            raise RequestError.of(
                f"{what}: {name} is in {held[name].file.name} and in {file}",
                "one would be taken and the other left, and nothing says which is right",
                "fetch or save the weights again",
            )
        lost = sorted(name for name, where in named.items() if where == file and name not in here)
        if lost:
            raise RequestError.of(
                f"{what}: {INDEX} says that {file} holds {some_of(lost, 3)}, and it does not",
                "index and files belong to different versions of the model, or a file was replaced",
                "fetch the index and all files of one version again",
            )
        held |= here
    return held


def _weight_map(index: Path, what: str) -> dict[str, str]:
    try:
        if index.stat().st_size > _LONGEST_INDEX:
            raise ValueError(f"it has over {_LONGEST_INDEX >> 20} MiB")
        said: Any = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _index_error(what, _said(error)) from None
    files = said.get("weight_map") if isinstance(said, dict) else None
    if (
        not isinstance(files, dict)
        or not files
        or not all(isinstance(file, str) and file for file in files.values())
        or not isinstance(said.get("metadata"), dict)
    ):
        raise _index_error(what, "it has no `weight_map` from tensors to files, or no `metadata`")
    for file in sorted(set(files.values())):
        if Path(file).is_absolute() or ".." in Path(file).parts or "\\" in file or "\0" in file:
            raise RequestError.of(
                f"{what}: {INDEX} names {file!r}",
                "it leads out of the model's folder, and a model's files lie in its folder",
                "do not use this model unless you know who wrote its index; else put the file beside it",
            )
    return files


def _index_error(what: str, why: str) -> RequestError:
    return RequestError.of(
        f"{what}: {INDEX} cannot be read", why, "fetch it again, or save the model once more"
    )


def _unreadable(what: str, file: Path, why: str) -> RequestError:
    return RequestError.of(
        f"{what}: its weights could not be loaded from {file.name}",
        why,
        "fetch the weights again: a file is cut off, or only a pointer to it is there (`git lfs pull`)",
    )


def _said(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    told = str(error).strip().splitlines()
    return told[0][:300] if told else type(error).__name__
