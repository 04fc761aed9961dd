"""Where a tensor comes from: the user's line that made it, moved it, or copied it. Never reads source files.

Recording is cheap (a code object and an instruction offset); the line number is worked out only when asked for.
Nothing is recorded unless the machine in force has an observer.
"""

from __future__ import annotations

import itertools
import os
import site
import sys
import sysconfig
import traceback
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from trimtab.virtual.packages import brought_along


class Origin(NamedTuple):
    """A line of code."""

    file: str
    line: int
    function: str


Handle = tuple[CodeType, int]
"""A place in code, from which the line is worked out."""


_clock = itertools.count(1)


def now() -> int:
    """A number that grows from deed to deed: which of two came first."""
    return next(_clock)


class Trace:
    """What is known of one tensor. Kept as the attribute `_trimtab` of the tensor; never pickled."""

    __slots__ = ("born", "cast", "copied", "moved", "moved_at")

    def __init__(self, born: Handle | None = None, moved: Handle | None = None) -> None:
        self.born = born
        self.moved = moved
        self.moved_at = now() if moved is not None else 0
        self.copied: Handle | None = None
        self.cast: Handle | None = None
        """What last gave a parameter or buffer another dtype in place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        # A copy is made where it is copied, and goes its own way afterwards.
        return Trace(here() or self.born, self.moved)


ATTRIBUTE = "_trimtab"
EXTENTS = "_trimtab_extents"
"""What extents.py keeps beside it."""
SHAPE = "_trimtab_shape"
"""The mark of a meta tensor that the program made."""


def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    roots = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(torch.__file__)}
    # The package itself, also when installed in place; its command line and recipes are no user code either.
    roots.add(os.path.dirname(os.path.dirname(_OWN)))
    own = tuple(os.path.join(path, "") for root in roots for path in (os.path.realpath(root), root))
    return own + brought_along()


TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
_PACKAGES = tuple(os.path.join(sysconfig.get_paths()[name], "") for name in ("purelib", "platlib"))
_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_ROOTS = _library_roots()
_user_code: dict[CodeType, bool] = {}
_libraries: set[str] = set()
"""Names of modules that are no user's: most frames of a stack are theirs."""


def is_plumbing(filename: str) -> bool:
    """Whether a file is torch's or the standard library's: what runs there was asked for from elsewhere."""
    standard = filename.startswith((_STANDARD, "<")) and not filename.startswith(_PACKAGES)
    return standard or filename.startswith(TORCH)


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's own: outside torch, installed packages, the standard library and this package."""
    if filename.startswith("<"):
        return False
    # One that is not absolute hangs on the working directory.
    return _is_own(filename) if os.path.isabs(filename) else _is_own(os.path.abspath(filename))


@cache
def _is_own(path: str) -> bool:
    path = os.path.normpath(path)
    # Packages may also lie in another environment's folder, on PYTHONPATH.
    return not path.startswith(_ROOTS) and not {"site-packages", "dist-packages"} & set(path.split(os.sep))


def _is_user(code: CodeType) -> bool:
    known = _user_code[code] = is_user_file(code.co_filename)
    return known


_executed: set[str] | None = None
"""The files whose code this process has executed, where somebody has written them down from its start."""
_looked_at = 0
_user_ran = False


def tell_by(executed: set[str]) -> None:
    """Where no file of a user's was executed, as with a config, no stack has to be searched for one. The set grows."""
    global _executed
    _executed = executed


def no_user_ran() -> bool:
    """Whether it is known that no code of a user's has run in this process."""
    global _looked_at, _user_ran
    if _user_ran or _executed is None:
        return False
    if len(_executed) != _looked_at:
        files = list(_executed)
        _looked_at, _user_ran = len(files), any(map(is_user_file, files))
    return not _user_ran


def here(skip: int = 0) -> Handle | None:
    """The nearest frame of user code, as a handle; None when there is none on this thread's stack."""
    if no_user_ran():
        return None
    frame: FrameType | None = sys._getframe(1 + skip)
    libraries = _libraries
    while frame is not None:
        # Asked of every frame, and of a frame's code every audit hook is told: by the name of its module first.
        if frame.f_globals.get("__name__") not in libraries:
            code = frame.f_code
            user = _user_code.get(code)
            if user or (user is None and _is_user(code)):
                return code, frame.f_lasti
            if user is None:
                _learn(frame.f_globals)
        frame = frame.f_back
    return None


def of_library(frame: FrameType) -> bool:
    """Whether a frame is known to be of a library; false also where nobody has looked yet."""
    return frame.f_globals.get("__name__") in _libraries


def _learn(names: dict[str, Any]) -> None:
    """Code that is no user's ran with these globals: those of a library's module are known by its name from now on."""
    name, file = names.get("__name__"), names.get("__file__")
    if not isinstance(name, str) or name == "__main__":
        return
    genuine = getattr(sys.modules.get(name), "__dict__", None) is names
    if genuine and isinstance(file, str) and not is_user_file(file):
        _libraries.add(name)


def resolve(handle: Handle | Origin | None) -> Origin | None:
    """The line that a handle stands for."""
    if handle is None or isinstance(handle, Origin):
        return handle
    code, offset = handle
    line = next((number for start, end, number in code.co_lines() if start <= offset < end), None)
    return Origin(code.co_filename, line or code.co_firstlineno, code.co_name)


Span = tuple[str, tuple[int, int], tuple[int, int]]
"""A stretch of a file: its name, and line and column (in bytes, as ast counts) of start and end."""


def span(handle: Handle | None) -> Span | None:
    """The very expression that a handle stands for, where Python kept its place."""
    if handle is None:
        return None
    code, offset = handle
    place = next(itertools.islice(code.co_positions(), offset // 2, None), None)
    if place is None or None in place:
        return None
    first, last, left, right = place
    return code.co_filename, (first or 0, left or 0), (last or 0, right or 0)


def nearest(skip: int = 0) -> Handle | None:
    """The nearest frame outside this package's virtual room, as a handle."""
    frame: FrameType | None = sys._getframe(1 + skip)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


def stack(skip: int = 0) -> list[tuple[Origin, bool]]:
    """All frames outside this package's virtual room, innermost first, each with whether it is user code."""
    walk = ((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1 + skip)))
    return [
        (Origin(code.co_filename, line, code.co_name), is_user_file(code.co_filename))
        for code, line in walk
        if not code.co_filename.startswith(_OWN)
    ]


def trace_of(tensor: torch.Tensor) -> Trace | None:
    """The record kept for a tensor, if any."""
    found: Trace | None = tensor.__dict__.get(ATTRIBUTE)
    return found


def ensure_trace(tensor: torch.Tensor) -> Trace:
    """The record kept for a tensor, made when there is none."""
    found: Trace = tensor.__dict__.setdefault(ATTRIBUTE, Trace())
    return found


def born_of(tensor: torch.Tensor) -> Origin | None:
    """The user's line at which a tensor was made."""
    return resolve(getattr(trace_of(tensor), "born", None))


def moved_of(tensor: torch.Tensor) -> Origin | None:
    """The user's line that last moved a tensor to the device it is on."""
    return resolve(getattr(trace_of(tensor), "moved", None))


def cast_of(tensor: torch.Tensor) -> Origin | None:
    """The user's line that last gave a tensor another dtype, the tensor object staying the same (`model.half()`)."""
    return resolve(getattr(trace_of(tensor), "cast", None))


def lines_of(tensor: torch.Tensor) -> list[Origin]:
    """The lines that last cast a tensor, moved it and made it, as far as they are known."""
    return [line for deed in (cast_of, moved_of, born_of) if (line := deed(tensor)) is not None]


def copied_of(tensor: torch.Tensor) -> Origin | None:
    """The user's line that last made a copy of this tensor on another device (the tensor itself stayed)."""
    return resolve(getattr(trace_of(tensor), "copied", None))


def spans_of(tensor: torch.Tensor) -> tuple[Span | None, Span | None]:
    """The expressions that made a tensor and that last moved it."""
    trace = trace_of(tensor)
    return (span(trace.born), span(trace.moved)) if trace is not None else (None, None)


def copied_span(tensor: torch.Tensor) -> Span | None:
    """The expression that last made a copy of this tensor on another device."""
    trace = trace_of(tensor)
    return span(trace.copied) if trace is not None else None


def moved_when(tensor: torch.Tensor) -> int:
    """When a tensor was last moved, as `now` counts; 0 when it never was."""
    trace = trace_of(tensor)
    return trace.moved_at if trace is not None else 0


def as_shape(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that the program made past the dispatcher; a meta one is marked as its own."""
    if tensor.__class__ is torch.Tensor and tensor.is_meta:
        tensor.__dict__[SHAPE] = True
    return tensor


def note_move(source: torch.Tensor, result: torch.Tensor) -> None:
    """A copy of `source` on another device was made."""
    handle = here(1)
    before = ensure_trace(source)
    before.copied = handle
    result.__dict__[ATTRIBUTE] = Trace(before.born, handle)


def note_cast(tensor: torch.Tensor, before: Trace | None) -> None:
    """A tensor was given data of another dtype. Its trace may be that of other tensors too: it gets one of its own."""
    own = Trace(before.born, before.moved) if before is not None else Trace()
    own.moved_at = before.moved_at if before is not None else 0
    own.cast = here(1)
    tensor.__dict__[ATTRIBUTE] = own
