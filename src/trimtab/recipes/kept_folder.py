"""The folder of the weights that a run keeps: it gets its name when it is whole, and says what was written into it.

An earlier one is removed only where all of it is known to be ours; else it is set aside under another name.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.files import sync_folder, write_whole
from trimtab.manifest import Damaged, is_sealed, only_listed, part_of, read_manifest, remove_listed, seal
from trimtab.recipes.run_mark import MARK, Mark

CARD = "README.md"
_WITH_FILES = ("adapter", "model", "pictures", "clips")
"""Folders of a run into which single files are written."""
_HALF_MADE = re.compile(r"\.[0-9a-f]{8}\.(?P<what>partial|old)$")


@contextmanager
def whole_kept(target: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield a new folder beside `target`, which takes its place when the block ends without an error."""
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    scratch.mkdir(parents=True)
    try:
        yield scratch
        seal(scratch, {"kind": "kept"}, without=(CARD,))
        old = scratch.with_suffix(".old")
        if os.path.lexists(target):
            target.rename(old)
        scratch.rename(target)
        sync_folder(target.parent)
        _let_go(old, target, say)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_card(kept: Path, card: str) -> None:
    write_whole(kept / CARD, card)


def check_kept(folder: Path) -> None:
    """Raise RequestError where weights are not those that the run kept; those of an earlier version cannot tell."""
    if not is_sealed(folder):
        return
    try:
        for name, part in read_manifest(folder).files.items():
            if name.endswith(".safetensors"):
                if not (folder / name).is_file():
                    raise Damaged(f"{name} is missing")
                if part_of(folder / name) != part:
                    raise Damaged(f"{name}: its content has changed since it was written")
    except Damaged as error:
        raise RequestError.of(
            f"{folder}: {error}",
            "what the model answers would not be what was trained",
            "put the file back from a copy, or make it again from the run's last checkpoint (training.resume=true)",
        ) from None


def clear_half_made(run: Path, say: Callable[[str], None]) -> None:
    """Clear away what a kill left half-written in a run's folder, where its list says that it is the run's."""
    mark = Mark.of(run)
    if mark is None:
        return
    for name in (MARK, *mark.entries):
        for path in sorted(run.glob(f".{glob.escape(name)}.*")):
            _clear(path, run / name, say)
        if name in _WITH_FILES and not (run / name).is_symlink():
            for path in sorted((run / name).glob(".*.partial")):
                if path.is_file():
                    _clear(path, path, say)


def _clear(path: Path, target: Path, say: Callable[[str], None]) -> None:
    found = _HALF_MADE.search(path.name)
    if found is None or path.is_symlink():
        return
    if path.is_file():
        if found["what"] == "partial":
            path.unlink()
    elif found["what"] == "partial":
        shutil.rmtree(path)
    elif not os.path.lexists(target):
        path.rename(target)  # the kill came before the new one had its name
    else:
        _let_go(path, target, say)


def _let_go(old: Path, target: Path, say: Callable[[str], None]) -> None:
    if not os.path.lexists(old):
        return
    card = old / CARD
    if not old.is_symlink() and is_sealed(old) and only_listed(old, besides=(CARD,)):
        card.unlink(missing_ok=True)
        remove_listed(old)
        return
    names = (f"{target.name}-set-aside" + (f"-{n}" if n > 1 else "") for n in range(1, 10_000))
    aside = next(p for p in (target.with_name(name) for name in names) if not os.path.lexists(p))
    old.rename(aside)
    say(f"{target.name}/ of before held files that no run is known to have written: it is now {aside.name}/")
