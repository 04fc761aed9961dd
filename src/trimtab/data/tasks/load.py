"""Finds the rows of a benchmark task: in a local folder, on the hub, or in the small sample that Trimtab ships.

A place that was named is the only one that is looked at. Without one the hub is asked, and where it cannot be
reached the shipped sample is taken, which every result made with it says.
"""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trimtab.data.read import READERS, Row, read_file
from trimtab.data.tasks.task import Task
from trimtab.errors import RequestError

Origin = Literal["folder", "hub", "sample"]

SAMPLE_NOTE = "a few rows written for this project: a smoke test, not a benchmark"

# How files name a split besides our own name for it.
_ALSO = {
    "validation": ("dev", "val", "valid", "validation_matched", "dev_matched"),
    "validation_mismatched": ("dev_mismatched",),
}


@dataclass(frozen=True)
class TaskRows:
    """The rows of one task, by split, and where they are from."""

    splits: dict[str, list[Row]]
    origin: Origin
    source: str
    """For tables and JSON: the folder, the hub's id, or the sample with what it is."""
    found: dict[str, int]
    """How many rows each split has in all."""

    @property
    def evaluated(self) -> list[str]:
        return [split for split in self.splits if split != "train"]


def load_task(
    task: Task,
    data: str | Path | None = None,
    *,
    train_rows: int | None = None,
    eval_rows: int | None = None,
    seed: int = 0,
    hub: Callable[[], bool] = lambda: True,
) -> TaskRows:
    """Rows for training and evaluation. `data`: a folder, `hub`, `sample`, or None for the hub if `hub()` is true.

    Training rows are drawn by `seed`; the evaluated ones are the same for every seed, so that seeds differ by training.
    """
    draw = _Draw(train_rows, eval_rows, seed)
    if data is None:
        data = "hub" if hub() else "sample"
    if str(data) == "sample":
        return _from_sample(task, draw)
    if str(data) == "hub":
        return _from_hub(task, draw)
    return _from_folder(task, Path(data).expanduser(), draw)


@dataclass(frozen=True)
class _Draw:
    train_rows: int | None
    eval_rows: int | None
    seed: int

    def places(self, split: str, groups: list[str] | int) -> list[int]:
        """Which rows of a split are taken, in the order in which they are used.

        Rows that are judged together (`groups` names each row's) are taken together, so that none is judged by half.
        """
        count = groups if isinstance(groups, int) else len(groups)
        wanted = self.train_rows if split == "train" else self.eval_rows
        if wanted is None or wanted >= count:
            return list(range(count))
        chance = random.Random(f"{split} {self.seed if split == 'train' else 0}")
        if isinstance(groups, int) or split == "train":
            return chance.sample(range(count), wanted)
        members: dict[str, list[int]] = {}
        for place, group in enumerate(groups):
            members.setdefault(group, []).append(place)
        taken: list[int] = []
        for group in chance.sample(list(members), len(members)):
            if taken and len(taken) + len(members[group]) > wanted:
                break
            taken += members[group]
        return taken

    def taken(self, task: Task, split: str, rows: list[Row]) -> list[Row]:
        groups = [task.question(r).group for r in rows] if task.grouped_by else len(rows)
        return [rows[place] for place in self.places(split, groups)]

    def of_whole(self, task: Task, whole: dict[str, list[Row]], origin: Origin, source: str) -> TaskRows:
        drawn = {split: self.taken(task, split, rows) for split, rows in whole.items()}
        return TaskRows(drawn, origin, source, {split: len(rows) for split, rows in whole.items()})


def _from_sample(task: Task, draw: _Draw) -> TaskRows:
    place = importlib.resources.files("trimtab.data") / "shipped" / "glue" / f"{task.name}.jsonl"
    with importlib.resources.as_file(place) as path:
        rows = read_file(path, f"the shipped sample of {task.name}")
    whole = {split: [row for row in rows if row.values["split"] == split] for split in task.splits}
    return draw.of_whole(task, whole, "sample", f"shipped sample ({SAMPLE_NOTE})")


def _from_folder(task: Task, folder: Path, draw: _Draw) -> TaskRows:
    if not folder.is_dir():
        raise RequestError.of(
            f"--data {folder}: no such folder",
            "it holds one folder for each task, with train and validation files inside",
            "check the path; `--data hub` takes the hub, `--data sample` the sample that Trimtab ships",
        )
    inside = {plain_name(f): f for f in folder.iterdir() if f.is_dir()}
    home = inside.get(task.name)
    if home is None:
        raise RequestError.of(
            f"--data {folder}: no folder {task.name}",
            f"there are {', '.join(sorted(f.name for f in inside.values())) or 'no folders'} in it",
            f"put {task.name}/train.jsonl and {task.name}/validation.jsonl there, or leave {task.name} out",
        )
    files = {split: _file_of(home, split) for split in task.splits}
    for split in ("train", "validation"):
        if files[split] is None:
            raise RequestError.of(
                f"{home}: no {split} file",
                f"it holds {', '.join(sorted(f.name for f in home.iterdir())) or 'nothing'}",
                f"put {split}.jsonl there (or {', '.join(r for r in READERS if r != '.jsonl')})",
            )
    whole = {split: read_file(file) for split, file in files.items() if file is not None}
    for split, rows in whole.items():
        if not rows:
            raise RequestError.of(
                f"{files[split]}: no rows", "nothing can be measured on it", "fill the file"
            )
    return draw.of_whole(task, whole, "folder", str(home))


def plain_name(place: Path) -> str:
    """A folder's name as tasks are called: `SST-2` and `sst_2` are `sst2`."""
    return place.name.lower().replace("-", "").replace("_", "")


def _file_of(home: Path, split: str) -> Path | None:
    suffixes = (".jsonl", ".json", ".tsv", ".csv", ".parquet", ".ndjson")
    names = (f"{name}{suffix}" for name in (split, *_ALSO.get(split, ())) for suffix in suffixes)
    return next((home / name for name in names if (home / name).is_file()), None)


def _from_hub(task: Task, draw: _Draw) -> TaskRows:
    shown = f"{task.hub}{f'/{task.subset}' if task.subset else ''}"
    splits, found = {}, {}
    for split, theirs in task.splits.items():
        table = _hub_table(task, theirs, shown)
        where = f"{shown}[{theirs}]"
        # Only what is used becomes Python objects: MNLI has 393,000 rows. Groups can only be told from the rows.
        places = list(range(len(table))) if task.grouped_by else draw.places(split, len(table))
        rows = [Row(dict(v), where, n + 1) for n, v in zip(places, table.select(places), strict=True)]
        splits[split] = draw.taken(task, split, rows)
        found[split] = len(table)
    return TaskRows(splits, "hub", shown, found)


def _hub_table(task: Task, split: str, shown: str) -> Any:
    """One split through `datasets`. Code in the repository is never run: then the hub's own Parquet copy is read."""
    import datasets

    load = partial(datasets.load_dataset, task.hub, task.subset, split=split)
    try:
        try:
            return load()
        except RuntimeError as error:
            if "script" not in str(error).lower():
                raise
            return load(revision="refs/convert/parquet")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        text = str(error).strip().splitlines()
        raise RequestError.of(
            f"{shown}[{split}]: could not be loaded from the hub",
            text[0] if text else type(error).__name__,
            "check the connection, or give the rows by --data FOLDER (`--data sample` takes the shipped sample)",
        ) from error
