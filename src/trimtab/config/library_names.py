"""Names that a setting passes on to a library: the library's own lists, read from its source and never imported.

Importing transformers would import torch, and a wrong name should be told in a moment. Where a library is laid out
otherwise, its list is empty and nothing is refused here; the library itself then says what it does not know.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ALIKE = 0.6
_LONGEST = 100
TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Trackers, and the packages that one of them needs."""


def names_for(key: str) -> list[str]:
    """What a setting may say besides its schema; empty where any text will do."""
    if key == "training.optimizer":
        return ["auto", *optimizer_names()]
    if key == "model.attn_implementation":
        return attention_names()
    return list(TRACKERS) if key == "monitor.report_to" else []


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The name that was perhaps meant, by the whole of it or its first part: `adamm` is nearer to adamw_torch than to
    adalomo."""

    def likeness(other: str) -> float:
        parts = (other, other.partition("_")[0])
        return max(SequenceMatcher(None, name[:_LONGEST].lower(), part).ratio() for part in parts)

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) > _ALIKE else None


@cache
def optimizer_names() -> list[str]:
    """The values of transformers' `OptimizerNames`."""
    values = [
        node.value for node in _body("training_args.py", "OptimizerNames") if isinstance(node, ast.Assign)
    ]
    return [str(value.value) for value in values if isinstance(value, ast.Constant)]


@cache
def attention_names() -> list[str]:
    """Transformers' kernels for attention, and `eager`, which every model brings itself."""
    tables = [
        node.value
        for node in _body("modeling_utils.py", "AttentionInterface")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    keys = [key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    plain = [str(key) for key in keys if "|" not in str(key)]  # `paged|…` is for serving alone
    return ["eager", *sorted(plain)] if plain else []


def _body(file: str, name: str) -> Iterator[ast.stmt]:
    """The statements of a class of transformers."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return
    source = Path(found.origin).with_name(file)
    if not source.is_file():
        return
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from node.body
