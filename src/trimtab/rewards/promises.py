"""What the sandbox keeps completions from on this machine: found out by trying, as a hostile completion would.

Nothing is read from a version or a list of features: each promise is a deed that was tried behind the fence, on things
made for this purpose. Never harms what it finds: it opens, asks and lets go.
"""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trimtab.config.grpo import GrpoSettings
from trimtab.rewards.sandbox import Limits, Sandbox, cannot_run

DEEDS = {
    "read": "read your files",
    "write": "change your files",
    "reach": "reach a network or a Unix socket",
    "signal": "end your other processes",
    "share": "use this machine's shared memory, keys or devices",
    "start": "start processes",
    "swell": "take more memory than they are given",
}
"""What a completion must not be able to do: the name of the try, and what it is called."""
FILES = ("read", "write")
"""Without these two, code that a model wrote has the run of what its user owns."""

_TRIES = """
import ctypes, os, signal, socket

def read():
    return any(done(lambda: open(path).read()) for path in {secrets!r}) or done(lambda: os.listdir({folder!r}))
def changed():
    path = {secrets!r}[0]
    before = os.stat(path)
    os.chmod(path, 0o640)
    os.utime(path, (1, 1))
    now = os.stat(path)
    if (now.st_mode, now.st_mtime) == (before.st_mode, before.st_mtime):
        raise OSError("nothing changed")
def write():
    path = {secrets!r}[0]
    deeds = (lambda: open(path, "r+").close(), lambda: os.truncate(path, 0), lambda: os.remove(path),
             lambda: os.mkdir({folder!r} + "/new"), changed)
    return any(done(deed) for deed in deeds)
def reach():
    def connect(family, address):
        with socket.socket(family) as ours:
            ours.settimeout(2)
            ours.connect(address)
    return done(lambda: connect(socket.AF_INET, {address!r})) or done(lambda: connect(socket.AF_UNIX, {path!r}))
def signal():
    return done(lambda: os.kill({pid}, 0))
def share():
    libc = ctypes.CDLL(None)
    key_add, key_control = {{"aarch64": (217, 219)}}.get(os.uname().machine, (248, 250))
    linux = os.uname().sysname == "Linux"
    asked = [libc.shmget(0, 4096, 0o1600)]
    if asked[0] >= 0:
        libc.shmctl(asked[0], 0, None)
    asked += [libc.syscall(key_control, 0, -2, 0), libc.syscall(key_add, b"user", b"x", b"x", 1, -2)] if linux else []
    return any(answer >= 0 for answer in asked) or any(done(lambda: open(d, "rb").close()) for d in {devices!r})
def start():
    def fork():
        if os.fork() == 0:
            os._exit(0)
    return done(fork)
def swell():
    return done(lambda: bytearray({bytes}))
def done(deed):
    try:
        deed()
    except (OSError, MemoryError, AttributeError):
        return False
    return True
"""


@dataclass(frozen=True)
class Promises:
    """Which deeds succeeded, each in words."""

    broken: tuple[str, ...]

    @property
    def files_kept(self) -> bool:
        return not {*FILES} & {*self.broken}

    def told(self) -> str:
        """The finding in one line."""
        if not self.broken:
            *most, last = DEEDS.values()
            return f"completions cannot {', '.join(most)} or {last}: tried"
        kept = [words for name, words in DEEDS.items() if name not in self.broken]
        told = f"completions CAN {', '.join(DEEDS[name] for name in self.broken)}"
        return f"{told}; they cannot {', '.join(kept)}" if kept else told


def what_it_keeps(settings: GrpoSettings) -> tuple[bool | None, str]:
    """Whether completions' code may run here (None: with something to be said), and what it can do, in words."""
    if why := cannot_run():
        return False, f"reward code does not run here: {why}; use Linux or macOS (also: WSL, a container)"
    promises = tried(Limits(megabytes=settings.test_megabytes))
    if promises.files_kept or settings.unfenced:
        return None if promises.broken else True, promises.told()
    way = (
        "the kernel gives neither namespaces nor Landlock (Linux 6.2 or newer); use a machine or a container that "
        "holds nothing of yours, and say so with grpo.unfenced=true"
    )
    return False, f"{promises.told()}: {way}"


def tried(limits: Limits) -> Promises:
    """Try every deed in the sandbox as it is on this machine."""
    with Sandbox(limits) as sandbox, things_to_reach(sandbox.folder, limits) as code:
        # Each in a job of its own: what one does must not hide another.
        failed = [name for name in DEEDS if sandbox.run(code, f"assert {name}() is False")[0] != 1.0]
    return Promises(tuple(failed))


@contextmanager
def things_to_reach(neighbours: str, limits: Limits) -> Iterator[str]:
    """Files, sockets and a process to try the deeds on, and the code that tries them."""
    with (
        tempfile.TemporaryDirectory(prefix="trimtab-tried-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
    ):
        secrets = [Path(folder, "mine"), Path(neighbours, "another's")]
        for secret in secrets:
            secret.write_text("secret")
        local.bind(f"{folder}/socket")
        local.listen()
        yield _TRIES.format(
            secrets=[str(secret) for secret in secrets],
            folder=folder,
            address=server.getsockname(),
            path=f"{folder}/socket",
            pid=os.getpid(),
            devices=_block_devices(),
            bytes=limits.megabytes * 2**20,
        )


def _block_devices() -> list[str]:
    names = [entry.path for entry in os.scandir("/dev")] if os.path.isdir("/dev") else []
    return [name for name in names if os.path.exists(name) and stat.S_ISBLK(os.stat(name).st_mode)]
