"""What settings say together: questions that rules, defaults and recipes ask of a config. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from trimtab.config.rule import Conflict

if TYPE_CHECKING:
    from trimtab.config.schema import Config


def value_of_setting(config: Config, key: str) -> object:
    """A setting's value by its dotted key."""
    section, _, leaf = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)


def leaves(value: object) -> Iterator[object]:
    """What a value is made of, names in mappings among it: it is as deep as `yaml_text.py` lets it be."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield name
            yield from leaves(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from leaves(entry)
    else:
        yield value


def is_given(config: Config, key: str) -> bool:
    """Whether somebody set it, as against its default."""
    section, _, leaf = key.rpartition(".")
    return leaf in (getattr(config, section) if section else config).model_fields_set


def kernel_home(kernel: str) -> str:
    """The repository of a kernel that is named as transformers does: `owner/name@revision:function`."""
    return kernel.rpartition("|")[2].partition("@")[0].partition(":")[0]


def evaluates(config: Config) -> bool:
    """Whether the run has rows to evaluate on."""
    return config.data.eval_source is not None or config.data.eval_fraction > 0


def keeps_best(config: Config) -> bool:
    """Whether the run ends with its best checkpoint: asked for, and there is an evaluation at every save."""
    return config.training.keep_best and evaluates(config) and saves_fall_on_evaluations(config)


def saves_fall_on_evaluations(config: Config) -> bool:
    """Whether each checkpoint has a held-out loss of its own, without which none can be called the best."""
    eval_steps, save_steps = config.training.eval_steps, config.training.save_steps
    return save_steps is None or (eval_steps is not None and save_steps % eval_steps == 0)


def longest_prompt(config: Config) -> int:
    """The most tokens of a prompt that is to be answered (GRPO)."""
    grpo = config.grpo
    return grpo.max_prompt_length or max(1, config.data.max_length - grpo.max_completion_length)


def unused(config: Config, keys: Iterable[str], where: str, change: str = "remove it") -> Conflict | None:
    """A warning of those of `keys` that are not at their defaults, and have no effect with `where`."""
    usual = type(config)()
    idle = [key for key in keys if value_of_setting(config, key) != value_of_setting(usual, key)]
    if not idle:
        return None
    more = f", nor have {', '.join(idle[1:])}" if idle[1:] else ""
    return Conflict(idle[0], f"has no effect with {where}{more}", change, warning=True)
