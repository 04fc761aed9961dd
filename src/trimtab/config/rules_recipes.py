"""What must hold between a recipe's own settings (`grpo`, `zeroth`) and the others, and what a recipe does not use."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trimtab.config.facts import reward_weights, value_of_setting
from trimtab.config.rule import Finding, Rules
from trimtab.config.schema import Config

RULES = Rules()
REWARDS = ("answer", "format", "length", "json", "code")
"""The rewards that Trimtab brings; all others are `module:function`."""


@RULES.reading("recipe", "grpo.reward", "grpo.pattern")
def _nothing_to_reward(config: Config) -> Finding | None:
    if config.recipe != "grpo":
        return None
    names = [*reward_weights(config)]
    if not names:
        return Finding(
            "grpo.reward",
            "recipe: grpo learns from rewards, and nothing says which",
            "set reward: answer (or format, length, json, code, my_module:my_function; several as a list)",
        )
    unknown = [name for name in names if name not in REWARDS and ":" not in name]
    if unknown:
        return Finding(
            "grpo.reward",
            f"has {unknown[0]!r}, which is no reward",
            f"write one of {', '.join(REWARDS)}, or module:function",
        )
    if "format" not in names:
        return None
    try:
        broken = "is not set" if config.grpo.pattern is None else ""
        re.compile(config.grpo.pattern or "")
    except re.error as error:
        broken = f"is no regular expression: {error}"
    if not broken:
        return None
    return Finding("grpo.pattern", f"{broken}; the reward `format` needs it", "write e.g. '#### -?[0-9]+'")


@RULES.reading("grpo.use_vllm", "grpo.vllm_mode", "model_parallel", "recipe")
def _vllm_and_split(config: Config) -> Finding | None:
    grpo = config.grpo
    if config.recipe != "grpo" or not (
        grpo.use_vllm and grpo.vllm_mode == "colocate" and config.model_parallel
    ):
        return None
    return Finding(
        "grpo.use_vllm",
        "shares the GPUs with a split model: vLLM would take memory that the split has given to layers",
        "set grpo.vllm_mode: server with a GPU of its own, or model_parallel: false",
    )


@RULES.reading("grpo.use_vllm", "grpo.vllm_mode", "grpo.vllm_server_base_url", "recipe")
def _vllm_address(config: Config) -> Finding | None:
    grpo, key = config.grpo, "grpo.vllm_server_base_url"
    if config.recipe != "grpo" or grpo.vllm_server_base_url == Config().grpo.vllm_server_base_url:
        return None
    if not (grpo.use_vllm and grpo.vllm_mode == "server"):
        change = "remove it, or set grpo.use_vllm: true and grpo.vllm_mode: server"
        return Finding(key, "has no effect: no vLLM server generates", change, warning=True)
    if re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", grpo.vllm_server_base_url):
        return None
    return Finding(key, "is not the address of a server", "write e.g. http://localhost:8000")


_NOT_GRPO = ("data.format", "data.packing", "data.train_on", "training.group_by_length")


@RULES.reading("recipe", "grpo", *_NOT_GRPO)
def _unused_with_grpo(config: Config) -> Finding | None:
    if config.recipe == "grpo":
        return _unused(config, _NOT_GRPO, "recipe: grpo", "remove it")
    return _unused(config, ["grpo"], f"recipe: {config.recipe}", "remove it, or set recipe: grpo")


@RULES.reading("recipe", "zeroth.task", "zeroth.template", "zeroth.labels", "zeroth.answer")
def _nothing_to_score(config: Config) -> Finding | None:
    zeroth = config.zeroth
    if config.recipe != "zeroth_order":
        return None
    own = "zeroth.template with zeroth.labels or zeroth.answer"
    if zeroth.task is None and zeroth.template is None:
        return Finding(
            "zeroth.task",
            "recipe: zeroth_order scores answers, and nothing says which",
            f"set zeroth.task (e.g. sst2), or {own}",
        )
    if zeroth.task is not None and (
        zeroth.template is not None or zeroth.labels or zeroth.answer is not None
    ):
        return Finding("zeroth.task", "brings its own prompt and answers", f"remove it, or remove {own}")
    if zeroth.template is not None and bool(zeroth.labels) == (zeroth.answer is not None):
        have = "both zeroth.labels and zeroth.answer" if zeroth.labels else "no answers"
        return Finding("zeroth.template", f"stands with {have}", f"write {own}, one of the two")
    if len(set(zeroth.labels.values())) < len(zeroth.labels) or len(zeroth.labels) == 1:
        return Finding(
            "zeroth.labels",
            "must give at least two labels, each its own text",
            "give each label another text",
        )
    return None


@RULES.reading("recipe", "training.lr_scheduler")
def _schedule_of_zeroth_order(config: Config) -> Finding | None:
    if config.recipe != "zeroth_order" or config.training.lr_scheduler != "polynomial":
        return None
    return Finding("training.lr_scheduler", "is not among zeroth-order schedules", "set it to linear")


@RULES.reading("recipe", "sharding")
def _sharded_zeroth_order(config: Config) -> Finding | None:
    if config.recipe != "zeroth_order" or not config.sharding:
        return None
    return Finding(
        "sharding",
        "cannot go with recipe: zeroth_order: each process computes with whole weights",
        "remove it; model_parallel: true splits a large model over the GPUs of one process",
    )


_FIRST_ORDER = (
    *("data.format", "data.packing", "data.train_on", "lora.dropout", "samples.prompts"),
    *(f"training.{key}" for key in ("max_grad_norm", "optimizer", "gradient_checkpointing")),
    *("training.group_by_length", "training.dataloader_workers", "monitor.report_to"),
)
_OTHER_METHODS = {
    "mezo": ("queries", "interval", "projection_"),
    "dizo": ("queries",),
    "fzoo": ("interval", "projection_"),
}


@RULES.reading("recipe", "zeroth", *_FIRST_ORDER)
def _unused_with_zeroth_order(config: Config) -> Finding | None:
    if config.recipe == "zeroth_order":
        return _unused(config, _FIRST_ORDER, "recipe: zeroth_order", "remove it")
    return _unused(config, ["zeroth"], f"recipe: {config.recipe}", "remove it, or set recipe: zeroth_order")


@RULES.reading("recipe", "zeroth.method")
def _unused_by_the_method(config: Config) -> Finding | None:
    if config.recipe != "zeroth_order":
        return None
    method = config.zeroth.method
    leaves = [leaf for leaf in type(config.zeroth).model_fields if leaf.startswith(_OTHER_METHODS[method])]
    keys = [f"zeroth.{leaf}" for leaf in leaves]
    return _unused(config, keys, f"zeroth.method: {method}", "remove it")


def _unused(config: Config, keys: Iterable[str], where: str, change: str) -> Finding | None:
    """A warning of those of `keys` that are not at their defaults."""
    usual = Config()
    unused = [key for key in keys if value_of_setting(config, key) != value_of_setting(usual, key)]
    if not unused:
        return None
    more = f", nor have {', '.join(unused[1:])}" if unused[1:] else ""
    return Finding(unused[0], f"has no effect with {where}{more}", change, warning=True)
