"""Asks accelerate what `accelerate launch …` would start: `python -m trimtab.rehearse.accelerate_line GPUS WORDS…`.

Runs in a process of its own, on virtual GPUs, with accelerate's parser, its default config file and its own launchers:
only the start itself is taken out of their hands. Prints what would have been started, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class _Started(Exception):
    """What accelerate was about to start."""

    def __init__(self, **said: Any) -> None:
        super().__init__("accelerate starts the script")
        self.said = said


def main(gpus: int, words: list[str]) -> dict[str, Any]:
    """Read the line on so many GPUs (0: as many as it asks for)."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    from trimtab.virtual.context import install

    options = launch.launch_command_parser().parse_args(words)
    asked = options.num_processes
    if asked is None and (options.config_file is not None or os.path.isfile(default_config_file)):
        asked = load_config_from_file(options.config_file).num_processes
    install(gpus or max(asked or 1, 1))
    before = dict(os.environ)
    said: dict[str, Any] = {"refused": ""}
    try:
        _taken(launch, before)(options)
        said["refused"] = (
            "accelerate would start it neither by python nor by torchrun, which alone are rehearsed"
        )
    except _Started as started:
        said |= started.said
    except ImportError as error:
        if "deepspeed" not in str(error).lower():
            raise
        # Its settings are read by DeepSpeed itself; without it accelerate says nothing.
        said["refused"] = f"accelerate refuses to start it: {error}"
    return said


def _taken(launch: Any, before: dict[str, str]) -> Any:
    """accelerate's `launch_command`, whose two ways of starting a script tell instead of doing it."""
    import torch.distributed.run

    def added(environment: Any) -> dict[str, str]:
        new = {name: value for name, value in environment.items() if before.get(name) != value}
        return {name: value for name, value in new.items() if not name.startswith("MASTER_")}

    def alone(command: list[str], env: dict[str, str]) -> None:
        if command[0] != sys.executable:
            raise _Started(refused=f"it starts {command[0]}, and only Python programs can be rehearsed")
        module = command[1] == "-m"
        script, *rest = command[2:] if module else command[1:]
        raise _Started(
            script=script, words=rest, module=module, ranks=1, nodes=1, launched=False, environment=added(env)
        )

    def together(options: Any) -> None:
        if options.no_python:
            raise _Started(refused="--no_python: only Python programs can be rehearsed")
        raise _Started(
            script=options.training_script,
            words=options.training_script_args,
            module=bool(options.module),
            ranks=int(options.nproc_per_node),
            nodes=int(options.nnodes.split(":")[-1]),
            launched=True,
            environment=added(os.environ),
        )

    launch.subprocess = type("Processes", (), {"Popen": staticmethod(alone)})
    torch.distributed.run.run = together
    return launch.launch_command


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2:])))
