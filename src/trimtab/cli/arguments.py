"""What `train` and `plan` share on the command line: an optional config file, and settings in any spelling."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from trimtab.config import Request

QUICK_START = "quickstart.yaml"
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE | --KEY VALUE]...",
        help="A YAML file, and settings over it such as device=cpu or --learning-rate 1e-4.",
    ),
]

Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--trust-remote-code",
        metavar="REPOSITORY",
        help="Run the Python code that this repository or folder ships, as the run did; by its name alone.",
        show_default=False,
    ),
]
"""For verbs that load what a run kept. `train` and `plan` take it among their settings."""

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Execute again what was executed before and kept (in $TRIMTAB_CACHE).")
]
"""For verbs whose figures are executed."""


def trust_words(trusted: list[str] | None) -> list[str]:
    """What a verb was told to trust, as settings over a run's kept ones, which hold none of it."""
    return [f"model.trust_remote_code={json.dumps(trusted)}"] if trusted else []


class SettingsCommand(TyperCommand):
    """A verb that takes settings: of what is typed, its own options go to click and the rest to it as it stands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            name: option for option in self.get_params(ctx) for name in option.opts if name.startswith("-")
        }
        mine: list[str] = []
        settings: list[str] = []
        words = iter(args)
        for word in words:
            option = own.get(word.partition("=")[0])
            if option is None:
                settings.append(word)
                continue
            mine.append(word)
            if "=" not in word and not getattr(option, "is_flag", True):
                mine += [value for value in [next(words, None)] if value is not None]
        return super().parse_args(ctx, [*mine, "--", *settings])


def config_from(arguments: list[str]) -> Request:
    """The resolved config, where it came from and what its recipe chose.

    Without a file: the built-in quick start, which is of `sft`; another recipe stands on the overrides alone.
    """
    from trimtab.config import load_request
    from trimtab.config.flags import as_words

    words = as_words(arguments)
    path = next((word for place, word in enumerate(words) if _is_config(word, place)), None)
    if path is not None:
        words.remove(path)
        return load_request(Path(path), words)
    recipes = [value for key, _, value in (one.partition("=") for one in words) if key == "recipe"]
    if recipes and recipes[-1] != "sft":
        return load_request(None, words)
    with resources.as_file(resources.files("trimtab.config") / QUICK_START) as built_in:
        return load_request(built_in, words, "the built-in quick start")


def request_from(arguments: list[str]) -> Request:
    """The same, refused here where it can be told without torch or weights that the run would fail."""
    from trimtab.recipes.requirements import check_requirements

    request = config_from(arguments)
    check_requirements(request.config)
    if request.config.export.to is not None:
        from trimtab.export import check_export

        check_export(request.config)
    return request


def _is_config(word: str, place: int) -> bool:
    # os.path.isfile answers False to a setting that is too long for a file's name; Path.is_file raises.
    bare = "=" not in word and not word.startswith("-")
    return (bare and (place == 0 or word.endswith((".yaml", ".yml")))) or os.path.isfile(word)
