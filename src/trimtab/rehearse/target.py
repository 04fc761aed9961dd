"""What is to be rehearsed: a script, a module, a Trimtab config or the line of a launcher. Parses; starts nothing but
accelerate's own reader of its line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Launcher = Literal["torchrun", "srun", "mpirun"]


@dataclass(frozen=True)
class Target:
    """The command to run in each rank."""

    arguments: tuple[str, ...]
    """`SCRIPT ARGS…`, `-m MODULE ARGS…` as `python` takes them, or `--command WORDS…` for a shell script."""
    name: str
    """What to call it in the report."""
    ranks: int = 1
    """Ranks of a node; 0: as many as there are GPUs."""
    nodes: int = 1
    launched: bool = False
    """Whether the ranks get a launcher's environment, even if there is only one."""
    launcher: Launcher = "torchrun"
    """Whose variables tell a rank which it is."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the line sets for the script."""
    interpreter: tuple[str, ...] = ()
    """Options of python itself."""
    local_rank_option: str = ""
    """The option by which the launcher tells each rank its number (`--local_rank=N` after the script's path)."""
    gpus: int = 1
    """How many GPUs the line itself counts on, where --gpus does not say."""
    notes: tuple[str, ...] = ()
    """What the report has to say about how the line was taken."""

    def for_rank(self, local_rank: int) -> tuple[str, ...]:
        """The arguments of one rank."""
        if not self.local_rank_option:
            return self.arguments
        script = 2 if self.arguments[0] == "-m" else 1
        return (*self.arguments[:script], f"{self.local_rank_option}={local_rank}", *self.arguments[script:])

    @property
    def own_words(self) -> tuple[str, ...]:
        """What stands after the script's path."""
        return self.arguments[2 if self.arguments[0] == "-m" else 1 :]

    def visible_gpus(self) -> list[int] | None:
        """The GPUs that the line lets the script see; None where it says nothing."""
        said = self.environment.get("CUDA_VISIBLE_DEVICES")
        if said is None:
            return None
        entries = [entry.strip() for entry in said.split(",") if entry.strip()]
        if not all(entry.lstrip("-").isdecimal() for entry in entries):
            return list(range(len(entries)))  # told by their UUIDs
        return [int(entry) for entry in entries if int(entry) >= 0]


def parse_target(words: list[str], *, scratch: Path, gpus: int | None = None) -> Target:
    """Read the words after our own options. `gpus`: how many were asked for, which a launcher may look at."""
    from trimtab.rehearse import launch_lines

    return launch_lines.read(words, scratch=scratch, gpus=gpus)


def is_shell_script(path: Path) -> bool:
    """Whether a file is run by a shell: by its ending, or by its first line."""
    if path.suffix in {".sh", ".bash"}:
        return True
    with path.open("rb") as file:
        first = file.readline(200)
    program = (
        os.path.basename(first.removeprefix(b"#!").strip().split(b" ")[-1]) if first[:2] == b"#!" else b""
    )
    return program in {b"sh", b"bash", b"zsh", b"dash", b"ksh"}
