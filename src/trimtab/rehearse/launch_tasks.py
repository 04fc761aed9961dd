"""How many processes a line of deepspeed, srun or mpirun starts, and which command follows its options. Parses only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from trimtab.errors import RequestError

_DEEPSPEED_VALUES = re.compile(
    r"-(H|i|e)|--(hostfile|include|exclude|num_nodes|min_elastic_nodes|max_elastic_nodes|num_gpus|"
    r"master_port|master_addr|node_rank|launcher|launcher_args|ssh_port|elastic_training|venv_script|"
    r"log_level|enable_each_rank_log|bind_core_list|autotuning)"
)
_SRUN_VALUES = re.compile(
    r"-(n|N|c|G|p|A|t|J|o|e|w|x|q|D|m|r|C)|--(ntasks|nodes|ntasks-per-node|cpus-per-task|gpus|"
    r"gpus-per-node|gpus-per-task|gres|partition|account|time|mem|mem-per-cpu|mem-per-gpu|job-name|output|"
    r"error|nodelist|exclude|qos|chdir|distribution|gpu-bind|cpu-bind|export|mpi|jobid|relative|"
    r"constraint|container-image|container-mounts|container-workdir|tasks-per-node)"
)
_MPI_VALUES = re.compile(
    r"-(np|n|c|N|npernode|ppn|H|host|hosts|hostfile|f|map-by|bind-to|wdir|wd)|--(np|npernode|ppn|host|"
    r"hostfile|machinefile|map-by|bind-to|rank-by|wdir|prefix|report-bindings-to)"
)


def _options(launcher: str, words: list[str], values: re.Pattern[str]) -> tuple[dict[str, str], list[str]]:
    """A launcher's options, by name without dashes, and the command that follows. Options that are not known and take
    no `=` are taken for switches; what follows them must then be the command."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        short = re.fullmatch(r"(-[nNcGp])(\d+)", word)
        if short:
            name, value = short.groups()
        elif values.fullmatch(name) and not equals:
            if not rest:
                refuse(f"{launcher} {word}", "its value is missing", f"write {word} VALUE")
            value = rest.pop(0)
        elif name in {"-x", "--mca", "-mca", "-genv", "-env"} and launcher == "mpirun":
            taken = 1 if name == "-x" else 2
            del rest[:taken]
        found[name.lstrip("-").replace("_", "-")] = value
    if not rest:
        refuse(
            f"{launcher} {' '.join(words)}", "no command follows its options", f"write {launcher} … train.py"
        )
    return found, rest


def _count(launcher: str, options: dict[str, str], *names: str) -> int | None:
    for name in names:
        if name in options:
            if not options[name].isdecimal() or int(options[name]) < 1:
                refuse(
                    f"{launcher} {name} {options[name]}", "that is no number of processes", "give a number"
                )
            return int(options[name])
    return None


@dataclass(frozen=True)
class Tasks:
    """What a launcher starts."""

    command: list[str]
    ranks: int
    """Processes of a node; 0: one for each GPU."""
    nodes: int
    switches: frozenset[str]
    """Its options' names, without dashes."""


def deepspeed(words: list[str]) -> Tasks:
    """`deepspeed [options] SCRIPT …`"""
    options, rest = _options("deepspeed", words, _DEEPSPEED_VALUES)
    ranks = _count("deepspeed", options, "num-gpus") or 0
    if "include" in options or "exclude" in options:
        chosen = re.fullmatch(r"[\w.-]+:(\d+(,\d+)*)", options.get("include", ""))
        if chosen is None or "exclude" in options:
            refuse(
                "deepspeed --include or --exclude over several machines",
                "which GPUs that leaves depends on them",
                "write --num_gpus N",
            )
        ranks = len(chosen.group(1).split(","))
    return Tasks(rest, ranks, _count("deepspeed", options, "num-nodes") or 1, frozenset(options))


def srun(words: list[str]) -> Tasks:
    """`srun [options] COMMAND …`"""
    options, rest = _options("srun", words, _SRUN_VALUES)
    nodes = _count("srun", options, "N", "nodes") or 1
    per_node = _count("srun", options, "ntasks-per-node", "tasks-per-node")
    tasks = _count("srun", options, "n", "ntasks") or (per_node or 1) * nodes
    return _even("srun", rest, tasks, nodes, options)


def mpirun(words: list[str]) -> Tasks:
    """`mpirun -np N [options] COMMAND …`"""
    options, rest = _options("mpirun", words, _MPI_VALUES)
    tasks = _count("mpirun", options, "np", "n", "c")
    if tasks is None:
        refuse("mpirun without -np", "how many processes it starts depends on the machine", "write -np N")
    per_node = min(tasks, _count("mpirun", options, "N", "npernode", "ppn") or tasks)
    return _even("mpirun", rest, tasks, -(-tasks // per_node), options)


def _even(launcher: str, command: list[str], tasks: int, nodes: int, options: dict[str, str]) -> Tasks:
    if tasks % nodes:
        refuse(
            f"{launcher}: {tasks} processes on {nodes} nodes",
            "a rehearsal gives every node as many",
            "choose a number that can be divided",
        )
    return Tasks(command, tasks // nodes, nodes, frozenset(options))


def refuse(found: str, why: str, change: str) -> NoReturn:
    """The line cannot be rehearsed as it is."""
    raise RequestError.of(found, why, change)
