"""Holds a reward function to its promise: one finite number for each completion. A broken promise ends the run.

Nothing is replaced by a default: a made-up reward would be learned from.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.errors import RequestError, TrimtabError
from trimtab.rewards.builtin import Reward, text_of

SHOWN = 400
PROMISE = "return a list with one finite number for each completion"
LARGEST = 1e18
"""Rewards are compared by their spread, in fp32; what that cannot hold would come out as NaN."""


class RewardError(TrimtabError):
    """A reward function failed; the message shows the completion that it failed on."""


class CheckedReward:
    """A reward function as a trainer calls it. Gives the function those arguments that it takes."""

    def __init__(self, name: str, function: Reward, *, may_skip: bool) -> None:
        """`may_skip`: whether None ("does not apply") is an answer, which takes another reward beside this one."""
        self.name, self.function, self.may_skip = name, function, may_skip
        self.__name__ = name.rpartition(":")[2]
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:  # some functions written in C do not tell
            raise RequestError.of(
                f"grpo.reward={name}: {error}",
                "a reward gets the arguments that it names, and this one names none",
                "write a Python function around it: def score(completions, **columns) -> list[float]",
            ) from None
        self.takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.takes = {p.name for p in named}
        self.needs = {p.name for p in named if p.default is inspect.Parameter.empty}

    def __call__(self, /, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Any]:
        given = {"prompts": prompts, "completions": completions, **columns}
        # Copies, to be shown as they were: a function may change the lists that it is given.
        shown = {**given, "prompts": list(prompts), "completions": list(completions)}
        count = len(completions)
        try:
            scores = self._scores(given)
        except (Exception, SystemExit) as error:  # an exit would end the run as if all were well
            # Which completion of the batch it was: the first that fails by itself too.
            index = self._culprit(given, count)
            told = f"raised {type(error).__name__}: {error}{self._place(error)}"
            # Built-in rewards take whatever a model writes; what they raise for is the row.
            change = "repair the row, or remove it"
            if ":" in self.name:
                change = "handle such completions in the function; a model writes anything"
            raise self._wrong(told, shown, index, change) from error
        if not isinstance(scores, list):
            raise self._wrong(f"gave a {type(scores).__name__}, not a list", shown, 0)
        if len(scores) != count:
            told = f"gave {len(scores)} values for {count} completions"
            raise self._wrong(told, shown, min(len(scores), count - 1))
        for index, score in enumerate(scores):
            if problem := self._problem(score):
                raise self._wrong(f"gave {problem} for completion {index}", shown, index)
        return [None if score is None else float(score) for score in scores]

    def _scores(self, given: Mapping[str, Any]) -> Any:
        """What the function gives: as a list, where it can be gone through."""
        taken = {key: value for key, value in given.items() if self.takes_all or key in self.takes}
        scores: Any = self.function(**taken)
        if inspect.iscoroutine(scores):
            scores = asyncio.run(scores)
        if isinstance(scores, str | bytes | Mapping):  # whose characters or keys might pass for numbers
            return scores
        try:
            one_by_one = iter(scores)
        except TypeError:
            return scores
        return list(one_by_one)

    def _problem(self, score: Any) -> str | None:
        if score is None:
            return None if self.may_skip else "None (there is no other reward that could count)"
        try:
            value = None if isinstance(score, str | bytes) else float(score)
        except (TypeError, ValueError):
            value = None
        except OverflowError:
            value = math.inf
        if value is None:
            return f"{score!r}, which is no number"
        if not math.isfinite(value):
            return str(value)
        return f"{value:g}, whose square the trainer's fp32 does not hold," if abs(value) > LARGEST else None

    def _culprit(self, given: Mapping[str, Any], count: int) -> int:
        for index in range(count):
            one = {
                key: [value[index]] if isinstance(value, list) and len(value) == count else value
                for key, value in given.items()
            }
            try:
                self._scores(one)
            except (Exception, SystemExit):
                return index
        return 0

    def _place(self, error: BaseException) -> str:
        """The line of the function's own file from which it came, where there is one."""
        file = getattr(getattr(self.function, "__code__", None), "co_filename", None)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        return f" ({file}, line {frames[-1].lineno})" if frames else ""

    def _wrong(self, told: str, shown: Mapping[str, Any], index: int, change: str = PROMISE) -> RewardError:
        """The error, with the completion of that place and its row as the reward saw them."""
        lines = [
            f"  prompt:     {_short(plain_prompt(shown['prompts'][index]))}",
            f"  completion: {_short(text_of(shown['completions'][index]))}",
        ]
        for name, values in shown.items():
            told_already = name in ("prompts", "completions", "completion_ids")
            if not told_already and isinstance(values, list) and len(values) > index:
                lines.append(f"  {name + ':':<11} {_short(str(values[index]))}")
        return RewardError("\n".join([f"reward {self.name} {told}", *lines, f"  change: {change}"]))


def plain_prompt(prompt: Any) -> str:
    """A prompt on one line, also where it is messages."""
    if isinstance(prompt, str):
        return prompt
    return " | ".join(f"{message['role']}: {message.get('content')}" for message in prompt)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
