"""Code of the program on threads that it did not enter the machine on: its own, those of RPC, those of futures.

Modes belong to a thread: each of these sees the virtual GPUs through this. It starts no thread.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trimtab.virtual import dispatch, state, streams
from trimtab.virtual import functions as torch_functions
from trimtab.virtual.state import Machine, Patch


@contextmanager
def modes() -> Iterator[None]:
    """Both modes, on in this thread while a machine is in force, unless they are on already."""
    on = any(isinstance(mode, dispatch.VirtualMode) for mode in _get_current_dispatch_mode_stack())
    if on or state.machine() is None:
        yield
        return
    with dispatch.VirtualMode(), torch_functions.switched_on():
        yield


def patches(machine: Machine) -> list[Patch]:
    """What to replace while virtual GPUs are in force."""
    future = torch._C.Future  # the base of torch.futures.Future, and what RPC gives
    internal: Any = sys.modules.get("torch.distributed.rpc.internal")
    made: list[Patch] = [
        (threading.Thread, "_bootstrap_inner", _in_thread(threading.Thread._bootstrap_inner)),  # type: ignore[attr-defined]
        *((future, name, _with_callback(getattr(future, name))) for name in ("then", "add_done_callback")),
    ]
    if internal is not None:
        # C++ calls it for every function that another worker asks for; it takes it up when RPC starts.
        made.append((internal, "_run_function", _in_modes(internal._run_function)))
    return made


def _in_thread(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def _bootstrap_inner(self: threading.Thread) -> None:
        if (machine := state.machine()) is not None:
            streams.thread_begins(machine)
        with modes():
            return original(self)

    return _bootstrap_inner


def _in_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any) -> Any:
        with modes():
            return original(*args)

    return run


def _with_callback(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add(self: Any, callback: Any) -> Any:
        return original(self, _in_modes(callback) if callable(callback) else callback)

    return add
