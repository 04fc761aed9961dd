"""What takes every dispatch mode away, for a block of a program or of a library, leaves virtual GPUs in force.

On hardware `_disable_current_modes` and `no_dispatch` take away what was laid over torch; a GPU stays. Ours is such a
mode here, and without it C++ would make its tensors on the meta device, where values are lost. Trimtab's own code goes
past the mode by `taken_away` and `past_dispatch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _mode_utils, _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trimtab.virtual import state

past_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
"""The guard of torch itself, under which no mode and no class of tensors sees an operation."""
_native = _disable_current_modes.__wrapped__  # type: ignore[attr-defined]
taken_away = contextmanager(_native)
"""The same of the modes alone, ours among them."""
_here = threading.local()
_mode: type[TorchDispatchMode]


def set_mode(mode: type[TorchDispatchMode]) -> None:
    """Say which mode stays; its class stands above this module."""
    global _mode
    _mode = mode


def enter(undo: ExitStack) -> None:
    """Put ours in the place of torch's, until the stack is closed."""
    # Many have imported the name: what all of them call is changed inside.
    cell = next(c for c in _disable_current_modes.__closure__ or () if c.cell_contents is _native)
    undo.callback(setattr, cell, "cell_contents", _native)
    cell.cell_contents = _all_but_ours
    state.replace(undo, torch._C, "_DisableTorchDispatch", _NoDispatch)
    state.replace(undo, _mode_utils, "no_dispatch", _NoDispatch)


def in_force() -> bool:
    """Whether operations of this thread pass through our mode; not where Trimtab itself has taken it away."""
    return any(isinstance(mode, _mode) for mode in _python_dispatch._get_current_dispatch_mode_stack())


def _all_but_ours() -> Iterator[list[Any]]:
    with taken_away() as old:
        ours = any(isinstance(mode, _mode) for mode in old)
        with _mode() if ours else ExitStack():
            yield [mode for mode in old if not isinstance(mode, _mode)]


def sees_no_classes() -> bool:
    """Whether classes of tensors are not to be asked in this thread, as the program wants it."""
    return bool(getattr(_here, "depth", 0))


class _NoDispatch:
    """`torch._C._DisableTorchDispatch` as a program finds it: in force from when it is made, as torch's is."""

    def __init__(self) -> None:
        self._undo = ExitStack()
        if not in_force():
            self._undo.enter_context(past_dispatch())
            return
        self._undo.enter_context(_disable_current_modes())
        _here.depth = getattr(_here, "depth", 0) + 1
        self._undo.callback(_less)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def __del__(self) -> None:
        self._undo.close()


def _less() -> None:
    _here.depth -= 1
