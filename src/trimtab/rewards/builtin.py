"""The rewards that Trimtab brings, all between 0 and 1. Each says what it needs in its own arguments.

A reward takes lists with one entry per completion (`completions`, `completion_ids`, and each column of the data under
its own name) and gives one number for each. Functions written for TRL have the same form.
"""

from __future__ import annotations

import json as json_format
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from trimtab.config.schema import GrpoSettings
from trimtab.rewards.sandbox import Limits, share_passed

Reward = Callable[..., Any]
_MARK = "####"
_FENCE = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)


def builtin_reward(name: str, settings: GrpoSettings) -> tuple[Reward, tuple[str, ...]]:
    """A built-in reward by its name, and the columns of the data that it reads."""
    if name == "answer":
        return _answer(settings.answer_column), (settings.answer_column,)
    if name == "format":
        return _format(settings.pattern or ""), ()
    if name == "length":
        return _length(settings.target_length), ()
    if name == "json":
        return _json, ()
    assert name == "code", "the names are checked with the config"
    limits = Limits(settings.test_seconds, settings.test_megabytes)
    return _code(settings.tests_column, limits), (settings.tests_column,)


def text_of(completion: Any) -> str:
    """A completion's text, also where it comes as messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def final_answer(text: str) -> str | None:
    """What stands on the line after the last `####`, or None without one."""
    if _MARK not in text:
        return None
    lines = text.rpartition(_MARK)[2].strip().splitlines()
    return lines[0].strip() if lines else ""


def same_answer(given: str, right: str) -> bool:
    """`1,200`, `$1200` and `1200.0` are one number; other answers are compared as text, without regard to case."""
    one, other = _number(given), _number(right)
    if one is not None and other is not None:
        return one == other
    return given.strip().rstrip(".").casefold() == right.strip().rstrip(".").casefold()


def _number(text: str) -> Decimal | None:
    plain = text.strip().rstrip(".").replace(",", "").replace("$", "").removesuffix("%").strip()
    with suppress(InvalidOperation):
        return value if (value := Decimal(plain)).is_finite() else None
    return None


def _answer(column: str) -> Reward:
    def answer(completions: Sequence[Any], **columns: Any) -> list[float]:
        scores = []
        for completion, gold in zip(completions, columns[column], strict=True):
            # Without the mark the whole text is the answer: `18` is right, `It is 18` is not.
            given, right = (
                text if (marked := final_answer(text)) is None else marked
                for text in (text_of(completion), "" if gold is None else str(gold))
            )
            if not right.strip():
                raise ValueError(f"the row has no right answer: nothing in its column `{column}`")
            scores.append(float(same_answer(given, right)))
        return scores

    return answer


def _format(pattern: str) -> Reward:
    wanted = re.compile(pattern, re.DOTALL)

    def format(completions: Sequence[Any]) -> list[float]:
        return [float(wanted.fullmatch(text_of(c).strip()) is not None) for c in completions]

    return format


def _length(target: int) -> Reward:
    def length(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        """1 up to the target, then falling: half of it at twice the target."""
        return [min(1.0, target / max(1, len(ids))) for ids in completion_ids]

    return length


def _json(completions: Sequence[Any]) -> list[float]:
    return [float(_is_json(code_of(text_of(c)))) for c in completions]


def _is_json(text: str) -> bool:
    try:
        value = json_format.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    # A bare number or word is valid JSON, and not what anybody means by it.
    return isinstance(value, dict | list)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is Python's, not JSON's")


def code_of(text: str) -> str:
    """The last fenced block of a text, or all of it where there is none."""
    blocks: list[str] = _FENCE.findall(text)
    return blocks[-1].strip() if blocks else text.strip()


def _code(column: str, limits: Limits) -> Reward:
    def code(completions: Sequence[Any], **columns: Any) -> list[float]:
        jobs = [(code_of(text_of(c)), tests) for c, tests in zip(completions, columns[column], strict=True)]
        return share_passed(jobs, limits)

    return code
