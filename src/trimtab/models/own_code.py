"""Which repositories' Python code a model would run, and the refusal where one of them was not trusted by its name.

A repository may send transformers to another one for its code (`auto_map: other/repo--modeling.Model`): trust in the
first says nothing of the second. Reads JSON files alone, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.config.schema import ModelSettings
from trimtab.errors import RequestError, some_of
from trimtab.reading import read_json

_FILES = (
    *("config.json", "tokenizer_config.json", "generation_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)


def code_options(settings: ModelSettings, source: str) -> dict[str, bool]:
    """`trust_remote_code` for transformers; refuses where the files lead to code of a repository that was not named."""
    if settings.trust_remote_code:
        _check_others(settings, source)
    # Without trust none is run: transformers refuses, or does without.
    return {"trust_remote_code": bool(settings.trust_remote_code)}


def _check_others(settings: ModelSettings, source: str) -> None:
    strangers = sorted({*_repositories(settings, source)} - {*settings.trust_remote_code, source})
    if strangers:
        raise RequestError.of(
            f"model.name={settings.name}: its code comes from {some_of(strangers)}",
            f"you trust {', '.join(settings.trust_remote_code)}, which sends us there for it",
            "read that code too, and if you trust it add "
            + " ".join(f"--trust-remote-code {place}" for place in strangers),
        )


def _repositories(settings: ModelSettings, source: str) -> Iterator[str]:
    """The other repositories that the model's files name in an `auto_map`."""
    for name in _FILES:
        file = _file_of(settings, source, name)
        if file is not None:
            change = f"mend the files of {settings.name}, or fetch the model again"
            for reference in _references(read_json(file, "a file of the model", change)):
                place, found, _ = reference.partition("--")
                if found:
                    yield place


def _references(content: Any) -> Iterator[str]:
    """All texts of every `auto_map`, however deep: parts of a model have configs of their own."""
    waiting = [(content, False)]
    while waiting:
        value, mapped = waiting.pop()
        if isinstance(value, dict):
            waiting += [
                (entry, mapped or key in ("auto_map", "custom_pipelines")) for key, entry in value.items()
            ]
        elif isinstance(value, list):
            waiting += [(entry, mapped) for entry in value]
        elif mapped and isinstance(value, str):
            yield value


def _file_of(settings: ModelSettings, source: str, name: str) -> Path | None:
    from transformers.utils.hub import cached_file

    found = cached_file(
        source,
        name,
        revision=settings.revision if not Path(source).is_dir() else None,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)
