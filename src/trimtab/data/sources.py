"""Finds the rows behind `data.source`: a built-in set, a local file or folder, `s3://…`, or a hub id.

The kind is decided by looks, in that order, and said in the report. Nothing remote is touched, and no credential
looked for, unless the source is remote.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import DataSettings
from trimtab.data import s3
from trimtab.data.read import READERS, Row, read_file
from trimtab.errors import RequestError, some_of

if TYPE_CHECKING:
    import datasets

BUILT_IN = ("device-errors", "error-kinds", "error-kinds-held-out", "sums")
HELD_OUT = {"error-kinds": "error-kinds-held-out"}
"""Built-in sets that bring rows to evaluate on."""

# Files that data sets carry beside their rows.
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}

# How a file name says which split it holds: `train.jsonl`, `test-00000-of-00001.parquet`, `val.csv`.
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, eq=False)
class Cell:
    """A picture of a hub data set, left in its table on disk until it is needed. Equal only to itself."""

    table: datasets.Dataset
    row: int
    column: str

    def value(self) -> dict[str, Any] | None:
        """{bytes, path} as the table has it."""
        found: dict[str, Any] | None = self.table[self.row][self.column]
        return found


@dataclass
class Loaded:
    """The rows of one source, and what the report says about where they came from."""

    rows: list[Row]
    source: str
    files: list[str]
    cache: str | None = None
    notes: list[str] = field(default_factory=list)


def load_rows(
    source: str, settings: DataSettings, setting: str = "data.source", encoded: bool = False
) -> Loaded:
    """Read the rows of `source`. `setting` is the name that errors use: data.source or data.eval_source.
    `encoded` leaves the pictures of a hub data set where they are, as a `Cell` each."""
    loaded = _load(source, settings, setting, encoded)
    loaded.rows = within(loaded.rows, source, settings)
    if settings.max_rows is not None:
        loaded.rows = loaded.rows[: settings.max_rows]
    if not loaded.rows:
        raise RequestError.of(
            f"{setting}={source}: no rows",
            f"read {', '.join(loaded.files)}, and found nothing in it",
            f"point {setting} at a file that has rows",
        )
    return loaded


def within(rows: list[Row], source: str, settings: DataSettings) -> list[Row]:
    """The rows with the folders that their paths may lead into: that of the source, and `data.media_root`."""
    folder = Path(source).expanduser()
    if settings.media_root is None and not folder.is_dir():
        return rows
    own = (folder,) if folder.is_dir() else ()
    more = (Path(settings.media_root).expanduser(),) if settings.media_root is not None else ()
    return [
        row._replace(roots=(*(own or ((row.folder,) if row.folder is not None else ())), *more))
        for row in rows
    ]


def _load(source: str, settings: DataSettings, setting: str, encoded: bool) -> Loaded:
    if source in BUILT_IN:
        place = importlib.resources.files("trimtab.data") / "shipped" / f"{source}.jsonl"
        with importlib.resources.as_file(place) as path:
            return Loaded(read_file(path, source), f"{source} (built in)", [source])
    if source.startswith("s3://"):
        return _load_s3(source, settings, setting)
    scheme = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]+)://", source)
    if scheme:
        raise RequestError.of(
            f"{setting}={source}: a {scheme[1]}:// address",
            "the only remote addresses that Trimtab reads are s3:// and hub ids (`owner/name`)",
            "download the file and give its path",
        )
    path = Path(source).expanduser()
    if path.exists():
        return _load_local(path, settings, setting)
    if _HUB_ID.fullmatch(source) and Path(source).suffix.lower() not in READERS:
        return _load_hub(source, settings, setting, encoded)
    raise _nothing_there(source, path, setting)


def _load_local(path: Path, settings: DataSettings, setting: str) -> Loaded:
    notes: list[str] = []
    names = [path.as_posix()]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
        names = _choose([file.as_posix() for file in inside], settings.split, f"{setting}={path}", notes)
    rows: list[Row] = []
    for name in names:
        if settings.max_rows is None or len(rows) < settings.max_rows:
            rows += read_file(Path(name), most=settings.max_rows)
    return Loaded(rows, f"{path} (local {'folder' if path.is_dir() else 'file'})", names, notes=notes)


def _load_s3(source: str, settings: DataSettings, setting: str) -> Loaded:
    notes: list[str] = []

    def choose(names: list[str]) -> list[str]:
        return _choose(names, settings.split, f"{setting}={source}", notes)

    files = s3.fetch(source, settings.endpoint_url, choose, setting)
    rows = [row for file in files for row in read_file(file.path, file.address)]
    kept = sum(file.from_cache for file in files)
    cache = "from the cache (etag unchanged, checksum verified)" if kept else "downloaded"
    if 0 < kept < len(files):
        cache = f"{kept} of {len(files)} files {cache}, the others downloaded"
    if damaged := [file.address for file in files if file.damaged]:
        notes.append(f"the cached copy of {some_of(damaged, 3)} was damaged, and was downloaded again")
    return Loaded(rows, f"{source} (S3)", [file.address for file in files], cache, notes)


def _load_hub(source: str, settings: DataSettings, setting: str, encoded: bool) -> Loaded:
    """A hub data set, through `datasets` and its own cache. Code in the repository is never run."""
    import datasets

    try:
        table = datasets.load_dataset(source, settings.subset, split=settings.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        text = str(error).strip().splitlines()
        raise RequestError.of(
            f"{setting}={source}: no such file or folder here, and as a hub id it could not be loaded",
            text[0] if text else type(error).__name__,
            f"check the path or the id; data.subset ({settings.subset}) and data.split ({settings.split}) choose "
            "the part; a private set needs HF_TOKEN",
        ) from None
    if settings.max_rows is not None:
        table = table.select(range(min(settings.max_rows, len(table))))
    shown = f"{source}[{settings.split}]"
    rows = encoded_rows(table, shown) if encoded else [Row(dict(v), shown, n) for n, v in enumerate(table, 1)]
    return Loaded(rows, f"{shown} (hub)", [shown], "the hub's own cache")


def encoded_rows(table: datasets.Dataset, shown: str) -> list[Row]:
    """The rows of a table without decoding or even reading its pictures, which may be more than memory holds."""
    import datasets

    single = [name for name, feature in table.features.items() if isinstance(feature, datasets.Image)]
    for name, feature in table.features.items():
        if name in single:
            table = table.cast_column(name, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(name, datasets.List(datasets.Image(decode=False)))
    pictures = {name: table.select_columns([name]) for name in single}
    others = table.remove_columns(single)
    names = list(table.features)
    rows = []
    # A table without columns has no rows to go through.
    for place, rest in enumerate(others if others.features else ({} for _ in range(len(table)))):
        values = rest | {name: Cell(cells, place, name) for name, cells in pictures.items()}
        rows.append(Row({name: values[name] for name in names}, shown, place + 1))
    return rows


def _choose(names: Sequence[str], split: str, source: str, notes: list[str]) -> list[str]:
    """The files of a folder that hold rows; where their names say splits, only those of `split`."""
    readable = [name for name in names if _suffix(name) in READERS and Path(name).name not in _NOT_ROWS]
    if not readable:
        there = ", ".join(sorted({_suffix(name) or Path(name).name for name in names})) or "nothing"
        raise RequestError.of(
            f"{source}: no file with rows (it holds {there})",
            f"rows are read from {', '.join(READERS)}",
            "name another folder, or a file",
        )
    splits = {name: _split_of(name) for name in readable}
    if not any(splits.values()):
        return readable
    wanted = SPLITS.get(split, split)
    chosen = [name for name in readable if splits[name] == wanted]
    if not chosen:
        raise RequestError.of(
            f"{source}: no file of the split `{split}`",
            f"the files there are named for {', '.join(sorted({s for s in splits.values() if s}))}",
            "set data.split to one of them, or name the file",
        )
    if left := [Path(name).name for name in readable if name not in chosen]:
        notes.append(f"data.split={split} left out {', '.join(left)}")
    return chosen


def _split_of(name: str) -> str | None:
    words = re.split(r"[-_]", Path(name).name.partition(".")[0].lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _suffix(name: str) -> str:
    return Path(name).suffix.lower()


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith((".", "__")) for part in file.relative_to(root).parts)


def _nothing_there(source: str, path: Path, setting: str) -> RequestError:
    parent = path.parent
    tried = [f"a built-in set ({', '.join(BUILT_IN)})", f"a file or folder ({path})"]
    tried += [] if parent.is_dir() else [f"the folder {parent}, which is not there either"]
    neighbours = [entry.name for entry in parent.glob("[!.]*")]
    near = [str(parent / name) for name in get_close_matches(path.name, neighbours, n=3, cutoff=0.6)]
    near += get_close_matches(source, BUILT_IN, n=1, cutoff=0.6)
    return RequestError.of(
        f"{setting}={source}: nothing of that name",
        f"tried as {'; '.join(tried)}; a hub id is `owner/name`, a remote file `s3://bucket/key`",
        f"did you mean {' or '.join(near)}?" if near else "check the path",
    )
