"""What is to be rehearsed: a script, a module, a Trimtab config or a torchrun line. Parses; starts nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import RequestError

_CONFIG_ENDINGS = {".yaml", ".yml", ".toml", ".json"}


@dataclass(frozen=True)
class Target:
    """The command to run in each rank."""

    arguments: tuple[str, ...]
    """`SCRIPT ARGS…` or `-m MODULE ARGS…`, as `python` takes them."""
    name: str
    """What to call it in the report."""
    ranks: int = 1
    nodes: int = 1
    launched: bool = False
    """Whether the ranks get a launcher's environment, even if there is only one."""


def parse_target(words: list[str], *, scratch: Path) -> Target:
    """Read the words after our own options."""
    if not words:
        raise RequestError.of(
            "nothing to rehearse",
            "a script, `-m MODULE`, a config or a `torchrun …` line has to follow the options",
            "write for example: trimtab rehearse --gpus 2 train.py",
        )
    first = words[0]
    if first in {"python", "python3"} and len(words) > 1:
        return parse_target(words[1:], scratch=scratch)
    if first == "torchrun":
        return _torchrun(words[1:])
    if first == "-m":
        if len(words) < 2:
            raise RequestError.of(
                "-m without a module", "python needs a name to run", "write -m package.module"
            )
        if words[1] in {"torch.distributed.run", "torch.distributed.launch"}:
            return _torchrun(words[2:])
        return Target(tuple(words), words[1])
    if first.startswith("-"):
        raise RequestError.of(
            f"option {first!r} is not one of rehearse's",
            "our options stand before the script, the script's own after its path",
            "see trimtab rehearse --help",
        )
    path = Path(first)
    if not path.is_file():
        raise RequestError.of(
            f"{first}: " + ("a folder, not a script" if path.is_dir() else "no such file"),
            "there is nothing to run",
            "give the path of a Python script or of a Trimtab config",
        )
    if path.suffix.lower() in _CONFIG_ENDINGS:
        # The rehearsal must leave no run folder behind, and has no weights to export.
        train = ("-m", "trimtab", "train", first, *words[1:], f"output_dir={scratch / 'run'}", "export=null")
        return Target(train, first)
    return Target(tuple(words), first)


def _torchrun(words: list[str]) -> Target:
    """Take torchrun's own options as torchrun itself would read them."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
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
    script = [options.training_script, *options.training_script_args]
    if options.no_python:
        raise RequestError.of(
            "torchrun --no-python", "only Python programs can be rehearsed", "give a script or --module"
        )
    if not options.module and not Path(options.training_script).is_file():
        raise RequestError.of(
            f"{options.training_script}: no such file", "there is nothing to run", "give the script's path"
        )
    arguments = ("-m", *script) if options.module else tuple(script)
    return Target(arguments, options.training_script, ranks=ranks, nodes=nodes, launched=True)
