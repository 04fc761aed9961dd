"""Source files that a process reads with another text: how a fix is tried without touching a file.

Python's own ways to a source file are covered: the script itself, imports, `runpy` and spawned children; and what reads
lines for tracebacks. A program that opens its own source for itself sees the file as it is. Never imports torch.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import linecache
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.rehearse.session import VARIABLE

START = "trimtab.rehearse.instead:install_from_environment"
"""What a process of a rehearsal that tries a fix calls before it reads the program."""
_texts: dict[str, str] = {}
_folder = Path()


def install_from_environment() -> None:
    """Put the texts of this process's rehearsal in place of the files; once."""
    global _folder
    if _texts:
        return
    _folder = Path(os.environ[VARIABLE])
    texts: dict[str, str] = json.loads((_folder / "settings.json").read_text())["instead"]
    _texts.update({os.path.realpath(file): text for file, text in texts.items()})
    if not _texts:
        return
    for file, text in _texts.items():
        for name in (file, os.path.relpath(file)):
            # Without a time of change linecache does not look at the file again.
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), file)
    _patch(importlib.machinery.SourceFileLoader, "get_data", _get_data)
    _patch(importlib.machinery.SourceFileLoader, "path_stats", _path_stats)
    _patch(runpy, "_get_code_from_file", _code_from_file)


def source_of(path: str) -> bytes:
    """A script's source as this process is to read it."""
    text = _text_for(path)
    return Path(path).read_bytes() if text is None else text.encode()


def used(folder: Path) -> set[str]:
    """The files that some process of a rehearsal has read with their other text."""
    return {path.read_text() for path in folder.glob("instead-*")}


def _text_for(path: str) -> str | None:
    file = os.path.realpath(path)
    text = _texts.get(file)
    if text is not None:
        (_folder / f"instead-{abs(hash(file))}-{os.getpid()}").write_text(file)
    return text


def _get_data(real: Callable[..., bytes], loader: Any, path: str) -> bytes:
    text = _text_for(path) if path.endswith(".py") else None
    return real(loader, path) if text is None else text.encode()


def _path_stats(real: Callable[..., Any], loader: Any, path: str) -> Any:
    if os.path.realpath(path) in _texts:
        # Then neither is compiled code of the file taken, nor that of the other text kept.
        raise OSError(f"{path} is read with another text")
    return real(loader, path)


def _code_from_file(real: Callable[..., Any], *args: Any) -> Any:
    text = _text_for(os.fsdecode(args[-1]))
    if text is None:
        return real(*args)
    code = compile(text, os.path.abspath(args[-1]), "exec", dont_inherit=True)
    # Python 3.11 gives the name back as well.
    return (code, args[-1]) if len(args) > 1 else code


def _patch(owner: Any, name: str, call: Callable[..., Any]) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def instead(*args: Any) -> Any:
        return call(real, *args)

    setattr(owner, name, instead)
