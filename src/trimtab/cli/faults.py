"""How a verb ends by an error that nobody foresaw: a few lines with the place, and the traceback on request.

Never hides what happened: the kind, the text and the place are always told, and the exit code is 1. Where a rehearsal
runs the verb, it looks for the error itself and gets it as it was raised.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.redaction import without_secrets

DEBUG = "TRIMTAB_DEBUG"
_FLAG = "--debug"
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_LONGEST = 2000
_USER_FRAMES = 5
_REPORT = f"run again with {_FLAG} to see the traceback, and report it: this is a fault of Trimtab's"


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def show_tracebacks() -> None:
    """From now on, and in the processes that this one starts."""
    os.environ[DEBUG] = "1"


def take_debug_flag(words: list[str]) -> list[str]:
    """The command line without `--debug`, which holds for this process and those that it starts.

    It may stand before the verb or among its options; of `rehearse`, whose script has words of its own, before it.
    """
    verb = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    end = words.index("--") if "--" in words else len(words)
    if words[verb : verb + 1] == ["rehearse"]:
        end = min(end, verb)
    found = [place for place in range(end) if words[place] == _FLAG]
    if found:
        show_tracebacks()
    return [word for place, word in enumerate(words) if place not in found]


def tell(error: BaseException, message: str) -> None:
    """Print an error to the error stream, without secrets: the message, or the traceback where that is wanted."""
    text = "".join(traceback.format_exception(error)) if debugging() else f"error: {message}\n"
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()  # in one file with what was printed before, the message comes last
        print(without_secrets(text), end="", file=sys.stderr, flush=True)


def hiding(hook: Callable[..., Any]) -> Callable[..., None]:
    """The same hook for uncaught errors; what it prints is searched for secrets first."""

    def hide(*error: Any) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            hook(*error)
        print(without_secrets(printed.getvalue()), end="", file=sys.stderr)

    return hide


def told(error: BaseException) -> str:
    """What was raised and where, the lines of the user's own code that led there, and what to do."""
    message = str(error).strip() or "(it says nothing more)"
    if len(message) > _LONGEST:
        message = message[:_LONGEST] + " …"
    frames = [frame for frame in _frames(error) if not _is_library(frame.filename)]
    own = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    lines = [f"{_kind(error)}: {message}"]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"  in {error.filename}, line {error.lineno}: {(error.text or '').strip()}")
    if own:
        lines.append("  your code:")
        for frame in own[-_USER_FRAMES:]:
            lines.append(f'    File "{frame.filename}", line {frame.lineno}, in {frame.name}')
            if frame.line:
                lines.append(f"      {frame.line}")
    ours = [frame for frame in frames if frame.filename.startswith(_OURS)]
    if ours:
        place = f"{ours[-1].filename.removeprefix(_OURS)}:{ours[-1].lineno} in {ours[-1].name}"
        lines.append(f"  where: {place.replace(os.sep, '/')}")
    if own and frames[-1] is own[-1]:
        change = f"mend the last line above; {_FLAG} shows the whole traceback"
        return "\n".join([*lines, "  why: your own code raised it", f"  change: {change}"])
    why = "the system refused it" if isinstance(error, OSError) else "it was not foreseen"
    if isinstance(error, FileNotFoundError) and error.filename:
        why = "it is not there, or is there no more: somebody may have moved or deleted it meanwhile"
        change = f"put it back where you can and start again; if nobody touched it, {_REPORT}"
        return "\n".join([*lines, f"  why: {why}", f"  change: {change}"])
    if isinstance(error, MemoryError):
        why = "there was no memory left for it"
    return "\n".join([*lines, f"  why: {why}", f"  change: {_REPORT}"])


def _kind(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    linecache.checkcache()
    return list(traceback.extract_tb(error.__traceback__))


def _is_library(file: str) -> bool:
    """Whether a frame's file is Python's or an installed package's, and no one's to mend here."""
    if file.startswith(_OURS):
        return False
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    parts = Path(file).parts
    return (
        file.startswith(("<", *(root + os.sep for root in roots)))
        or "site-packages" in parts
        or "dist-packages" in parts
        or Path(file).name == "trimtab"  # the script that starts us
    )
