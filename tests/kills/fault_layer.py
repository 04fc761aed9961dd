"""A process that dies inside its own writes: counts its file operations under a folder, and ends at the one it is told.

Put into a child that a test forks; the product knows nothing of it. What a library writes without Python (safetensors,
torch) is cut short by a limit on the size of files, past which the kernel ends the process in the middle of a write.
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = ("mkdir", "rename", "replace", "rmdir", "unlink", "remove", "truncate", "link", "symlink")


class FaultLayer:
    """Counts operations that change something under `folder`; at number `at` the process is no more."""

    def __init__(self, folder: Path, at: int | None = None, torn: int | None = None) -> None:
        """`torn`: at number `at` the process goes on, and dies when a file grows past so many bytes."""
        self.count = 0
        self._folder, self._at, self._torn = os.path.realpath(folder), at, torn

    def install(self) -> None:
        signal.signal(
            signal.SIGXFSZ, signal.SIG_DFL
        )  # Python ignores it; only here, for a thread may not set it
        for name in WRITES:
            setattr(os, name, self._counted(getattr(os, name)))
        os.fsync = self._counted(os.fsync)
        os.open = self._counted(os.open, lambda _, flags=0, *rest: flags & (os.O_WRONLY | os.O_RDWR))  # type: ignore[assignment]
        opened = self._counted(io.open, lambda _, mode="r", *rest: bool(set(mode) & set("wax+")))
        io.open = builtins.open = opened  # type: ignore[assignment]

    def _counted(self, real: Any, writes: Callable[..., Any] = lambda *args: True) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            given = [value for name, value in kwargs.items() if name in ("mode", "flags")]
            if writes(*args, *given) and self._is_inside(args[0]):
                self._counts_one()
            return real(*args, **kwargs)

        return called

    def _is_inside(self, what: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        except (OSError, TypeError):
            return False
        path = os.path.abspath(os.fsdecode(path))
        return path == self._folder or path.startswith(self._folder + os.sep)

    def _counts_one(self) -> None:
        self.count += 1
        if self.count != self._at:
            return
        if self._torn is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._torn, self._torn))
