"""Finds rows with pictures where `load_rows` alone would not: folders of pictures, and VQAv2 as its authors give it.

Only lists names and joins files; no picture is opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trimtab.config.schema import DataSettings
from trimtab.data.folders import inside, of_split
from trimtab.data.picture_sets import PictureSet
from trimtab.data.pictures import SUFFIXES
from trimtab.data.read import READERS, Row, decode_text, read_file
from trimtab.data.sources import SPLITS, Loaded, load_rows, within
from trimtab.errors import RequestError, some_of


def load_picture_rows(source: str, data: DataSettings, known: PictureSet | None, setting: str) -> Loaded:
    """The rows behind a source, pictures still encoded or as paths. `known` is the declared set, if it is one."""
    path = Path(source).expanduser()
    if not path.is_dir():
        return load_rows(source, data, setting, encoded=True)
    files = inside(path)
    loaded = _vqa_files(path, files, data, setting) if known is not None and known.name == "vqav2" else None
    if loaded is None and (listed := [file for file in files if _is_metadata(file)]):
        # One list at the top tells of all pictures; only lists inside of `train/` and `test/` are of splits.
        at_top = any(file.parent == path for file in listed)
        listed, notes = (listed, []) if at_top else of_split(path, listed, data.split, setting)
        rows = [row for file in listed for row in read_file(file)]
        loaded = Loaded(rows, f"{path} (local folder)", [str(file) for file in listed], notes=notes)
    if loaded is None and not any(file.suffix.lower() in READERS for file in files):
        loaded = _texts(path, *of_split(path, files, data.split, setting))
    if loaded is None:
        return load_rows(source, data, setting, encoded=True)
    loaded.rows = within(loaded.rows[: data.max_rows], source, data)
    if not loaded.rows:
        raise RequestError.of(
            f"{setting}={source}: no rows",
            f"read {', '.join(loaded.files)}, and found nothing in it",
            f"point {setting} at a folder that has rows",
        )
    return loaded


def _is_metadata(file: Path) -> bool:
    """A list of the pictures beside it, by a column `file_name`, as `datasets` reads it."""
    return file.name.lower() in ("metadata.jsonl", "metadata.csv", "metadata.parquet")


def _texts(path: Path, files: list[Path], notes: list[str]) -> Loaded | None:
    """Pictures with a text file of the same name beside each: `cat.png` and `cat.txt`."""
    pictures = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not pictures:
        return None
    texts = {file.with_suffix(""): file for file in files if file.suffix.lower() == ".txt"}
    if not texts:
        raise RequestError.of(
            f"{path}: {len(pictures):,} pictures and no text ({some_of([p.name for p in pictures], 3)})",
            "each picture needs what is to be answered to it",
            "write a metadata.jsonl with file_name, question and answer, or a .txt file beside each picture",
        )
    rows = []
    for number, picture in enumerate(pictures, 1):
        text = texts.get(picture.with_suffix(""))
        said = decode_text(text.read_bytes(), str(text)) if text is not None else None
        values = {"image": picture.relative_to(path).as_posix(), "text": said}
        rows.append(Row(values, str(path), number, "picture", path))
    return Loaded(rows, f"{path} (local folder)", [str(path)], notes=notes)


def _vqa_files(path: Path, files: list[Path], data: DataSettings, setting: str) -> Loaded | None:
    """VQAv2's own files: questions and annotations, each a JSON of its own, and a folder of COCO's pictures."""
    asked = _by_split(file for file in files if file.name.endswith("questions.json"))
    if not asked:
        return None
    answered = _by_split(file for file in files if file.name.endswith("annotations.json"))
    wanted = SPLITS.get(data.split, data.split)
    if wanted not in asked or wanted not in answered:
        raise RequestError.of(
            f"{setting}={path}: questions and annotations of the split `{data.split}`",
            f"questions are there of {', '.join(asked)}, annotations of {', '.join(answered) or 'none'}",
            "set data.split to one that has both; a test split has no answers to train on",
        )
    questions, annotations = read_file(asked[wanted]), read_file(answered[wanted])
    answers = {row.values.get("question_id"): row.values for row in annotations}
    pictures = _by_number(file for file in files if file.suffix.lower() in SUFFIXES)
    rows = []
    for row in questions:
        values: dict[str, Any] = dict(row.values)
        number = values.get("image_id")
        values["answers"] = answers.get(values.get("question_id"), {}).get("answers")
        picture = pictures.get(number) if isinstance(number, int) else None
        values["image"] = str(picture.absolute()) if picture else f"COCO's picture {number}"
        rows.append(row._replace(values=values))
    told = [str(asked[wanted]), str(answered[wanted])]
    return Loaded(rows, f"{path} (local folder)", told)


def _by_split(files: Iterable[Path]) -> dict[str, Path]:
    """`v2_OpenEnded_mscoco_val2014_questions.json` is of validation."""
    found: dict[str, Path] = {}
    for file in files:
        words = [re.sub(r"\d+$", "", word) for word in re.split(r"[-_]", file.stem.lower())]
        split = next(
            (SPLITS.get(word, word) for word in words if word in SPLITS or word == "test-dev"), "train"
        )
        found.setdefault(split, file)
    return found


def _by_number(files: Iterable[Path]) -> dict[int, Path]:
    """COCO's pictures by their number: `COCO_val2014_000000262148.jpg`, or `000000262148.jpg`."""
    numbered = ((re.search(r"(\d+)$", file.stem), file) for file in files)
    return {int(found[1]): file for found, file in numbered if found}
