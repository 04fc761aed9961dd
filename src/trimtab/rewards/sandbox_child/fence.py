"""Takes rights away from a process: network, other processes, files, memory and time, as far as the kernel can."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

_USER, _NETWORK, _PROCESSES, _MOUNTS = 0x10000000, 0x40000000, 0x20000000, 0x00020000
_BIND, _READ_ONLY, _RECURSIVE, _HERE = 0x1000, 1, 0x8000, -100
_MOUNT_SETATTR = 442  # Linux 5.12; glibc has no name for it before 2.36
_SYSCALLS = {
    # machine: what the kernel calls it, its clone, and its other calls that start a process
    "x86_64": (0xC000003E, 56, (57, 58)),
    "aarch64": (0xC00000B7, 220, ()),
}
_CLONE3, _AS_A_THREAD = 435, 0x00010000


def cut_network() -> bool:
    """A network of its own for this process, with nobody on it. False where the kernel gives users none."""
    return _unshare(_USER | _NETWORK)


def cut_off(folder: str) -> bool:
    """As `cut_network`, and for children to come: they reach no process but theirs, and write to `folder` alone.

    The first child is the others' init: with its end they all end, also what left its group or its session.
    """
    if not _unshare(_USER | _NETWORK | _PROCESSES | _MOUNTS):
        return cut_network()
    here = folder.encode()
    _libc().mount(here, here, None, _BIND, None)
    if _set_mount(b"/", _RECURSIVE, on=_READ_ONLY):
        _set_mount(here, 0, off=_READ_ONLY)
    return True


def hide() -> None:
    """Let no other process of this user look into this one."""
    if sys.platform == "linux":
        _libc().prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def give_up_rights(megabytes: int, seconds: float) -> None:
    """Limits that cannot be raised again, no privileges, and an end when the parent ends."""

    def limit(what: int, value: int) -> None:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))

    limit(resource.RLIMIT_CPU, int(seconds) + 1)
    limit(resource.RLIMIT_FSIZE, 2**20)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, 64)
    if sys.platform != "darwin":
        limit(resource.RLIMIT_AS, megabytes * 2**20)
    limit(resource.RLIMIT_NPROC, 0)
    if sys.platform == "linux":
        libc = _libc()
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        # Without this, what was made read-only could be made writable again.
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        _start_no_process()
    hide()


def _start_no_process() -> None:
    """The limit of processes does not hold for root, which is whom a container runs as: the kernel refuses them."""
    machine = os.uname().machine
    if machine not in _SYSCALLS or sys.maxsize < 2**32:
        return
    architecture, clone, forks = _SYSCALLS[machine]
    load, equal, at_least, has_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, allow = 0x00050000, 0x7FFF0000
    try_again, unknown = refuse | 11, refuse | 38
    program = [
        (load, 0, 0, 4),  # the architecture: a call by another table of numbers is refused
        (equal, 1, 0, architecture),
        (give, 0, 0, try_again),
        (load, 0, 0, 0),  # the call
        (at_least, 0, 1, 0x40000000),
        (give, 0, 0, try_again),
        *(step for fork in forks for step in ((equal, 0, 1, fork), (give, 0, 0, try_again))),
        (equal, 0, 1, _CLONE3),  # its flags cannot be seen from here; libc takes clone where it is unknown
        (give, 0, 0, unknown),
        (equal, 0, 3, clone),
        (load, 0, 0, 16),  # its flags
        (has_bit, 1, 0, _AS_A_THREAD),
        (give, 0, 0, try_again),
        (give, 0, 0, allow),
    ]
    steps = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    whole = struct.pack("HP", len(program), ctypes.addressof(steps))
    # PR_SET_SECCOMP with a filter. A kernel that has none leaves the limit above.
    _libc().prctl(22, 2, ctypes.c_char_p(whole), 0, 0)


def _unshare(namespaces: int) -> bool:
    return sys.platform == "linux" and bool(_libc().unshare(namespaces) == 0)


def _set_mount(where: bytes, flags: int, on: int = 0, off: int = 0) -> bool:
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
    return bool(_libc().syscall(_MOUNT_SETATTR, _HERE, where, flags, attributes, 32) == 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
