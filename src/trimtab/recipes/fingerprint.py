"""What shapes a run beside its settings, as short digests: the rows, the files they came from, the model, the chat
template, the source of rewards, the plan; and the versions of libraries, which are only noted.

It reads; it writes nothing and judges nothing. Names and places do not count, so that what was moved is the same.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.grpo import reward_weights
from trimtab.config.schema import Config
from trimtab.recipes.effective_batch import effective_batch

if TYPE_CHECKING:
    from trimtab.placement import PlacementPlan
    from trimtab.recipes.recipe import Prepared

PACKAGES = ("trimtab", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")
WHOLE_BYTES = 512 * 2**20
"""Files up to this size are read whole, those of a model together; of larger ones places all over them."""
_SAMPLES, _SAMPLE = 64, 64 * 2**10
_NOT_CONTENT = {"where", "size"}
"""Fields of a row that tell where it was found."""
_ROW_FILES = {".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv"}
_MOST_FILES = 1000


def before_data(config: Config, plan: PlacementPlan) -> dict[str, Any]:
    """What can be told before the rows are read."""
    batch = effective_batch(config, plan)
    return {
        "plan": {
            "processes": plan.processes,
            "step_rows": batch.rows,
            "precision": plan.precision,
            "weight_precision": plan.weight_precision,
            "sharded": plan.strategy == "sharded",
            "speed": {
                name: way for name, way in dataclasses.asdict(plan.speed).items() if name != "demanded"
            },
        },
        "model": model_print(config),
        "rewards": reward_prints(config) if config.recipe == "grpo" else {},
        "files": {
            setting: files_print(source)
            for setting, source in (
                ("data.source", config.data.source),
                ("data.eval_source", config.data.eval_source),
            )
            if source is not None
        },
        "versions": dict(versions()),
    }


def of_data(prepared: Prepared) -> dict[str, Any]:
    """What the rows are that the run trains on and is measured by, and how they are written as text."""
    template = getattr(prepared.processor, "chat_template", None)
    return {
        "train": rows_print(prepared.train),
        "eval": rows_print(prepared.eval or ()),
        "template": _digest([json.dumps(template, sort_keys=True).encode()]) if template else None,
    }


@functools.cache
def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rows_print(rows: Any) -> dict[str, Any]:
    """How many rows there are, and a digest of their content in their order."""
    table = getattr(getattr(rows, "data", None), "table", None)
    parts = _of_table(rows, table) if table is not None else (_bytes(row) for row in rows)
    return {"rows": len(rows), "digest": _digest(parts)}


def _of_table(rows: Any, table: Any) -> Iterator[bytes]:
    """A table's values by column. Numbers are taken as they lie in memory: there may be billions of tokens."""
    import pyarrow as pa

    if getattr(rows, "_indices", None) is not None:
        yield from (_bytes(row) for row in rows)
        return
    for name in sorted(table.column_names):
        yield f"\n{name}\n".encode()
        for chunk in table.column(name).chunks:
            numbers = pa.types.is_list(chunk.type) and pa.types.is_integer(chunk.type.value_type)
            if numbers and chunk.null_count == 0 and chunk.flatten().null_count == 0:
                yield chunk.value_lengths().to_numpy(zero_copy_only=False).astype("<i8").tobytes()
                yield chunk.flatten().to_numpy(zero_copy_only=False).astype("<i8").tobytes()
                continue
            for value in chunk:
                yield _bytes(value.as_py())


def _bytes(value: Any) -> bytes:
    """A value as bytes that two values share only where they are the same, whatever holds them."""
    if isinstance(value, bytes):
        return b"b" + hashlib.sha256(value).digest()
    if isinstance(value, str):
        return b"s" + json.dumps(value).encode()
    if value is None or isinstance(value, bool | int | float):
        return b"v" + repr(value).encode()
    if isinstance(value, Mapping):
        keys = sorted(value, key=str)
        return b"{" + b",".join(_bytes(str(key)) + b":" + _bytes(value[key]) for key in keys) + b"}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return b"[" + b",".join(map(_bytes, value)) + b"]"
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return b"a" + f"{value.dtype}{value.shape}".encode() + hashlib.sha256(value.tobytes()).digest()
    if not dataclasses.is_dataclass(value) and not hasattr(value, "_fields"):
        # A date or a decimal number tells its content; what only tells its place in memory counts by its type.
        plain = f"{id(value):x}" not in repr(value)
        return b"r" + (repr(value) if plain else type(value).__name__).encode()
    if (
        getattr(value, "pictures", None) is not None and value.key
    ):  # it tells the row with its pictures' bytes
        return b"k" + str(value.key).encode()
    if hasattr(value, "most_pixels"):
        return _of_picture(value.source)
    if hasattr(value, "sound"):  # a clip: the bytes of its file
        return b"c" + str(value.key).encode()
    fields = value._fields if hasattr(value, "_fields") else [f.name for f in dataclasses.fields(value)]
    return _bytes({name: getattr(value, name) for name in fields if name not in _NOT_CONTENT})


def _of_picture(source: Any) -> bytes:
    """A picture that was not opened before training (vision.check_pictures: false): all of them may be terabytes."""
    if isinstance(source, Path):
        return f"p{source.name} {source.stat().st_size if source.is_file() else None}".encode()
    return _bytes(source) if isinstance(source, bytes) else f"p{source.row} {source.column}".encode()


def files_print(source: str) -> dict[str, dict[str, Any]]:
    """The files of rows behind a local source, each with its size and digest; empty for any other source."""
    path = Path(source).expanduser()
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in _ROW_FILES and f.is_file())
    base = path if path.is_dir() else path.parent
    return {
        file.relative_to(base).as_posix(): {"bytes": file.stat().st_size, "digest": _file_digest(file)}
        for file in files[:_MOST_FILES]
    }


def model_print(config: Config) -> dict[str, Any] | None:
    """The base model's config, tokenizer and weights; None where no files of it are at hand."""
    folder = _model_folder(config)
    if folder is None:
        return None
    files = sorted(
        f
        for f in folder.iterdir()
        if f.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt", ".py"}
    )
    files = [file for file in files if file.is_file()]
    weights = [file for file in files if file.suffix == ".safetensors"]
    whole = sum(file.stat().st_size for file in weights) <= WHOLE_BYTES
    prints = {
        file.name: _file_digest(file) if whole or file not in weights else _sampled_digest(file)
        for file in files
    }
    return {"read": "whole" if whole else "in samples", "files": prints}


def _model_folder(config: Config) -> Path | None:
    from trimtab.models.load import BUILT_IN, shapes_only

    name = config.model.name
    if name in BUILT_IN or shapes_only():
        return None  # made by the program from a seed of its own, or without weights
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache

    kept = (
        try_to_load_from_cache(name, "config.json", revision=config.model.revision)
        if name.count("/") == 1
        else None
    )
    return Path(kept).parent if isinstance(kept, str) else None


def reward_prints(config: Config) -> dict[str, str | None]:
    """Each reward of the user's own by the source of its module: as it is understood, not as it is laid out."""
    prints: dict[str, str | None] = {}
    for name in reward_weights(config):
        module = name.partition(":")[0]
        if ":" in name:
            file = getattr(sys.modules.get(module), "__file__", None) or _found_module(module)
            prints[name] = _source_digest(Path(file)) if file is not None else None
    return prints


def _found_module(name: str) -> str | None:
    """The file of a module that is not imported yet, without running it."""
    for place in (os.getcwd(), *sys.path):
        stem = Path(place or ".", *name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file():
                return str(file)
    return None


def _source_digest(file: Path) -> str | None:
    try:
        raw = file.read_bytes()
    except OSError:
        return None
    # Comments and layout go; positions are no part of a dump. What is not Python that can be read counts by its bytes.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        raw = ast.dump(ast.parse(raw)).encode()
    return _digest([raw])


def _file_digest(file: Path) -> str:
    if file.stat().st_size > WHOLE_BYTES:
        return _sampled_digest(file)
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sampled_digest(file: Path) -> str:
    """Of a large file: its size, its header and places all over it."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        parts = [str(size).encode()]
        for number in range(_SAMPLES):
            opened.seek(max(0, size - _SAMPLE) * number // (_SAMPLES - 1))
            parts.append(opened.read(_SAMPLE))
    return _digest(parts)


def _digest(parts: Iterable[bytes] | Sequence[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()
