"""Starts once, then forks a judge and a worker for each job: an interpreter start each would take most of the time.

The nursery never sees a job: it gets a socket to hand on, which the judge alone keeps. So a worker, whose memory is a
copy of the nursery's, finds nothing there. For each job a keeper stands between: it ends both when
the time is up or when the judge has ended, also where nobody waits for them any more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from . import fence, kernel, room
from .judge import Judge
from .wire import Gone
from .worker import Worker

STARTED = b"started\n"
"""Comes before a verdict: without it nothing was tried, which is no score of 0."""
START_SECONDS = 30
"""What a busy machine may take to start both, which is no fault of the completion's."""


def main() -> NoReturn:
    """Serve one folder and one socket after the other, until the other end closes."""
    sys.set_int_max_str_digits(0)
    control, megabytes, seconds = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), float(sys.argv[4])
    root = sys.argv[5]
    # What the completion sees: neither our arguments nor our folder.
    del sys.argv[1:], sys.path[0]
    in_room = _into_room(root)
    choose, readable = fence.may_choose_user(in_room), tuple(room.readable())
    beside = 0 if in_room or choose else fence.threads_of_this_user()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave no trace
    for number in itertools.count():
        folder, sockets, _, _ = socket.recv_fds(control, 4096, 1)
        if not folder:
            with contextlib.suppress(ChildProcessError):
                os.wait()  # for all: those whose end is ignored are never told one by one
            os._exit(0)
        here = room.FOLDER if in_room else folder.decode()
        user = fence.USERS[number % len(fence.USERS)] if choose else None
        around = fence.Fence(here, megabytes, seconds, in_room, user, readable, beside)
        with socket.socket(fileno=sockets[0]) as job:
            _fork(lambda: _keep(control, job, around))  # noqa: B023
        control.send(b".")
    raise AssertionError("counting does not end")


def _into_room(root: str) -> bool:
    """Go on as the first process of a room, while the one that came here waits outside for its end.

    False, in the process that came here, where the kernel gives no room.
    """
    if not kernel.linux():
        return False
    said, says = os.pipe()
    if outside := os.fork():
        os.close(says)
        built = os.read(said, 1)
        if built:
            os.waitpid(outside, 0)
            os._exit(0)
        os.waitpid(outside, 0)
        os.close(said)
        return False
    os.close(said)
    try:
        kernel.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        room.leave_namespaces()
        if inside := os.fork():
            os.close(says)
            os.waitpid(inside, 0)
            os._exit(0)
        kernel.prctl(1, 9)
        room.build(root)
    except OSError:
        os._exit(1)
    os.write(says, b".")
    os.close(says)
    return True


def _keep(control: socket.socket, job: socket.socket, around: fence.Fence) -> None:
    """Start a judge and a worker, and end both when the judge has ended or the time is up."""
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(HOME=around.folder, TMPDIR=around.folder)
    if around.in_room:
        room.own_folder(around.user)
    elif around.user is not None:
        os.chown(around.folder, around.user, around.user)
    os.chdir(around.folder)
    ours, theirs = socket.socketpair()
    alone = False

    def judge() -> None:
        theirs.close()
        around.take_rights()
        _judge(job, ours, around.seconds)

    def work() -> None:
        os.setsid()
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, 256)
        around.take_rights(alone)
        worker = Worker(theirs)
        worker.send({"isolated": fence.network_is_cut(around.in_room)})
        with contextlib.suppress(Gone):
            worker.run()

    judging = _fork(judge)
    job.close()
    ours.close()
    fence.hide()
    if around.in_room:
        alone = room.own_processes(around.user)
    working = _fork(work)
    theirs.close()
    signal.signal(signal.SIGALRM, _time_is_up)
    with contextlib.suppress(TimeoutError):
        signal.setitimer(signal.ITIMER_REAL, START_SECONDS + around.seconds)
        os.waitpid(judging, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        judging = 0
    for pid in filter(None, (judging, working, -working)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os.waitpid(working, 0)


def _judge(job: socket.socket, wire: socket.socket, seconds: float) -> None:
    """Read the job, run its tests, and write the verdict, which only this process can. Killed when its time is up."""
    with job.makefile("rwb") as stream:
        asked = json.loads(stream.readline())
        side = Judge(wire)
        isolated = bool(side.receive()["isolated"])
        stream.write(STARTED)
        stream.flush()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        passed = [False] * len(asked["tests"])
        # Whatever comes of loading the code, an exit too, no test has passed then.
        with contextlib.suppress(BaseException):
            side.ask("load", asked["code"])
            passed = side.judge(asked["tests"])
        verdict = {"passed": passed, "isolated": isolated, "unsupported": side.unsupported}
        stream.write(json.dumps(verdict).encode() + b"\n")


def _fork(run: Callable[[], None]) -> int:
    """The number of a child that does this and nothing after it."""
    pid = os.fork()
    if pid == 0:
        # Threads and atexit functions that a completion left behind have no say, nor has the code around this call.
        try:
            run()
        finally:
            os._exit(0)
    return pid


def _time_is_up(*_: object) -> None:
    raise TimeoutError
