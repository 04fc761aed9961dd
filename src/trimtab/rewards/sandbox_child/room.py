"""What a completion finds around it: namespaces of its own, and a root with the interpreter's files and nothing else.

The room is built once, from an empty file system in memory into which the interpreter's folders are mounted, to be read
only; the root that was there before is let go of. For each job there is then a folder of its own, in memory too,
limited in size, which no other job sees. There is no /proc, no /sys, no device but those that give nothing away, no
home.

Never writes outside the folder that it is given. Where the kernel gives no namespaces, there is no room, and `fence`
says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator

from . import kernel

FOLDER = "/job"
FOLDER_MEGABYTES, FOLDER_FILES = 64, 4096
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LIBRARIES = (
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/lib64",
)
_STORES = ("/nix/store", "/gnu/store")
"""Where some systems keep every library."""
_FACTS = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_ALWAYS = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_PROCESSES
_WHERE_KNOWN = kernel.NEW_NAME | kernel.NEW_CGROUP


def readable() -> list[str]:
    """What a completion may read: the standard library, installed packages, and the libraries that these load.

    An installed package is one in a site-packages folder. What a `.pth` file adds besides, as for a project installed
    in place, is somebody's working folder, and stays out.
    """
    paths = sysconfig.get_paths()
    wanted = [
        *_LIBRARIES,
        *_STORES,
        *_FACTS,
        os.path.join(sys.base_prefix, "lib"),
        paths["stdlib"],
        paths["platstdlib"],
    ]
    installed = ("site-packages", "dist-packages")
    wanted += [path for path in sys.path if os.path.basename(os.path.normpath(path)) in installed]
    return [path for path in dict.fromkeys(map(os.path.abspath, wanted)) if os.path.exists(path)]


def anyone_can_read() -> bool:
    """Whether a user without rights reads the interpreter's files, once they have been reached."""
    folders = [path for path in readable() if os.path.isdir(path) and path not in _LIBRARIES]
    files = [os.__file__, *(f for f in (getattr(sys.modules.get("zlib"), "__file__", None),) if f)]
    return all(os.stat(f).st_mode & 0o5 == 0o5 for f in folders) and all(
        os.stat(f).st_mode & 4 for f in files
    )


def anyone_can_reach() -> bool:
    """Whether a user without rights finds the way to the interpreter's files, where there is no room."""
    folder = os.path.realpath(os.path.dirname(os.__file__))
    while (above := os.path.dirname(folder)) != folder:
        if not os.stat(folder).st_mode & 1:
            return False
        folder = above
    return anyone_can_read()


def leave_namespaces() -> None:
    """Out of all of this machine's namespaces: children are in new ones. Raises OSError where the kernel gives none."""
    try:
        _unshare(0)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(kernel.NEW_USER)
        # Inside, this user is root, which is what mounting wants; outside nothing has changed.
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)


def _unshare(more: int) -> None:
    try:
        kernel.unshare(_ALWAYS | _WHERE_KNOWN | more)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        kernel.unshare(_ALWAYS | more)


def build(root: str) -> None:
    """Make the root that jobs see over this empty folder, and go there. Raises OSError where mounting is refused."""
    kernel.mount("", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    kernel.mount("trimtab", root, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "mode=755,size=1m")
    os.umask(0o022)
    bound: list[str] = []
    for path in sorted(readable(), key=os.path.realpath):  # a folder before what is in it
        _place(root, path, bound)
    for path in filter(os.path.exists, DEVICES):
        os.makedirs(root + "/dev", exist_ok=True)
        open(root + path, "w").close()
        kernel.mount(path, root + path, flags=kernel.BIND)
    os.mkdir(root + FOLDER)
    kernel.pivot(root)
    for path in bound:
        kernel.close_tree(path, kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES)
    kernel.mount(
        "", "/", flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SUID | kernel.NO_DEVICES
    )


def own_folder(user: int | None) -> None:
    """A folder for this job alone, empty, for that user to write to."""
    kernel.unshare(kernel.NEW_MOUNTS)
    options = f"mode=700,size={FOLDER_MEGABYTES}m,nr_inodes={FOLDER_FILES}"
    if user is not None:
        options += f",uid={user},gid={user}"
    kernel.mount("trimtab", FOLDER, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, options)
    os.chdir(FOLDER)


def own_processes(user: int | None) -> bool:
    """The next child is the first of its processes, with whose end they all end; whether it is also counted alone."""
    kernel.unshare(kernel.NEW_PROCESSES | kernel.NEW_IPC)
    if user is not None:
        return True  # by its user
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.NEW_USER)
        return True
    return False


def _place(root: str, path: str, bound: list[str]) -> None:
    """Let this path lead there where it leads here: by a mount of what it really is, and by the links on the way."""
    real = os.path.realpath(path)
    for link, target in _links(path):
        if not any(_inside(link, other) for other in bound) and not os.path.lexists(root + link):
            os.makedirs(root + os.path.dirname(link), exist_ok=True)
            os.symlink(target, root + link)
    if any(_inside(real, other) for other in bound):
        return
    if os.path.isdir(real):
        os.makedirs(root + real, exist_ok=True)
    else:
        os.makedirs(root + os.path.dirname(real), exist_ok=True)
        open(root + real, "a").close()
    kernel.mount(real, root + real, flags=kernel.BIND | kernel.RECURSIVE)
    bound.append(real)


def _links(path: str) -> Iterator[tuple[str, str]]:
    """The symbolic links on the way to a path: where each is, and what it says."""
    so_far = ""
    for part in path.strip("/").split("/"):
        here = f"{os.path.realpath(so_far or '/').rstrip('/')}/{part}"
        if os.path.islink(here):
            yield here, os.path.realpath(here)
        so_far = f"{so_far}/{part}"


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
