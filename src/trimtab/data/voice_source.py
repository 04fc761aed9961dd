"""Finds the rows of a voice: a folder with its metadata, a file of rows, or clips with a text file beside each.

Only local, since clips lie beside their rows as files. Only lists names; no clip is opened.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from trimtab.config.schema import DataSettings
from trimtab.data.clips import SUFFIXES
from trimtab.data.folders import inside, of_split
from trimtab.data.read import READERS, Row, read_file
from trimtab.data.sources import Loaded, load_rows, within
from trimtab.errors import RequestError, some_of

METADATA = ("metadata.json", "metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.parquet")
ABOUT = "dataset_info"
"""What a metadata.json says about the set as a whole, beside its rows."""


BUILT_IN = {"espeak-voices": Path(__file__).parent / "shipped" / "voices"}
"""The folders with clips that come with Trimtab, by the name that `data.source` has for them."""


def load_voice_rows(source: str, data: DataSettings, setting: str) -> Loaded:
    """The rows behind a source, their clips as paths."""
    path = BUILT_IN.get(source) or Path(source).expanduser()
    if not path.exists():
        raise _nothing_there(source, path, setting)
    loaded = _folder(path, data, setting) if path.is_dir() else load_rows(str(path), data, setting)
    rows = [row for found in loaded.rows for row in _by_id(found)][: data.max_rows]
    loaded.rows = within(rows, str(path), data)
    if not loaded.rows:
        raise RequestError.of(
            f"{setting}={source}: no rows",
            f"read {some_of(loaded.files, 3)}, and found nothing in it",
            f"point {setting} at a folder or file that has rows",
        )
    if source in BUILT_IN:
        loaded.source = f"{source} (built in)"
    return loaded


def _folder(path: Path, data: DataSettings, setting: str) -> Loaded:
    files = inside(path)
    if listed := [file for file in files if file.name.lower() in METADATA]:
        # One list at the top tells of all clips; only lists inside of `train/` and `test/` are of splits.
        at_top = [file for file in listed if file.parent == path]
        listed, notes = (at_top, []) if at_top else of_split(path, listed, data.split, setting)
        if len({file.parent for file in listed}) < len(listed):
            raise RequestError.of(
                f"{setting}={path}: several lists of clips ({', '.join(file.name for file in listed)})",
                "it is not clear which of them is meant",
                f"name one of the files as {setting}, or remove the other",
            )
        rows = [row for file in listed for row in read_file(file)]
        return Loaded(rows, f"{path} (local folder)", [str(file) for file in listed], notes=notes)
    if any(file.suffix.lower() in READERS for file in files):
        return load_rows(str(path), data, setting)
    return _pairs(path, *of_split(path, files, data.split, setting))


def _pairs(path: Path, files: list[Path], notes: list[str]) -> Loaded:
    """Clips with a text file of the same name beside each: `a.wav` and `a.txt`."""
    clips = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not any(file.suffix.lower() == ".txt" for file in files) or not clips:
        found = f"{len(clips):,} clips and no text" if clips else "no clips and no list of them"
        raise RequestError.of(
            f"{path}: {found} ({some_of([file.name for file in files], 3) or 'the folder is empty'})",
            "each clip needs what is said in it",
            "write a metadata.json or metadata.jsonl with audio and text, or a .txt file beside each clip",
        )
    rows = [
        Row({"audio": clip.relative_to(path).as_posix()}, str(path), number, "clip", path)
        for number, clip in enumerate(clips, 1)
    ]
    return Loaded(rows, f"{path} (local folder)", [str(path)], notes=notes)


def _by_id(row: Row) -> list[Row]:
    """The rows of a JSON object that is keyed by their ids, which was read as a single row; others as they are."""
    if not row.values or not all(isinstance(value, dict) for value in row.values.values()):
        return [row]
    entries = {name: value for name, value in row.values.items() if name != ABOUT}
    return [
        row._replace(values={"id": name, **value}, number=number)
        for number, (name, value) in enumerate(entries.items(), 1)
    ]


def _nothing_there(source: str, path: Path, setting: str) -> RequestError:
    if source in BUILT_IN:
        return RequestError.of(
            f"{setting}={source}: its clips are not in this installation ({path})",
            "they come with Trimtab, as files of the package",
            "install Trimtab again, or name a folder with clips of your own",
        )
    near = get_close_matches(source, BUILT_IN, n=1)
    near += [
        str(path.parent / name)
        for name in get_close_matches(path.name, [f.name for f in path.parent.glob("*")])
    ]
    return RequestError.of(
        f"{setting}={source}: no such file or folder",
        "the clips of a voice are read as files beside their rows, and nothing is downloaded",
        f"did you mean {' or '.join(near)}?"
        if near
        else f"check the path; copy a remote set here and name its folder; clips that are here: {', '.join(BUILT_IN)}",
    )
