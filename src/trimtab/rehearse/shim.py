"""What a shell script in a rehearsal finds in the place of a launcher that leaves the machine, or of nvidia-smi.

`srun`, `mpirun` and `deepspeed` start their ranks here, in this rehearsal; what hands a job to a queue is refused; and
nvidia-smi tells of the virtual GPUs. Never reaches another machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.rehearse import launch_lines, one_rank, rank_variables
from trimtab.rehearse.session import VARIABLE, Settings
from trimtab.virtual import bootstrap

_LAUNCHERS = ("srun", "mpirun", "mpiexec", "deepspeed")
_QUEUES = ("sbatch", "salloc", "qsub", "bsub")


def put_into(folder: Path) -> None:
    """Write the programs that stand in: a folder for the front of PATH."""
    folder.mkdir()
    for name in (*_LAUNCHERS, *_QUEUES, "nvidia-smi"):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m trimtab.rehearse.shim {name} "$@"\n'
        )
        program.chmod(0o700)


def main(name: str, words: list[str]) -> int:
    """The status of the program that stands in."""
    if name == "nvidia-smi":
        return _list_gpus(words)
    if name in _QUEUES:
        print(f"{name}: a rehearsal hands no job to a queue; rehearse the job's own script", file=sys.stderr)
        return 1
    try:
        return _launch([name, *words])
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _launch(words: list[str]) -> int:
    """Start the ranks of a line and wait for them; when one fails, the others get a while and are ended."""
    folder = Path(os.environ[VARIABLE])
    settings = Settings.load(folder)
    target = launch_lines.read(words, scratch=folder, gpus=settings.gpus)
    per_node = target.ranks or settings.gpus
    world = per_node * target.nodes
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port, run, children = held.getsockname()[1], secrets.token_hex(4), []
        for rank in range(1 if settings.one_rank else world):
            given = one_rank.variables(rank, per_node, world, port, run)
            variables = rank_variables.of(target.launcher, given) if target.launched else {}
            words = list(target.for_rank(rank % per_node))
            command = words[1:] if words[0] == "--command" else [sys.executable, *target.interpreter, *words]
            children.append(subprocess.Popen(command, env={**os.environ, **target.environment, **variables}))
        return _wait(children)


def _wait(children: list[subprocess.Popen[bytes]], grace: float = 20.0) -> int:
    end: float | None = None
    while any(child.poll() is None for child in children):
        if end is None and any(child.returncode for child in children):
            end = time.monotonic() + grace
        if end is not None and time.monotonic() > end:
            for child in children:
                child.terminate()
        time.sleep(0.05)
    return next((child.returncode for child in children if child.returncode), 0)


def _list_gpus(words: list[str]) -> int:
    """`-L` and `--query-gpu=…`, which scripts ask for; anything else is not answered."""
    machine = json.loads(os.environ[bootstrap.VARIABLE])
    memory = machine["memory"] // 2**20
    if words == ["-L"]:
        for number in range(machine["count"]):
            print(f"GPU {number}: {machine['name']} (UUID: GPU-{number:08x}-0000-0000-0000-000000000000)")
        return 0
    asked = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu=")), "")
    form = next((word.partition("=")[2] for word in words if word.startswith("--format=")), "")
    unit = "" if "nounits" in form else " MiB"
    known = {"name": machine["name"], "gpu_name": machine["name"], "count": str(machine["count"])}
    known |= {"memory.total": f"{memory}{unit}", "memory.free": f"{memory}{unit}", "memory.used": f"0{unit}"}
    known["compute_cap"] = ".".join(map(str, machine["capability"]))
    fields = [field.strip() for field in asked.split(",")]
    if not asked or not all(field in known or field == "index" for field in fields):
        print("nvidia-smi: a rehearsal answers -L and a few fields of --query-gpu only", file=sys.stderr)
        return 1
    if "noheader" not in form:
        print(", ".join(fields))
    for number in range(machine["count"]):
        print(", ".join(str(number) if field == "index" else known[field] for field in fields))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
