"""Defaults that depend on the recipe: filled in where nobody set a value, each with its reason, to be printed."""

from __future__ import annotations

from typing import Any, NamedTuple

from trimtab.config.facts import is_given, reward_weights, value_of_setting
from trimtab.config.schema import Config


class Default(NamedTuple):
    """A value that a recipe chose, and why."""

    key: str
    value: Any
    reason: str


def with_recipe_defaults(config: Config) -> tuple[Config, list[Default]]:
    """A copy with the recipe's own defaults filled in, and what they are. Nothing that was set is changed."""
    wanted = {"zeroth_order": _zeroth_order, "grpo": _grpo}.get(config.recipe, lambda _: [])(config)
    filled = config.model_copy(deep=True)
    chosen = [default for default in wanted if _is_open(config, default.key)]
    for key, value, _ in chosen:
        section, _, leaf = key.rpartition(".")
        setattr(getattr(filled, section) if section else filled, leaf, value)
    return filled, chosen


def _is_open(config: Config, key: str) -> bool:
    """Whether nobody set it; null stands for the usual value where a setting takes null."""
    if key in ("zeroth.eps", "grpo.system"):
        return value_of_setting(config, key) is None
    return not is_given(config, key)


def _zeroth_order(config: Config) -> list[Default]:
    zeroth, lora = config.zeroth, config.method == "lora"
    what = "a LoRA adapter" if lora else "all weights"
    if zeroth.method == "fzoo":
        rate, eps = (1e-3, 1e-2) if lora else (5e-5, 1e-4)
        source = f"FZOO's steps over {what} have a length of their own"
    else:
        rate, eps = (1e-4, 1e-2) if lora else (1e-6, 1e-3)
        source = f"usual for MeZO over {what}"
    sample = "the few rows that Trimtab ships for each task; `hub` takes the real set"
    return [
        *([Default("data.source", "sample", sample)] if zeroth.task is not None else []),
        Default("training.learning_rate", rate, source),
        Default("zeroth.eps", eps, source),
        Default("training.lr_scheduler", "constant", "usual for zeroth-order steps"),
        Default("training.batch_size", 16, "usual for zeroth-order steps, which keep no activations"),
    ]


ANSWER_RULE = "Solve the problem. End with a line of the form: #### N, where N is the answer."


def _grpo(config: Config) -> list[Default]:
    lora, grpo = config.method == "lora", config.grpo
    what = "a LoRA adapter" if lora else "all weights"
    untold = grpo.chat and grpo.prompt is None and "answer" in reward_weights(config)
    told = "the reward `answer` reads what follows ####, so the model is told to write it"
    return [
        *([Default("grpo.system", ANSWER_RULE, told)] if untold else []),
        Default("training.batch_size", grpo.num_generations, "completions a pass: those of one prompt"),
        Default("training.learning_rate", 1e-5 if lora else 1e-6, f"usual for GRPO over {what}"),
        Default("training.lr_scheduler", "constant", "usual for GRPO"),
        Default("training.epochs", 1.0, "each prompt is answered once"),
        Default("data.eval_fraction", 0.0, "an evaluation generates for every held-out prompt; by request"),
    ]
