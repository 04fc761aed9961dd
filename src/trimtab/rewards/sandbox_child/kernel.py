"""The calls to the Linux kernel that Python has no name for: namespaces, mounts, capabilities, filters.

Never decides anything: what is called for is for `room` and `fence` to say. Elsewhere than on Linux nothing is called.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

NEW_MOUNTS, NEW_CGROUP, NEW_NAME, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000

READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 0x1000, 0x4000, 0x40000
_DETACH, _HERE, _WHOLE_TREE, _MOUNT_SETATTR = (
    2,
    -100,
    0x8000,
    442,
)  # mount_setattr: Linux 5.12, the same everywhere


def linux() -> bool:
    return sys.platform == "linux"


@cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(what: int, *values: object) -> bool:
    return bool(libc().prctl(what, *values, *(0,) * (4 - len(values))) == 0)


def unshare(namespaces: int) -> None:
    _must(libc().unshare(namespaces), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [part.encode() if part else None for part in (source, target, kind)]
    done = libc().mount(*words, ctypes.c_ulong(flags), options.encode() if options else None)
    _must(done, f"mount on {target}")


def close_tree(target: str, flags: int) -> None:
    """Flags for a mount and all below it; on older kernels for it alone, which is what a bind mount begins with."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    if libc().syscall(_MOUNT_SETATTR, _HERE, target.encode(), _WHOLE_TREE, attributes, 32) == 0:
        return
    there = os.statvfs(target).f_flag & 0x7FF  # what was closed before must be named again
    mount("", target, flags=REMOUNT | BIND | flags | there)


def pivot(root: str) -> None:
    """Make this folder the root, and let go of all that was there before."""
    os.chdir(root)
    _must(libc().pivot_root(b".", b"."), "pivot_root")
    _must(libc().umount2(b".", _DETACH), "umount of the old root")
    os.chdir("/")


def drop_capabilities() -> None:
    """None now, none ever again."""
    for capability in range(64):
        if not prctl(
            24, capability
        ):  # PR_CAPBSET_DROP: ends behind the last, or where there are none to drop
            break
    prctl(47, 4)  # PR_CAP_AMBIENT, all of them
    libc().capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def _must(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
