"""Code that was written for an older Python, or for another version of an installed library: what to write instead.

Says which version is installed here and which one the program's own requirements ask for. Reads files only; judges
nothing: that the program fails here is known by its error.
"""

from __future__ import annotations

import ast
import difflib
import linecache
import os
import re
import sys
import traceback
from importlib import metadata
from pathlib import Path

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit

_ASYNC = re.compile(r"(?<=[(,\s])async(?==(?!=))")
_NO_NAME = re.compile(
    r"^cannot import name '(\w+)' from '([\w.]+)'|^module '?([\w.]+)'? has no attribute '?(\w+)'?"
)
"""As Python says it, and as modules say it that load their parts late (without quotes)."""
_INSTEAD = re.compile(r"`([\w.]+)` was (?:removed|a deprecated alias)\b.*?\b[Uu]se `([\w.]+)`", re.S)
"""As numpy says what to write in the place of a name that is gone."""
_LISTS = ("requirements*.txt", "environment*.y*ml", "setup.py", "pyproject.toml")


def fix_for(error: BaseException, file: str) -> tuple[str, list[Edit]]:
    """What to change, as a sentence and as code; nothing for other errors. `file`: the one that failed."""
    if isinstance(error, SyntaxError):
        return _word_of_python(error)
    way = traceback.walk_tb(error.__traceback__)
    lines = [at for frame, at in way if os.path.abspath(frame.f_code.co_filename) == os.path.abspath(file)]
    known = _as_it_says(error, file, lines[-1]) or _next_of(error, file, lines[-1]) if lines else None
    return known or (_other_version(error, file), [])


def _as_it_says(error: BaseException, file: str, line: int) -> tuple[str, list[Edit]] | None:
    """A library that says itself which name to write, for the line of the program that has the old one."""
    found = _INSTEAD.search(str(error)) if isinstance(error, AttributeError) else None
    text = linecache.getline(file, line)
    old = re.search(rf"(?<![\w.]){re.escape(found[1])}(?!\w)", text) if found else None
    if found is None or old is None:
        return None
    whole = (text[: old.start()] + found[2] + text[old.end() :]).strip()
    edit = Edit(file, (line, old.start()), (line, old.end()), found[2])
    return f"write {found[2]} for {found[1]}: {whole}", [edit]


def _next_of(error: BaseException, file: str, line: int) -> tuple[str, list[Edit]] | None:
    """`iterator.next()`: a method of Python 2, which some libraries had for a while longer."""
    if not isinstance(error, AttributeError) or error.name != "next" or not hasattr(error.obj, "__next__"):
        return None
    for call in source.call_on(file, line):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "next" and not call.args:
            said = f"next({ast.unparse(call.func.value)})"
            return f"iterators have no method next(): write {said}", [rewrite.in_place_of(file, call, said)]
    return None


def _word_of_python(error: SyntaxError) -> tuple[str, list[Edit]]:
    """`tensor.cuda(async=True)`: the word belongs to Python since 3.7, and torch calls the argument otherwise."""
    line = (error.text or "").strip()
    if not error.filename or not _ASYNC.search(line):
        return "", []
    lines = Path(error.filename).read_text(encoding="utf-8", errors="replace").splitlines()
    edits = [
        Edit(error.filename, (number, found.start()), (number, found.end()), "non_blocking")
        for number, text in enumerate(lines, 1)
        for found in _ASYNC.finditer(text)
    ]
    more = f" (and at {len(edits) - 1} more places)" if len(edits) > 1 else ""
    instead = _ASYNC.sub("non_blocking", line)
    return f"async is a word of Python itself since 3.7; torch calls it non_blocking: {instead}{more}", edits


def _other_version(error: BaseException, file: str) -> str:
    """A name that the installed version of a library does not have (any more, or yet)."""
    found = _NO_NAME.search(str(error)) if isinstance(error, ImportError | AttributeError) else None
    if found is not None:
        name, module = found[1] or found[4], found[2] or found[3]
    elif isinstance(error, AttributeError) and isinstance(error.obj, type) and error.name:
        # A class may have lost a method as a module loses a name.
        name, module = error.name, f"{error.obj.__module__}.{error.obj.__qualname__}"
    else:
        return ""
    package = module.partition(".")[0]
    names = metadata.packages_distributions().get(package, [])
    if not names or source.is_user_file(_file_of(package)):
        return ""
    said = f"{names[0]} {metadata.version(names[0])}, which is installed here, has no {name} in {module}"
    # A name alike may be a slip of the pen, or another thing altogether: it is shown, not advised.
    near = difflib.get_close_matches(name, dir(sys.modules.get(module)), 1, 0.85) if len(name) > 4 else []
    said += f" (the nearest name there is {near[0]})" if near else ""
    asked = _asked(names[0], file)
    if asked:
        return f"{said}; {asked[0]} asks for {asked[1]}: install that, or write what this version has instead"
    return f"{said}: install the version that the program was written for, or write what this one has instead"


def _file_of(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__file__", None) or "")


def _asked(distribution: str, file: str) -> tuple[str, str] | None:
    """The file in which the program asks for one version of a package, or an older one, and its words."""
    name = re.sub(r"[-_.]+", "[-_.]", re.escape(distribution).replace("\\-", "-"))
    wanted = re.compile(rf"(?<![\w-])({name}\s*(?:===?|~=|<=?)\s*[\w.*]+)", re.I)
    folder = Path(os.path.abspath(file)).parent
    for above in (folder, *folder.parents[:2]):
        for path in sorted(path for form in _LISTS for path in above.glob(form)):
            found = wanted.search(path.read_text(encoding="utf-8", errors="replace"))
            if found and not found[1].endswith(metadata.version(distribution).partition("+")[0]):
                return path.name, found[1]
    return None
