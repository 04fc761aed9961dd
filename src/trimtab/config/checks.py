"""What must hold between settings: conflicts are errors, settings without effect are warnings. All of it is here.

Looks at nothing but the settings; whether the machine can meet them is for placement/ to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from trimtab.config.schema import Config


@dataclass(frozen=True)
class Finding:
    """A setting that cannot stand next to the others, or (`warning`) that does nothing there."""

    key: str
    reason: str
    change: str
    warning: bool = False


REWARDS = ("answer", "format", "length", "json", "code")
"""The rewards that Trimtab brings; all others are `module:function`."""
Rule = Callable[[Config], Finding | None]
RULES: list[tuple[tuple[str, ...], Rule]] = []
"""Each rule with the settings that it reads; it is left out where one of them is wrong already."""


def run_checks(config: Config, wrong: Collection[str] = ()) -> list[tuple[Finding, tuple[str, ...]]]:
    """Every finding with the settings that take part in it. Rules that read a `wrong` setting are left out."""
    findings = [(rule(config), keys) for keys, rule in RULES if not set(keys) & set(wrong)]
    return [(finding, keys) for finding, keys in findings if finding is not None]


def config_warnings(config: Config) -> list[str]:
    """One line for each setting that somebody gave and that has no effect, to print before a run."""
    found = [finding for finding, _ in run_checks(config) if finding.warning]
    return [f"{finding.key} {finding.reason}; {finding.change}" for finding in found]


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


def reward_weights(config: Config) -> dict[str, float]:
    """The rewards of `recipe: grpo` by name, each with its weight."""
    reward = config.grpo.reward
    if isinstance(reward, dict):
        return reward
    names = [reward] if isinstance(reward, str) else reward or []
    return dict.fromkeys(names, 1.0)


def is_given(config: Config, key: str) -> bool:
    """Whether somebody set it, as against its default."""
    section, _, leaf = key.rpartition(".")
    return leaf in (getattr(config, section) if section else config).model_fields_set


def _rule(*keys: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        RULES.append((keys, rule))
        return rule

    return add


@_rule("data.packing", "training.group_by_length")
def _packing_and_grouping(config: Config) -> Finding | None:
    if not (config.data.packing and config.training.group_by_length):
        return None
    return Finding(
        "training.group_by_length",
        "cannot go with data.packing: packed sequences are all of one length",
        "remove training.group_by_length, or set data.packing: false",
    )


@_rule("training.keep_best", "data.eval_fraction", "data.eval_source")
def _best_of_nothing(config: Config) -> Finding | None:
    asked = config.training.keep_best and is_given(config, "training.keep_best")
    if not asked or evaluates(config):
        return None
    return Finding(
        "training.keep_best",
        "needs a held-out loss, but data.eval_fraction is 0 and there is no data.eval_source",
        "set data.eval_fraction: 0.1 or data.eval_source, or training.keep_best: false",
    )


@_rule(
    "training.keep_best",
    "training.eval_steps",
    "training.save_steps",
    "data.eval_fraction",
    "data.eval_source",
)
def _best_between_evaluations(config: Config) -> Finding | None:
    if not config.training.keep_best or not evaluates(config) or saves_fall_on_evaluations(config):
        return None
    eval_steps, save_steps = config.training.eval_steps, config.training.save_steps
    often = f"evaluates every {eval_steps} steps" if eval_steps else "evaluates once an epoch"
    reason = f"needs an evaluation at each checkpoint, but the run {often} and saves every {save_steps} steps"
    change = (
        f"set training.eval_steps: {save_steps}, remove training.save_steps, or set training.keep_best: false"
    )
    if is_given(config, "training.keep_best"):
        return Finding("training.keep_best", reason, change)
    return Finding("training.keep_best", f"(the default) is not applied: it {reason}", change, warning=True)


@_rule("training.eval_steps", "training.eval_batch_size", "data.eval_fraction", "data.eval_source")
def _evaluation_of_nothing(config: Config) -> Finding | None:
    keys = ("training.eval_steps", "training.eval_batch_size")
    set_keys = [key for key in keys if getattr(config.training, key.rpartition(".")[2]) is not None]
    if evaluates(config) or not set_keys:
        return None
    return Finding(
        set_keys[0],
        "has no effect: data.eval_fraction is 0 and there is no data.eval_source",
        "remove it, or set data.eval_fraction: 0.1",
        warning=True,
    )


@_rule("data.eval_fraction", "data.eval_source")
def _two_held_out_parts(config: Config) -> Finding | None:
    held_out = is_given(config, "data.eval_fraction") and config.data.eval_fraction > 0
    if config.data.eval_source is None or not held_out:
        return None
    return Finding(
        "data.eval_fraction",
        "has no effect: data.eval_source is what the run evaluates on",
        "remove one of the two",
        warning=True,
    )


@_rule("training.warmup_ratio", "training.warmup_steps")
def _two_warmups(config: Config) -> Finding | None:
    training = config.training
    ratio_asked = is_given(config, "training.warmup_ratio") and training.warmup_ratio > 0
    if training.warmup_steps is None or not ratio_asked:
        return None
    return Finding(
        "training.warmup_ratio",
        "cannot go with training.warmup_steps: both set the length of the warm-up",
        "remove one of the two",
    )


@_rule("training.lr_scheduler", "training.warmup_ratio", "training.warmup_steps")
def _warmup_of_a_constant(config: Config) -> Finding | None:
    training = config.training
    if training.lr_scheduler != "constant":
        return None
    key = "training.warmup_steps" if training.warmup_steps else "training.warmup_ratio"
    if not is_given(config, key) or not (training.warmup_steps or training.warmup_ratio):
        return None
    return Finding(
        key,
        "has no effect with training.lr_scheduler: constant",
        "remove it, or set training.lr_scheduler: constant_with_warmup",
        warning=True,
    )


@_rule("training.epochs", "training.max_steps")
def _epochs_and_steps(config: Config) -> Finding | None:
    if config.training.max_steps is None or not is_given(config, "training.epochs"):
        return None
    return Finding(
        "training.epochs",
        "has no effect: training.max_steps says when the run ends",
        "remove one of the two",
        warning=True,
    )


@_rule("training.resume", "overwrite")
def _resume_and_overwrite(config: Config) -> Finding | None:
    if not (config.training.resume and config.overwrite):
        return None
    return Finding(
        "overwrite",
        "cannot go with training.resume: it removes the checkpoint that the run would go on from",
        "remove overwrite to go on, or training.resume to start again",
    )


@_rule("training.resume", "output_dir")
def _resume_from_nowhere(config: Config) -> Finding | None:
    if config.training.resume is not True or config.output_dir is not None:
        return None
    return Finding(
        "training.resume",
        "looks for a checkpoint in output_dir, which is not set: each run then gets a new folder",
        "set output_dir to the earlier run's folder, or training.resume to a checkpoint's path",
    )


@_rule("overwrite", "output_dir")
def _overwrite_of_nothing(config: Config) -> Finding | None:
    if not config.overwrite or config.output_dir is not None:
        return None
    return Finding(
        "overwrite",
        "has no effect without output_dir: each run then gets a new folder",
        "remove it, or set output_dir",
        warning=True,
    )


@_rule("method", "lora")
def _lora_unused(config: Config) -> Finding | None:
    if config.method != "full" or not (is_given(config, "lora") or config.lora.model_fields_set):
        return None
    return Finding("lora", "has no effect with method: full", "remove it, or set method: lora", warning=True)


@_rule("model_parallel", "device")
def _split_on_one_device(config: Config) -> Finding | None:
    if config.model_parallel is not True or config.device in ("auto", "cuda"):
        return None
    return Finding(
        "model_parallel",
        f"splits the model over several GPUs, but device is {config.device}",
        "set device: cuda, or model_parallel: null",
    )


@_rule("model_parallel", "sharding")
def _split_and_shard(config: Config) -> Finding | None:
    if not (config.model_parallel and config.sharding):
        return None
    return Finding(
        "model_parallel",
        "cannot go with sharding: one splits the model inside a process, the other over processes",
        "set one of them to false",
    )


@_rule("model_parallel", "processes")
def _split_in_many_processes(config: Config) -> Finding | None:
    if not config.model_parallel or config.processes is None or config.processes == 1:
        return None
    return Finding(
        "model_parallel",
        f"needs all GPUs in one process, but processes is {config.processes}",
        "set processes: 1, or model_parallel: false",
    )


@_rule("processes", "device")
def _many_processes_on_one_gpu(config: Config) -> Finding | None:
    if config.processes is None or config.processes == 1 or ":" not in config.device:
        return None
    return Finding(
        "processes",
        f"gives each process a GPU of its own, but device names one: {config.device}",
        "set device: cuda, or processes: 1",
    )


@_rule("precision", "device")
def _half_on_cpu(config: Config) -> Finding | None:
    if config.precision != "fp16" or config.device != "cpu":
        return None
    return Finding(
        "precision",
        "fp16 training needs a GPU's gradient scaler, but device is cpu",
        "set precision: auto (bf16 where the processor has it, else fp32), or device: cuda",
    )


@_rule("monitor.slow_after_seconds", "monitor.stuck_after_seconds")
def _slow_after_stuck(config: Config) -> Finding | None:
    slow, stuck = config.monitor.slow_after_seconds, config.monitor.stuck_after_seconds
    if slow <= stuck:
        return None
    return Finding(
        "monitor.slow_after_seconds",
        f"must not be above monitor.stuck_after_seconds ({stuck:g}): a run is slow before it is stuck",
        f"set it to {stuck:g} or less",
    )


@_rule("data.endpoint_url", "data.source", "data.eval_source")
def _endpoint_unused(config: Config) -> Finding | None:
    sources = [config.data.source, config.data.eval_source or ""]
    if config.data.endpoint_url is None or any(source.startswith("s3://") for source in sources):
        return None
    return Finding(
        "data.endpoint_url",
        "has no effect: the data do not come from s3://",
        "remove it, or set data.source: s3://bucket/key",
        warning=True,
    )


@_rule("recipe", "grpo.reward", "grpo.pattern")
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


@_rule("grpo.use_vllm", "grpo.vllm_mode", "model_parallel", "recipe")
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


@_rule("grpo.use_vllm", "grpo.vllm_mode", "grpo.vllm_server_base_url", "recipe")
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


@_rule("recipe", "grpo", *_NOT_GRPO)
def _unused_with_grpo(config: Config) -> Finding | None:
    usual = Config()
    keys = _NOT_GRPO if config.recipe == "grpo" else ("grpo",)
    unused = [key for key in keys if value_of_setting(config, key) != value_of_setting(usual, key)]
    if not unused:
        return None
    change = "remove it" if config.recipe == "grpo" else "remove it, or set recipe: grpo"
    return Finding(unused[0], f"has no effect with recipe: {config.recipe}", change, warning=True)


@_rule("recipe", "zeroth.task", "zeroth.template", "zeroth.labels", "zeroth.answer")
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


@_rule("recipe", "training.lr_scheduler")
def _schedule_of_zeroth_order(config: Config) -> Finding | None:
    if config.recipe != "zeroth_order" or config.training.lr_scheduler != "polynomial":
        return None
    return Finding("training.lr_scheduler", "is not among zeroth-order schedules", "set it to linear")


@_rule("recipe", "sharding")
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


@_rule("recipe", "zeroth", "zeroth.method", *_FIRST_ORDER)
def _unused_by_the_recipe(config: Config) -> Finding | None:
    usual, method = Config(), config.zeroth.method
    if config.recipe == "zeroth_order":
        leaves = [
            leaf for leaf in type(config.zeroth).model_fields if leaf.startswith(_OTHER_METHODS[method])
        ]
        keys = [*_FIRST_ORDER, *(f"zeroth.{leaf}" for leaf in leaves)]
        where, change = f"zeroth.method: {method}", "remove it"
    else:
        keys, where, change = ["zeroth"], f"recipe: {config.recipe}", "remove it, or set recipe: zeroth_order"
    unused = [key for key in keys if value_of_setting(config, key) != value_of_setting(usual, key)]
    if not unused:
        return None
    more = f", nor have {', '.join(unused[1:])}" if unused[1:] else ""
    return Finding(unused[0], f"has no effect with {where}{more}", change, warning=True)


def value_of_setting(config: Config, key: str) -> object:
    """A setting's value by its dotted key."""
    section, _, leaf = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, leaf)
