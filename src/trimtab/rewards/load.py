"""From the names in `grpo.reward` to functions that can be called, or to errors that say which name and why."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trimtab.config.grpo import reward_weights
from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.rewards.builtin import Reward, builtin_reward
from trimtab.rewards.check import CheckedReward

VISIBLE = "CUDA_VISIBLE_DEVICES"
# What a trainer passes besides the columns.
ALWAYS_THERE = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


@dataclass(frozen=True)
class Rewards:
    """The rewards of a run, in order, with their weights and the columns that they read."""

    functions: list[CheckedReward]
    weights: list[float]
    columns: dict[str, tuple[str, ...]]

    def missing(self, there: Collection[str]) -> list[str]:
        """What the rewards need and neither the trainer nor the data has, one line for each reward."""
        lines = []
        for reward in self.functions:
            needed = {*self.columns[reward.name], *reward.needs}
            if absent := ", ".join(sorted(needed - {*there} - ALWAYS_THERE)):
                lines.append(f"{reward.name} reads {absent}; the rows have {', '.join(sorted(there))}")
        return lines


def load_rewards(config: Config) -> Rewards:
    """All rewards that `grpo.reward` names."""
    weights = reward_weights(config)
    functions, columns = [], {}
    for name in weights:
        function, reads = builtin_reward(name, config.grpo) if ":" not in name else (_imported(name), ())
        functions.append(CheckedReward(name, function, may_skip=len(weights) > 1))
        columns[name] = reads
    shown = [function.__name__ for function in functions]
    for function in functions:
        if shown.count(function.__name__) > 1:  # their metrics would hide one another
            function.__name__ = function.name.replace(":", ".")
    return Rewards(functions, list(weights.values()), columns)


def _imported(name: str) -> Reward:
    module_name, _, function_name = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it
    visible = os.environ.get(VISIBLE)
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an exit would end the program as if all were well
        last = traceback.extract_tb(error.__traceback__)[-1]
        # A SyntaxError has the place in its own text, and is raised by the machinery of imports.
        where = "" if last.filename.startswith("<frozen") else f" ({last.filename}, line {last.lineno})"
        why = f"{type(error).__name__}: {error}{where}"
        change = "repair the module, or name another as module:function"
        if isinstance(error, ModuleNotFoundError):
            why, change = str(error), f"install {error.name}, which {module_name} imports"
            if f"{module_name}.".startswith(f"{error.name}."):
                file = f"{module_name.replace('.', '/')}.py"
                change = f"put {file} into the folder that you start from ({here}), or install its package"
        raise RequestError.of(f"grpo.reward={name}: the module could not be imported", why, change) from error
    if os.environ.get(VISIBLE) != visible:
        raise RequestError.of(
            f"grpo.reward={name}: importing {module_name} sets {VISIBLE}",
            "too late: the GPUs are counted and the plan is made by then",
            f"set {VISIBLE} before the start, and remove it from the module",
        )
    for part in function_name.split("."):
        if not hasattr(found, part):
            there = [key for key, value in vars(found).items() if callable(value) and key[0] != "_"]
            raise RequestError.of(
                f"grpo.reward={name}: {module_name} has no `{part}`",
                f"its functions are {', '.join(there[:10]) or 'none'}",
                "correct the name after the colon",
            )
        found = getattr(found, part)
    if not callable(found):
        raise RequestError.of(
            f"grpo.reward={name}: this is a {type(found).__name__}",
            "a reward is a function that scores completions",
            "name a function: def score(completions, **columns) -> list[float]",
        )
    function: Reward = found
    return function
