"""Which files a rehearsed program wrote. Each of its processes tells what Python opens to write, renames or removes.

It only looks: nothing is held back or changed here. What C++ or Rust writes (torch.save, safetensors) Python does not
tell; the parent looks for that in the working directory and in the folders that the program made.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trimtab.rehearse.session import Recorder, read_lines

How = Literal["new", "changed", "removed"]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("rename", "remove", "rmdir", "mkdir", "symlink", "link", "truncate")
_EVENTS = frozenset(("open", "exec", "sqlite3.connect", *(f"os.{name}" for name in _CHANGES)))
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
IN_PLACE = "--in-place"
_MOST_LOOKED_AT = 20_000
"""Files of the working directory whose times are compared."""


@dataclass(frozen=True)
class Written:
    """A file that a rehearsal wrote."""

    path: str
    how: How
    real: bool
    """Whether it was written where it says, and not to an overlay."""


@dataclass
class Files:
    """What became of the files that the program wrote."""

    overlay: bool = False
    """Whether they went to an overlay, which was thrown away; otherwise they were written for real."""
    why: str = ""
    """Why there was no overlay."""
    kept: str = ""
    """The folder to which they were moved."""
    written: list[Written] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Files:
        """Back from its JSON form."""
        return cls(**{**data, "written": [Written(**one) for one in data.get("written", [])]})


def is_noise(path: str) -> bool:
    """Whether a path tells nothing about the program: compiled modules, devices."""
    return (
        f"{os.sep}__pycache__{os.sep}" in path or path.endswith("__pycache__") or path.startswith(_NOT_FILES)
    )


def watch(recorder: Recorder, without: Iterable[str]) -> set[str]:
    """Record from now on every path that this process writes, save beneath the folders `without`.

    Answers with the files of the modules that are there and of all code that is executed from now on; the set grows.
    """
    executed = {getattr(module, "__file__", None) or "<built-in>" for module in list(sys.modules.values())}
    told: set[tuple[str, str]] = set()
    ours = (str(recorder.folder), *without)

    def tell(given: object, how: str, folder: object = -1) -> None:
        if not isinstance(given, str | bytes | os.PathLike) or not given:
            return
        try:
            path = os.fsdecode(given)
            if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            path = os.path.abspath(path)
        except OSError:
            # The working directory is gone: so is what is written there.
            return
        if path.startswith(_NOT_FILES) or any(path == o or path.startswith(o + os.sep) for o in ours):
            return
        there = os.path.lexists(path)
        if (how == "made" and there) or (how == "removed" and not there):
            # Asked for and refused: told before it is tried.
            return
        if how == "open":
            how = "changed" if there else "new"
        if (path, how) not in told:
            told.add((path, how))
            recorder.write(t="wrote", path=path, how=how)

    # Bound here: at Python's end the module's names may be gone while files are still opened.
    def hook(
        event: str, given: tuple[Any, ...], events: frozenset[str] = _EVENTS, writes: int = _WRITES
    ) -> None:
        if event not in events:
            return
        if event == "open":
            if isinstance(given[2], int) and given[2] & writes:
                tell(given[0], "open")
        elif event == "exec":
            executed.add(getattr(given[0], "co_filename", "<string>"))
        elif event == "os.rename":
            tell(given[0], "removed", given[2])
            tell(given[1], "open", given[3])
        elif event in ("os.remove", "os.rmdir"):
            tell(given[0], "removed", given[1])
        elif event == "os.mkdir":
            tell(given[0], "made", given[2])
        elif event in ("os.symlink", "os.link"):
            tell(given[1], "open", given[-1])
        elif given and given[0] != ":memory:":
            tell(given[0], "open")

    sys.addaudithook(hook)
    return executed


class Look:
    """The files of a folder (if one is given) before the rehearsal, to compare with afterwards."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._began = time.time_ns()
        self._before = dict(_times(folder)) if folder else {}

    def changes(self, records: Path) -> list[Written]:
        """What was written for real: as the processes told, and as the files' times tell."""
        first: dict[str, str] = {}
        for file in sorted(records.glob("records-*.jsonl"), key=lambda p: p.stat().st_mtime_ns):
            for record in read_lines(file):
                if record["t"] == "wrote":
                    first.setdefault(record["path"], record["how"])
        for folder in [path for path, how in first.items() if how == "made"]:
            for path, _ in _times(Path(folder)):
                first.setdefault(path, "new")
        after = dict(_times(self._folder)) if self._folder else {}
        whole = len(self._before) < _MOST_LOOKED_AT
        for path in after if whole else ():
            if path not in self._before:
                first.setdefault(path, "new")
            elif self._before[path] != after[path]:
                first.setdefault(path, "changed")
        for path in self._before if whole else ():
            if path not in after and not os.path.lexists(path):
                first.setdefault(path, "removed")
        found = (self._as_it_is(path, how) for path, how in first.items() if not is_noise(path))
        written = sorted((one for one in found if one is not None), key=lambda one: one.path)
        # A folder is told by its files.
        above = {str(folder) for one in written for folder in Path(one.path).parents}
        return [one for one in written if one.path not in above]

    def _as_it_is(self, path: str, how: str) -> Written | None:
        """What a path that was written has become; None when it is as it was before."""
        there = os.path.lexists(path)
        if how in ("new", "made"):
            return Written(path, "new", True) if there else None
        if not there:
            return Written(path, "removed", True)
        changed = os.path.isfile(path) and os.stat(path).st_mtime_ns >= self._began
        return Written(path, "changed", True) if changed else None


def _times(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Path, time and size of the files beneath a folder; of very many, the first."""
    count = 0
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                yield path, (status.st_mtime_ns, status.st_size)
            count += 1
            if count >= _MOST_LOOKED_AT:
                return


def sentence(files: Files, most: int = 5) -> str:
    """What became of the files, in a line for the report; nothing when there is nothing to say."""
    apart = [one for one in files.written if not one.real]
    real = [one for one in files.written if one.real]
    told = []
    if apart:
        went = f"kept in {files.kept}" if files.kept else "written to an overlay and thrown away"
        told.append(
            f"{went}: {_named(apart, most)}" + ("" if files.kept else " (--keep-files DIR keeps them)")
        )
    if real or (not files.overlay and files.why not in ("", IN_PLACE)):
        why = f" ({files.why})" if files.why else ""
        told.append(f"written for real{why}: {_named(real, most)}")
    return "; ".join(told)


def _named(files: list[Written], most: int) -> str:
    here = os.getcwd() + os.sep
    # The working directory's own first: the rest are mostly caches.
    ordered = sorted(files, key=lambda one: (not one.path.startswith(here), one.path))
    names = [
        one.path.removeprefix(here) + (f" ({one.how})" if one.how != "new" else "") for one in ordered[:most]
    ]
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return ", ".join(names) + more if names else "nothing"
