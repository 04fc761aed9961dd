"""Reads the launcher's environment variables: who started this process, and which variables are left over.

It never changes the environment; `placement.apply` does, once, from what is found here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.errors import RequestError

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Numbers = tuple[int, int, int, int]
"""Rank, size, local rank and local size."""

# How each MPI says rank, size, local rank and local size: Open MPI, MVAPICH2, MPICH and Intel MPI.
_MPI_VARIABLES = (
    *(
        tuple(f"{maker}_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        for maker in ("OMPI", "MV2")
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# Slurm numbers the batch script, an interactive shell and its own helper steps from here on; srun counts from 0.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
_MOST_NODES = 2**17
_DIGITS = 12
"""Of any count or number that a launcher sets."""
_SHELLS = frozenset({"bash", "sh", "zsh", "fish", "csh", "tcsh", "ksh", "interactive"})


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Who started this process. `name` is "none" when nobody but the user did."""

    name: str
    """none, torchrun, slurm, mpi, kubernetes or env (TRIMTAB_LAUNCHER=env: obey the variables as they are)."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    stale: tuple[str, ...] = ()
    """Rank variables that are set although no launcher started this process."""
    exports: tuple[tuple[str, str], ...] = ()
    """Variables that torch.distributed needs and this launcher does not set itself."""

    @property
    def multi_process(self) -> bool:
        return self.world_size > 1

    def stale_note(self) -> str | None:
        """One clear line about left-over variables, or None."""
        if not self.stale:
            return None
        return (
            f"ignoring {', '.join(self.stale)}: set in the environment, but no launcher (torchrun, srun, mpirun) "
            "started this process; `unset` them, or set TRIMTAB_LAUNCHER=env to obey them"
        )


def detect_launcher(env: Mapping[str, str] | None = None) -> Launcher:
    """Find out who started this process from its environment alone.

    `accelerate launch` is torchrun when it starts several processes, and sets no rank when it starts one.
    """
    env = os.environ if env is None else env
    asked = env.get("TRIMTAB_LAUNCHER", "")
    if asked not in ("", "env"):
        raise RequestError.of(
            f"TRIMTAB_LAUNCHER={asked}: not a launcher",
            "the one value is `env` (obey RANK and WORLD_SIZE as they are); launchers are found by themselves",
            "unset TRIMTAB_LAUNCHER, or set it to env",
        )
    if "TORCHELASTIC_RUN_ID" in env and "RANK" in env and "WORLD_SIZE" in env:
        return _from_torch_variables("torchrun", env)
    if asked == "env":
        return _from_torch_variables("env", env)
    if _is_srun_task(env):
        world = _number(env, "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS", 1)
        if world > 1:
            return _from_slurm(env, world)
    for names in _MPI_VARIABLES:
        if names[0] in env and _number(env, names[1], 1) > 1:
            return _from_mpi(env, names)
    if "KUBERNETES_SERVICE_HOST" in env and all(v in env for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return _from_kubernetes(env)
    return Launcher(name="none", stale=tuple(v for v in RANK_VARIABLES if v in env))


def _from_torch_variables(name: str, env: Mapping[str, str]) -> Launcher:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE", least=1)
    local = _number(env, "LOCAL_RANK", 0)
    local_world = _number(env, "LOCAL_WORLD_SIZE", local + 1, least=1)
    _check_below("RANK", rank, "WORLD_SIZE", world)
    _check_below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", local_world)
    defaults = {"LOCAL_RANK": str(local)}
    if world > 1:
        if not env.get("MASTER_ADDR") and world > local_world:
            raise _no_master(name, world)
        defaults |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    missing = {variable: value for variable, value in defaults.items() if not env.get(variable)}
    return _launcher(name, (rank, world, local, local_world), missing)


def _from_kubernetes(env: Mapping[str, str]) -> Launcher:
    each = env.get("PET_NPROC_PER_NODE", "")
    if each.isdecimal() and each not in ("0", "1"):
        raise RequestError.of(
            f"this pod is to run {each[:40]} processes (PET_NPROC_PER_NODE), and this is one started without torchrun",
            "WORLD_SIZE counts all of them, so this one would wait for the others for ever",
            "make the pod's command `torchrun -m trimtab train …` (torchrun reads the PET_ variables)",
        )
    return _from_torch_variables("kubernetes", env)


def _is_srun_task(env: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than a batch script or a shell that was opened by hand."""
    step = env.get("SLURM_STEP_ID", "")
    if (
        "SLURM_PROCID" not in env
        or not step.isdecimal()
        or len(step) > _DIGITS
        or int(step) >= _SLURM_SPECIAL_STEPS
    ):
        return False
    return not ("SLURM_PTY_PORT" in env and env.get("SLURM_JOB_NAME") in _SHELLS)


def _from_slurm(env: Mapping[str, str], world: int) -> Launcher:
    node = _number(env, "SLURM_NODEID", 0)
    # The step's own count first: SLURM_NTASKS_PER_NODE is what the whole job was given.
    tasks = "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_NTASKS_PER_NODE"
    nodes = _number(env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES", 1)
    # Not SLURM_LAUNCH_NODE_IPADDR: that is where srun was typed, often a login node; rank 0 is on the first node.
    first = _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
    if nodes > 1 and not first and not env.get("MASTER_ADDR"):
        raise _no_master("slurm", world)
    # One port per step, so that two on a node do not meet; below 32768, where the kernel picks its own.
    offset = _number(env, "SLURM_JOB_ID", 0) * 7 + _number(env, "SLURM_STEP_ID", 0)
    numbers = (
        _number(env, "SLURM_PROCID"),
        world,
        _number(env, "SLURM_LOCALID", 0),
        _tasks_on_node(env, tasks, node),
    )
    host = first if nodes > 1 else "127.0.0.1"
    return _completed("slurm", env, numbers, host, 20000 + offset % 12000)


def _from_mpi(env: Mapping[str, str], names: tuple[str, ...]) -> Launcher:
    rank, world, local, local_world = (_number(env, name) for name in names)
    if world > local_world and not env.get("MASTER_ADDR"):
        raise _no_master("mpirun", world)
    return _completed("mpi", env, (rank, world, local, local_world), "127.0.0.1", 29500)


def _completed(name: str, env: Mapping[str, str], numbers: Numbers, host: str, port: int) -> Launcher:
    """Of a launcher that sets none of torch's own variables; where to meet is the user's to say."""
    meeting = env.get("MASTER_ADDR") or host, env.get("MASTER_PORT") or str(port)
    values = (*map(str, numbers), *meeting)
    return _launcher(name, numbers, dict(zip(RANK_VARIABLES, values, strict=True)))


def _launcher(name: str, numbers: Numbers, exports: Mapping[str, str]) -> Launcher:
    rank, world, local, local_world = numbers
    return Launcher(
        name=name,
        rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=local_world,
        exports=tuple(exports.items()),
    )


def _number(env: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
    """A variable's whole number. Without a default the variable must be there."""
    text = env.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal() or len(text) > _DIGITS or int(text) < least:
        raise RequestError.of(
            f"{name}={text[:40]}: not a whole number from {least} up" if text else f"{name} is not set",
            "the launcher's variables say which of how many processes this is",
            f"set {name} as the launcher should, or unset the launcher's variables to train in one process",
        )
    return int(text)


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise RequestError.of(
            f"{name}={value} with {limit_name}={limit}",
            f"ranks count from 0, so {name} must be below {limit_name}",
            f"set {name} and {limit_name} as the launcher should, or unset both to train in one process",
        )


def _no_master(name: str, world: int) -> RequestError:
    return RequestError.of(
        f"{name}: {world} processes on several machines, and MASTER_ADDR is not set",
        "the processes meet at rank 0's machine, and nothing here says which one that is",
        "set MASTER_ADDR (and MASTER_PORT) to rank 0's host in every process",
    )


def _tasks_on_node(env: Mapping[str, str], name: str, node: int) -> int:
    """Slurm writes `4(x2),3` for nodes with 4, 4 and 3 tasks: the count on node number `node`."""
    counts: list[int] = []
    tasks_per_node = env.get(name) or "1"
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if (
            found is None
            or len(part) > 2 * _DIGITS
            or len(counts) > _MOST_NODES
            or int(found[2] or 1) > _MOST_NODES
        ):
            raise RequestError.of(
                f"{name}={tasks_per_node[:80]}: not a list of task counts",
                "it says how many processes share this machine, such as 4(x2),3",
                "start with srun, which sets it, or unset it",
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _first_host(nodelist: str) -> str:
    """The first of Slurm's `gpu[003-006,009],big1`: gpu003."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""
