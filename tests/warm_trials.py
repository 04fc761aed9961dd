"""Processes that make trials (`trimtab.recipes.trial_server`), forked from one that has imported what they need.

Each answers as a process of its own does; only its imports, ten seconds of a processor, are not waited for each time.
`python warm_trials.py FD`: over the socket come, for each process, its connection and the file for what it says.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path


class Forked:
    """Such a process, as far as `Trials` knows one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        """Whoever forked it does."""


class Server:
    """The process that forks them; `start` stands in for `trials.start_server`."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(there.fileno())],
                pass_fds=(there.fileno(),),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
            )

    def start(self, connection: int, said: int) -> Forked:
        socket.send_fds(self._here, [os.getcwd().encode()], [connection, said])
        answer = self._here.recv(64)
        assert answer, f"the warm process ended with status {self._process.wait()}"
        return Forked(int(answer))

    def close(self) -> None:
        self._here.close()
        self._process.wait()


def fork_for_each(asked: socket.socket) -> None:
    from trimtab.recipes import trial_server

    trial_server._imported(trial_server.import_what_steps_need)
    trial_server._imported(trial_server.import_what_compiling_needs)
    forks: set[int] = set()
    while True:
        folder, handles, _, _ = socket.recv_fds(asked, 4096, 2)
        forks = {fork for fork in forks if not os.waitpid(fork, os.WNOHANG)[0]}
        if not folder:
            return
        connection, said = handles
        child = os.fork()
        if not child:
            asked.close()
            os.setsid()  # ended with all of its forks
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            os.chdir(folder)
            for stream in (1, 2):
                os.dup2(said, stream)
            trial_server.serve(Connection(connection))
            os._exit(0)
        forks.add(child)
        os.close(connection)
        os.close(said)
        asked.send(str(child).encode())


if __name__ == "__main__":
    fork_for_each(socket.socket(fileno=int(sys.argv[1])))
