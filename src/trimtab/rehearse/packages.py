"""A package that the program imports and this machine lacks: that says nothing about the program where it is to run.

So does a compiled part of the program that was not built here. A module of the program itself that is not found (a
misspelt file, a folder that is not on the path, a part that an installed package does not have) stays its fault. Looks
at names and files only; imports nothing.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place
from trimtab.rehearse import places

_CALLED = {
    "Crypto": "pycryptodome",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "git": "GitPython",
    "hydra": "hydra-core",
    "pynvml": "nvidia-ml-py",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""What pip calls packages that are imported by another name."""
_ASKED = re.compile(r"pip3? install (?:(?:-U|--upgrade|--quiet|-q) )*['\"`]?([A-Za-z][\w.-]*\w)")
_NO_FOLDERS = frozenset((".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages"))
_ALIKE = 0.8


def missing(errors: Sequence[BaseException]) -> tuple[str, BaseException] | None:
    """The package that is not installed here for want of which an error was raised, and the import that failed; the
    errors are a chain, the outermost first."""
    for error in _imports(errors):
        if name := _package(error):
            return name, error
    return None


def _imports(errors: Sequence[BaseException]) -> Iterator[ImportError]:
    """The imports that failed, as long as nothing else was met after the program went on without one."""
    for outer, error in zip((None, *errors), errors, strict=False):
        if outer is not None and outer.__cause__ is not error and not _passed_on(outer):
            return
        if isinstance(error, ImportError):
            yield error


def finding_for(name: str, error: BaseException, stack: Sequence[Place]) -> Finding:
    """What is told about a package that this machine lacks."""
    where = next((place for place in stack if source.is_user_file(place.file)), None)
    inside = next((place for place in stack if not place.file.startswith("<")), None)
    own = where is not None and inside == where
    line = (
        f", which {os.path.basename(where.file)}:{where.line} {'imports' if own else 'needs'}"
        if where
        else ""
    )
    return Finding(
        kind="other-error",
        severity="warning",
        message=f"this machine has no package {name}{line}",
        where=where,
        library=None if own else inside,
        fix=f"pip install {_CALLED.get(name, name)} here ({sys.prefix}), or rehearse where it is installed",
    )


def unbuilt(errors: Sequence[BaseException]) -> Finding | None:
    """A part of the program that is written in Cython, C or CUDA, has its source here, and was not built."""
    for error in _imports(errors):
        stack = places.traceback_places(error.__traceback__)
        line = next((place for place in stack if not place.file.startswith("<")), None)
        if line is None or not source.is_user_file(line.file):
            continue  # what a library imports is no part of the program
        for name in _imported(line):
            if (found := _built_by(name, os.path.dirname(os.path.abspath(line.file)))) is not None:
                return Finding(
                    kind="other-error",
                    severity="warning",
                    message=f"{name}, a compiled part of the program ({found[0]}), is not built on this machine",
                    where=line,
                    fix=f"build it first: {found[1]}; or rehearse where it is built",
                )
    return None


def _imported(line: Place) -> list[str]:
    """The last names of what the import at a line asks for."""
    found: list[str] = []
    for node in source.walk(line.file):
        if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno <= line.line <= (
            node.end_lineno or 0
        ):
            found += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found += [alias.name for alias in node.names]
    return [name.rpartition(".")[2] for name in found]


def _built_by(name: str, folder: str) -> tuple[str, str] | None:
    """The source of a compiled module (a Cython file of its name, or a setup.py that names it) and how it is built."""
    around = list(_around(folder))
    if any(name in dict(_modules(one)) for one in around):
        return None
    for one in around:
        setup, cython = os.path.join(one, "setup.py"), os.path.join(one, f"{name}.pyx")
        named = "ext_modules" in "".join(linecache.getlines(setup)) and any(
            isinstance(node, ast.Constant) and str(node.value).rpartition(".")[2] == name
            for node in source.walk(setup)
        )
        if named or os.path.exists(cython):
            at = next((at for at in (one, *around) if os.path.exists(os.path.join(at, "setup.py"))), None)
            build = f"cd {at} && python setup.py build_ext --inplace" if at else f"cythonize -i {cython}"
            return (setup if named else cython), build
    return None


def own_module(error: BaseException) -> str:
    """What to change where a module of the program itself is not found; nothing when it is not that."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    top, _, rest = error.name.partition(".")
    if rest:
        return f"{top} is there, and has no module {rest}: correct the name, or install a version of {top} that has it"
    near = _of_the_program(top, error)
    if near is None:
        return ""
    found = os.path.splitext(os.path.basename(near))[0]
    if found != top:
        return f"there is no module {top}; the program has {near}: import {found}"
    folder = os.path.dirname(near)
    return f"the program has {near}, and {folder} is not on the path: put it on PYTHONPATH"


def _package(error: ImportError) -> str:
    """The top-level package that an import did not find, or that a library asks for in words."""
    name = error.name or ""
    if isinstance(error, ModuleNotFoundError) and name:
        lacks = "." not in name and not _is_there(name) and _of_the_program(name, error) is None
        return name if lacks else ""
    asked = _ASKED.search(str(error))
    if asked is None or _is_distribution(asked[1]):
        return ""
    imported = {called: name for name, called in _CALLED.items()}
    wanted = imported.get(asked[1], asked[1].replace("-", "_"))
    return "" if _is_there(wanted) else wanted


def _is_there(name: str) -> bool:
    if name in sys.modules or name in sys.stdlib_module_names:
        return True
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _is_distribution(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _passed_on(error: BaseException) -> bool:
    """Whether an error says that another one was met: an exit, an import that failed, what a line raises itself."""
    if isinstance(error, ImportError | SystemExit):
        return True
    last = next(iter(list(traceback.walk_tb(error.__traceback__))[::-1]), None)
    if last is None:
        return False
    frame, line = last
    return any(
        isinstance(node, ast.Raise) and node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in source.walk(frame.f_code.co_filename)
    )


def _of_the_program(name: str, error: BaseException) -> str | None:
    """A file or folder of the program that was meant: one of that name nearby, or one beside it that is nearly so."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [os.path.abspath(file) for file in files if source.is_user_file(file)]
    # What a library imports is no module of the program.
    if not own or not any(source.is_user_file(file) for file in files[-1:] if not file.startswith("<")):
        return None
    beside = dict(_modules(os.path.dirname(own[-1])))
    for folder in _around(os.path.dirname(own[-1])):
        if name in (here := dict(_modules(folder))):
            return here[name]
    alike = difflib.get_close_matches(name, [one for one in beside if len(one) > 3], 1, _ALIKE)
    return beside[alike[0]] if alike and len(name) > 3 else None


def _around(folder: str) -> Iterator[str]:
    """The folder of a file, those beneath it, and those above it that still belong to the program."""
    yield folder
    with os.scandir(folder) as entries:
        yield from sorted(e.path for e in entries if e.is_dir() and e.name not in _NO_FOLDERS)
    marks = (".git", "pyproject.toml", "setup.py", "__init__.py")
    above = os.path.dirname(folder)
    for _ in range(3):
        if not any(os.path.exists(os.path.join(at, mark)) for at in (folder, above) for mark in marks):
            return
        yield above
        folder, above = above, os.path.dirname(above)


def _modules(folder: str) -> Iterator[tuple[str, str]]:
    """The modules that a folder holds: Python files, and folders with some in them (runs/ and wandb/ have none)."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        stem, ending = os.path.splitext(entry.name)
        if ending == ".py" and stem.isidentifier():
            yield stem, entry.path
        elif entry.name.isidentifier() and entry.is_dir():
            try:
                if any(file.endswith(".py") for file in os.listdir(entry.path)):
                    yield entry.name, entry.path
            except OSError:
                continue
