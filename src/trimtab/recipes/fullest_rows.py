"""Rows as long as a run's settings let them be, made up from ids alone: what a step is executed with for its memory.

No data is read and no tokenizer needed. Every token is trained on, and no two rows begin alike, so that nothing can be
shared between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from trimtab.config.schema import Config
from trimtab.recipes.recipe import Prepared


class NotExecuted(Exception):
    """Why a step could not be executed, in one line."""


class Fullest(NamedTuple):
    """The rows, and what one pass over them is."""

    prepared: Prepared
    rows: str
    """One pass in words: `2 rows of 4,096 tokens`."""


def text_rows(config: Config, number: int) -> Fullest:
    """Rows of supervised fine-tuning: `data.max_length` tokens, each of them told and trained."""
    longest = config.data.max_length
    rows = [{"input_ids": ids, "labels": ids} for ids in _different(number, longest)]
    return Fullest(_prepared(rows), _told(config))


def scored_rows(config: Config, number: int) -> Fullest:
    """Questions of zeroth-order steps, with one answer each."""
    from trimtab.zeroth.objective import Example

    examples = [Example(ids[:-1], [ids[-1:]], 0) for ids in _different(number, config.data.max_length)]
    return Fullest(_prepared(examples), _told(config))


def _different(number: int, length: int) -> list[list[int]]:
    return [[row % 256, *[1] * (length - 1)] for row in range(number)]


class _Ids:
    """In a tokenizer's place: there are ids, and no words."""

    pad_token_id = eos_token_id = 0
    bos_token_id = None
    model_input_names = ("input_ids",)

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] for _ in texts]}


def _prepared(rows: list[Any]) -> Prepared:
    return Prepared(_Ids(), rows, None, None)


def _told(config: Config) -> str:
    size = config.training.batch_size
    return f"{size} row{'s' * (size > 1)} of {config.data.max_length:,} tokens"
