"""Reads the line with which a training is started, as its launcher would: python, torchrun, accelerate, deepspeed,
srun, mpirun, a shell script, `uv run` and its like before them. Starts nothing but accelerate's own reader.

A line that is not understood is refused with what to write instead: it is never guessed at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from trimtab.config import load_request
from trimtab.config.flags import as_words
from trimtab.errors import RequestError
from trimtab.rehearse import launch_tasks, taken_out
from trimtab.rehearse.launch_tasks import refuse
from trimtab.rehearse.target import Launcher, Target, is_shell_script

_CONFIG_ENDINGS = {".yaml", ".yml", ".toml", ".json"}
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
_PROCESSES = r"(?:--nproc[-_]per[-_]node|--num[-_]processes|--num[-_]gpus|--ntasks-per-node|--gpus-per-node)"
_SHELLS = {"sh", "bash", "zsh", "dash", "ksh"}
_RUNNERS = {"uv", "poetry", "pipenv", "pdm", "rye", "pixi", "hatch"}
_TRANSPARENT = {"env", "exec", "nohup", "time", "command"}
"""What only stands before a command."""


@dataclass(frozen=True)
class _Reading:
    """What has to be known to read a line."""

    scratch: Path
    gpus: int | None


def read(words: list[str], *, scratch: Path, gpus: int | None) -> Target:
    """The target that a line means."""
    reading = _Reading(scratch, gpus)
    environment: dict[str, str] = {}
    rest = list(words)
    while rest and (_ASSIGNMENT.match(rest[0]) or rest[0] in _TRANSPARENT):
        if rest[0] not in _TRANSPARENT:
            name, _, value = rest[0].partition("=")
            environment[name] = value
        rest = rest[1:]
    target = _command(rest, reading)
    return replace(target, environment={**target.environment, **environment}) if environment else target


def _command(words: list[str], reading: _Reading) -> Target:
    if not words:
        raise RequestError.of(
            "nothing to rehearse",
            "a script, `-m MODULE`, a config or the line of a launcher has to follow the options",
            "write for example: trimtab rehearse --gpus 2 train.py",
        )
    name = os.path.basename(words[0])
    if _PYTHON.match(name) and len(words) > 1:
        return _python(words[0], words[1:], reading)
    known = _LAUNCHERS.get(name)
    if known is not None:
        return known(words[1:], reading)
    if name in _RUNNERS and words[1:2] == ["run"]:
        return _runner(name, words[2:], reading)
    if name in _SHELLS:
        return _shell(words)
    if words[0] == "-m":
        return _module(words, reading)
    if words[0].startswith("-"):
        raise RequestError.of(
            f"option {words[0]!r} is not one of rehearse's",
            "our options stand before the script, the script's own after its path",
            "see trimtab rehearse --help",
        )
    return _file(words, reading)


def is_config(path: Path) -> bool:
    """Whether a file that is to be rehearsed is a config of Trimtab, by its name."""
    return path.suffix.lower() in _CONFIG_ENDINGS


def _file(words: list[str], reading: _Reading) -> Target:
    path = Path(words[0])
    if not path.is_file():
        if shutil.which(words[0]) is not None:
            raise RequestError.of(
                f"{words[0]}: not a launcher that is known here",
                "rehearse takes scripts, configs, shell scripts and the lines of python, torchrun, accelerate, "
                "deepspeed, srun and mpirun",
                f"write the line that {words[0]} starts in the end, or put it into a shell script: "
                "trimtab rehearse bash run.sh",
            )
        raise RequestError.of(
            f"{words[0]}: " + ("a folder, not a script" if path.is_dir() else "no such file"),
            "there is nothing to run",
            "give the path of a Python script or of a Trimtab config",
        )
    if is_config(path):
        # A wrong one is refused as `trimtab train` refuses it, before anything is started.
        load_request(path, as_words(words[1:]))
        # The rehearsal must leave no run folder behind, and has no weights to export.
        run = f"output_dir={reading.scratch / 'run'}"
        return Target(("-m", "trimtab", "train", words[0], *words[1:], run, "export=null"), words[0])
    if path.suffix != ".py" and is_shell_script(path):
        # As the system would start it: with its first line's shell where it may be executed.
        start = [str(path.absolute())] if os.access(path, os.X_OK) else ["bash", words[0]]
        return replace(_shell([*start, *words[1:]]), name=words[0])
    return Target(tuple(words), words[0])


def _module(words: list[str], reading: _Reading) -> Target:
    if len(words) < 2:
        raise RequestError.of("-m without a module", "python needs a name to run", "write -m package.module")
    if words[1] in {"torch.distributed.run", "torch.distributed.launch"}:
        return _torchrun(words[2:], reading, tells=words[1].endswith("launch"))
    if words[1] in {"accelerate.commands.launch", "accelerate.commands.accelerate_cli"}:
        return _accelerate(["launch", *words[2:]] if words[1].endswith(".launch") else words[2:], reading)
    return Target(tuple(words), words[1])


def _python(program: str, words: list[str], reading: _Reading) -> Target:
    """`python [options] SCRIPT …`: the options go to the interpreter that runs the rehearsal."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in {"-m", "-"}:
        option = rest.pop(0)
        if option.startswith("-c"):
            refuse(
                "python -c", "a rehearsal names lines, and these are in no file", "put the code into a file"
            )
        if option in {"-E", "-I", "-S", "-P"} or (
            option[1:2] != "-" and set("EIS") & set(option[1:].split("W")[0])
        ):
            refuse(
                f"python {option}",
                "with it python does not look where the virtual GPUs wait for it",
                "leave it out for the rehearsal",
            )
        options.append(option)
        if option in {"-W", "-X", "--check-hash-based-pycs"} and rest:
            options.append(rest.pop(0))
    if not rest or rest[0] == "-":
        refuse(
            " ".join([program, *words]), "there is no script in it", "write: trimtab rehearse python train.py"
        )
    target = _module(rest, reading) if rest[0] == "-m" else _file(rest, reading)
    notes = target.notes
    found = shutil.which(program)
    if os.sep in program and found and Path(found).resolve() != Path(sys.executable).resolve():
        notes = (*notes, f"rehearsed with {sys.executable}, where Trimtab is installed, not with {program}")
    return replace(target, interpreter=tuple(options), notes=notes)


def _runner(name: str, words: list[str], reading: _Reading) -> Target:
    """`uv run …`: the environment is the one that Trimtab runs in."""
    if words and words[0] == "--":
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        refuse(
            f"{name} run {' '.join(words[:1])}",
            f"the options of {name} change the environment, and the rehearsal runs in Trimtab's own",
            f"run Trimtab in that environment ({name} run trimtab rehearse train.py), or leave the options out",
        )
    target = _command(words, reading)
    note = f"`{name} run` was left out: rehearsed in the environment in which Trimtab runs"
    return (
        target
        if os.environ.get("VIRTUAL_ENV") == sys.prefix
        else replace(target, notes=(*target.notes, note))
    )


def _shell(words: list[str]) -> Target:
    """A shell script: run as it is; every python in it joins the rehearsal when it imports torch."""
    name = words[0]
    if os.path.basename(name) in _SHELLS:
        script = next((word for word in words[1:] if not word.startswith("-")), None)
        if script is None or any(re.fullmatch(r"-[a-z]*c", word) for word in words[1:2]):
            refuse(f"{name} without a script", "the commands are in no file", f"write: {name} run.sh")
        if not Path(script).is_file():
            _no_file(script)
        name = script
    return Target(("--command", *words), name, gpus=_gpus_of(Path(name)))


def _gpus_of(script: Path) -> int:
    """How many GPUs a shell script's launchers count on: the most processes of a node, or GPUs, that it names."""
    text = script.read_text(encoding="utf-8", errors="replace")
    variables = dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?(\d+)[\"']?\s*$", text, re.MULTILINE))
    asked = re.findall(_PROCESSES + r"[=\s]+[\"']?\$?\{?(\w+)", text)
    visible = re.findall(r"CUDA_VISIBLE_DEVICES=[\"']?([\d,]+)", text)
    counts = [int(variables.get(word, word)) for word in asked if variables.get(word, word).isdecimal()]
    counts += [
        max(map(int, filter(None, numbers.split(",")))) + 1 for numbers in visible if numbers.strip(",")
    ]
    return max([1, *counts])


def _torchrun(words: list[str], reading: _Reading, *, tells: bool = False) -> Target:
    """Take torchrun's own options as torchrun itself would read them. `tells`: its older form, which hands each rank
    its number on the command line too, unless it is asked not to."""
    parser = taken_out.definition("torch.distributed.run", "get_args_parser")()
    if tells:
        parser.add_argument("--use-env", "--use_env", action="store_true")
    parser.exit_on_error = False
    try:
        options = parser.parse_args(words)
    except SystemExit:
        raise RequestError.of(
            "torchrun's options could not be read (its message stands above)",
            "the line is parsed by torchrun's own parser",
            "write it as you would for torchrun: torchrun --nproc-per-node 2 train.py",
        ) from None
    nodes = int(str(options.nnodes).split(":")[-1])
    per_node = str(options.nproc_per_node)
    ranks = int(per_node) if per_node.isdecimal() else 0
    if options.no_python:
        refuse("torchrun --no-python", "only Python programs can be rehearsed", "give a script or --module")
    target = _launched(options.training_script, options.training_script_args, options.module, ranks, nodes)
    return replace(target, local_rank_option="--local-rank") if tells and not options.use_env else target


def _launched(script: str, words: list[str], module: bool, ranks: int, nodes: int = 1) -> Target:
    if not module and not Path(script).is_file():
        _no_file(script)
    arguments = ("-m", script, *words) if module else (script, *words)
    return Target(arguments, script, ranks=ranks, nodes=nodes, launched=True)


def _accelerate(words: list[str], reading: _Reading) -> Target:
    """`accelerate launch …`: accelerate itself says, in a process of its own, what it would start."""
    if words[:1] != ["launch"]:
        refuse(
            f"accelerate {' '.join(words[:1])}",
            "only `accelerate launch` starts a training",
            "write that line",
        )
    command = [sys.executable, "-m", "trimtab.rehearse.accelerate_line", str(reading.gpus or 0), *words[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode or not last[0].startswith("{"):
        print(done.stdout, end="")
        raise RequestError.of(
            "`accelerate launch` could not be read (its message stands above)",
            "the line is read by accelerate itself, with its default config file",
            "write it as you would for accelerate: accelerate launch --num_processes 2 train.py",
        )
    said = json.loads(last[0])
    if said["refused"]:
        refuse(f"accelerate launch {' '.join(words[1:])}", said["refused"], "rehearse the script by torchrun")
    target = _launched(said["script"], said["words"], said["module"], said["ranks"], said["nodes"])
    return replace(target, launched=said["launched"], environment=said["environment"])


def _deepspeed(words: list[str], reading: _Reading) -> Target:
    """DeepSpeed tells each rank its number on the command line."""
    tasks = launch_tasks.deepspeed(words)
    script, *rest = tasks.command
    target = _launched(script, rest, "module" in tasks.switches, tasks.ranks, tasks.nodes)
    return replace(target, local_rank_option="" if "no-local-rank" in tasks.switches else "--local_rank")


def _srun(words: list[str], reading: _Reading) -> Target:
    return _started_by("srun", launch_tasks.srun(words), reading)


def _mpirun(words: list[str], reading: _Reading) -> Target:
    return _started_by("mpirun", launch_tasks.mpirun(words), reading)


def _started_by(launcher: Launcher, tasks: launch_tasks.Tasks, reading: _Reading) -> Target:
    target = _command(tasks.command, reading)
    if not target.launched:
        return replace(target, ranks=tasks.ranks, nodes=tasks.nodes, launched=True, launcher=launcher)
    if tasks.ranks * tasks.nodes > 1:
        refuse(
            f"{launcher} that starts a launcher in each of several processes",
            "one machine rehearses one launcher's ranks",
            "rehearse the inner line: trimtab rehearse torchrun --nproc-per-node N train.py",
        )
    return target


def _no_file(script: str) -> NoReturn:
    raise RequestError.of(f"{script}: no such file", "there is nothing to run", "give the script's path")


_LAUNCHERS: dict[str, Callable[[list[str], _Reading], Target]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "accelerate-launch": lambda words, reading: _accelerate(["launch", *words], reading),
    "deepspeed": _deepspeed,
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpirun,
}
