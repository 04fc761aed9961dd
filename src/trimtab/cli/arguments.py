"""What `train` and `plan` share on the command line: an optional config file, then key=value overrides."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from trimtab.config import Config, load_config

QUICK_START = "quickstart.yaml"


def config_from(arguments: list[str]) -> tuple[Config, str]:
    """The resolved config and where it came from. Without a file: the built-in quick start."""
    path: Path | None = None
    overrides = list(arguments)
    if overrides and ("=" not in overrides[0] or Path(overrides[0]).is_file()):
        path = Path(overrides.pop(0))
    if path is not None:
        return load_config(path, overrides), str(path)
    with resources.as_file(resources.files("trimtab.config") / QUICK_START) as built_in:
        return load_config(built_in, overrides), "the built-in quick start"
