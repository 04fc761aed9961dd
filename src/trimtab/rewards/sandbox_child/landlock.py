"""Landlock: a process gives up for good all files but those it names, where the kernel has it (Linux 5.13 and newer).

Needs no privilege and no namespace, so it is what keeps files apart inside most containers. What it knows grows with
the kernel: truncating from version 3, TCP from 4, devices' controls from 5, abstract sockets and signals from 6.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

from .kernel import libc, linux

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every machine
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | 1 << 15


def version() -> int:
    """Which of its versions this kernel has; 0: none."""
    return max(0, libc().syscall(_CREATE, None, 0, 1)) if linux() else 0


def keep_to(readable: Iterable[str], writable: Iterable[str]) -> int:
    """Leave this process these paths alone. The version that now holds it, or 0. Wants no_new_privs before."""
    there = version()
    if not there:
        return 0
    known = max(rights for since, rights in _ALL_BY_VERSION.items() if since <= there)
    tcp = 3 if there >= 4 else 0  # bind and connect: none is allowed
    scopes = 3 if there >= 6 else 0  # abstract sockets and signals: only among ourselves
    attributes = struct.pack("QQQ", known, tcp, scopes)[: 24 if there >= 6 else 16 if there >= 4 else 8]
    rules = libc().syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return 0
    try:
        reading = known & (_EXECUTE | _READ | _LIST)
        for paths, rights in ((readable, reading), (writable, known & ~_EXECUTE)):
            for path in paths:
                _allow(rules, path, rights)
        return there if libc().syscall(_RESTRICT, rules, 0) == 0 else 0
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):  # what is not there for us needs no leave
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = rights if os.path.isdir(path) else rights & _OF_FILES
            libc().syscall(_ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
        finally:
            os.close(place)
