"""What `train` and `plan` share on the command line: an optional config file, then key=value overrides."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from trimtab.config import Request, load_request

QUICK_START = "quickstart.yaml"


def config_from(arguments: list[str]) -> Request:
    """The resolved config, where it came from and what its recipe chose.

    Without a file: the built-in quick start, which is of `sft`; another recipe stands on the overrides alone.
    """
    path: Path | None = None
    overrides = list(arguments)
    # os.path.isfile answers False to a setting that is too long for a file's name; Path.is_file raises.
    if overrides and ("=" not in overrides[0] or os.path.isfile(overrides[0])):
        path = Path(overrides.pop(0))
    if path is not None:
        return load_request(path, overrides)
    recipes = [value for key, _, value in (one.partition("=") for one in overrides) if key == "recipe"]
    if recipes and recipes[-1] != "sft":
        return load_request(None, overrides)
    with resources.as_file(resources.files("trimtab.config") / QUICK_START) as built_in:
        return load_request(built_in, overrides, "the built-in quick start")
