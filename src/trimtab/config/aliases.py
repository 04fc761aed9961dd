"""The names that people know from Hugging Face, TRL, PEFT, Axolotl and LLaMA-Factory, and what they mean here.

Tables first, then the few conversions of values. Never reads files; `load.py` applies what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.config.keys import SECTIONS

Settings = dict[str, Any]


class Refused(Exception):
    """A known name with a value that has no counterpart here: why, and what to write instead."""

    def __init__(self, reason: str, change: str) -> None:
        super().__init__(reason)
        self.reason, self.change = reason, change


@dataclass(frozen=True)
class Alias:
    """Another name for `key`. `convert` gives the settings that a value stands for, if not the value itself."""

    key: str
    convert: Callable[[Any], Settings] | None = None
    switch: bool = False
    """Whether it is a question of yes or no, which a flag answers by standing there."""


@dataclass(frozen=True)
class Denial:
    """What `false` says for a yes/no alias: not `value`; then `instead`, or whatever would hold without it."""

    key: str
    value: str
    instead: str | None = None
    contradicts: bool = True
    """Whether it is an error next to `key: value` in the same place; not where false is just the usual default."""


_SAME_VALUE = {
    "model.name": "model_name_or_path base_model model_name model_id model_path pretrained_model_name_or_path",
    "model.revision": "model_revision revision_of_model",
    "model.chat_template": "chat_template_path chat_template_jinja",
    "model.attn_implementation": "attn_implementation",
    "data.source": "dataset dataset_name dataset_path dataset_id data_path train_file train_data local_data",
    "data.eval_source": "validation_file eval_file eval_dataset eval_data validation_data",
    "data.subset": "dataset_config dataset_config_name",
    "data.split": "dataset_train_split",
    "data.max_length": "max_length max_seq_length max_seq_len cutoff_len sequence_len model_max_length",
    "data.max_rows": "max_samples max_train_samples",
    "data.packing": "packing sample_packing",
    "lora.r": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.rslora": "use_rslora peft_use_rslora lora_use_rslora",
    "lora.dora": "use_dora peft_use_dora lora_use_dora",
    "speed.compile": "torch_compile",
    "training.epochs": "epochs num_train_epochs num_epochs",
    "training.batch_size": "batch_size per_device_train_batch_size train_batch_size micro_batch_size",
    "training.eval_batch_size": "eval_batch_size per_device_eval_batch_size",
    "training.gradient_accumulation_steps": "gradient_accumulation_steps",
    "training.effective_batch_size": "effective_batch_size global_batch_size total_batch_size",
    "training.learning_rate": "learning_rate lr",
    "training.lr_scheduler": "lr_scheduler lr_scheduler_type",
    "training.warmup_ratio": "warmup_ratio",
    "training.weight_decay": "weight_decay",
    "training.max_grad_norm": "max_grad_norm",
    "training.optimizer": "optim optimizer",
    "training.gradient_checkpointing": "gradient_checkpointing",
    "training.group_by_length": "group_by_length",
    "training.eval_steps": "eval_steps",
    "training.save_steps": "save_steps",
    "training.save_total_limit": "save_total_limit",
    "training.keep_best": "keep_best load_best_model_at_end",
    "training.logging_steps": "logging_steps",
    "training.dataloader_workers": "dataloader_num_workers dataloader_workers",
    "output_dir": "output_dir",
    "overwrite": "overwrite overwrite_output_dir",
    "seed": "seed",
    "device": "device",
    "precision": "precision",
    "model_parallel": "model_parallel use_model_parallel",
    "grpo.reward": "reward rewards reward_funcs reward_functions",
    "grpo.system": "system_prompt",
    "grpo.num_generations": "num_generations",
    "grpo.temperature": "temperature",
    "grpo.top_p": "top_p",
    "grpo.top_k": "top_k",
    "grpo.max_prompt_length": "max_prompt_length",
    "grpo.max_completion_length": "max_completion_length",
    "grpo.beta": "beta kl_coef",
    "grpo.epsilon": "epsilon",
    "grpo.num_iterations": "num_iterations",
    "grpo.mask_truncated": "mask_truncated_completions",
    "grpo.use_vllm": "use_vllm",
    "grpo.vllm_mode": "vllm_mode",
    "grpo.vllm_server_base_url": "vllm_server_base_url",
    "grpo.vllm_memory": "vllm_gpu_memory_utilization",
    "grpo.show_completions": "num_completions_to_print",
}


def _share(value: Any) -> Settings:
    if value is None:
        return {}
    if _is_number(value) and value >= 1:
        raise Refused("is a number of rows; Trimtab holds out a share", "write a share below 1, e.g. 0.1")
    return {"data.eval_fraction": value}


def _percent(value: Any) -> Settings:
    return {"data.eval_fraction": value / 100 if _is_number(value) else value} if value is not None else {}


def _warmup_steps(value: Any) -> Settings:
    if isinstance(value, float) and 0 < value < 1:  # Hugging Face reads such a number of steps as a share
        return {"training.warmup_ratio": value}
    return {"training.warmup_steps": value}


def _trackers(value: Any) -> Settings:
    names = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(names, list):
        if "all" in names:
            raise Refused("Trimtab reports only to trackers that are named", "name them, e.g. [tensorboard]")
        names = [name for name in names if name != "none"]
    return {"monitor.report_to": names}


def _trusted(value: Any) -> Settings:
    if value is True:
        raise Refused(
            "would run whatever code comes with whatever model is named",
            "read the repository's code, and name it: --trust-remote-code OWNER/NAME",
        )
    return {"model.trust_remote_code": value}


def _targets(value: Any) -> Settings:
    if value is None:
        return {}
    if value == "all":
        value = "all-linear"
    elif isinstance(value, str) and "," in value and ":" not in value:
        # Behind a colon the commas belong to one target: `vision:0-3:q_proj,k_proj`.
        value = [name.strip() for name in value.split(",") if name.strip()]
    return {"lora.targets": value}


def _adapter(value: Any) -> Settings:
    if value == "qlora":
        return {"method": "lora", "model.quantize": "nf4"}
    if value not in (None, "lora"):
        raise Refused("has no counterpart here", "write method: lora or full")
    return {"method": value or "full"}


def _rhythm(key: str, reason: str, change: str) -> Alias:
    """How often: each epoch, or `key` steps. `reason` and `change` answer who wants it never."""

    def convert(value: Any) -> Settings:
        if value in ("no", False):
            raise Refused(reason, change)
        if value not in (None, "steps", "epoch"):
            raise Refused("must be steps or epoch", f"write epoch, or {key}: N")
        return {key: None} if value == "epoch" else {}

    return Alias(key, convert)


def _sampling(value: Any) -> Settings:
    if value not in ("random", "group_by_length"):
        raise Refused("must be random or group_by_length", "write training.group_by_length: true or false")
    return {"training.group_by_length": value == "group_by_length"}


def _written(key: str, change: Callable[[Any], Any]) -> Alias:
    """A name whose value is written otherwise here."""
    return Alias(key, lambda value: {key: change(value)})


def _flag(key: str, value: str) -> Alias:
    """A yes/no name: yes sets `key` to `value`; what no means stands in `DENIALS`."""
    return _switch(key, {key: value}, {}, f"write {key}: {value}")


def _either(key: str, yes: str, no: str) -> Alias:
    return _switch(key, {key: yes}, {key: no}, f"write {key}: {yes} or {key}: {no}")


def _switch(key: str, yes: Settings, no: Settings, change: str) -> Alias:
    def convert(given: Any) -> Settings:
        if given is None or (given == "auto" and not no):
            return {}
        if not isinstance(given, bool):
            raise Refused("must be true or false", change)
        return yes if given else no

    return Alias(key, convert, switch=True)


def _words(key: str, known: Mapping[Any, str]) -> Alias:
    def convert(given: Any) -> Settings:
        word = given.removeprefix("torch.") if isinstance(given, str) else given
        if not isinstance(word, str | bool | None) or word not in known:
            options = " or ".join(dict.fromkeys(known.values()))
            raise Refused("has no counterpart here", f"write {key}: {options}")
        return {key: known[word]}

    return Alias(key, convert)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_DTYPES = {"auto": "auto", "float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16"}
_DTYPES |= {"float16": "fp16", "fp16": "fp16", "half": "fp16"}

_EVALUATION = _rhythm(
    "training.eval_steps",
    "here a run evaluates whenever it has rows to evaluate on",
    "write data.eval_fraction: 0",
)
_SAVING = _rhythm(
    "training.save_steps", "a run always keeps its newest checkpoint", "write training.save_total_limit: 1"
)
_SHARES = "val_size val_set_size val_split val_ratio test_size validation_split"
_TARGETS = "lora_target_modules target_modules lora_target"

ALIASES: dict[str, Alias] = {
    **{name: Alias(key) for key, names in _SAME_VALUE.items() for name in names.split()},
    **{name: Alias("data.eval_fraction", _share) for name in _SHARES.split()},
    "validation_split_percentage": Alias("data.eval_fraction", _percent),
    "dataset_text_field": Alias("data.columns", lambda name: {"data.columns.text": name}),
    "train_on_inputs": _either("data.train_on", "all", "answers"),
    "completion_only_loss": _either("data.train_on", "answers", "all"),
    "assistant_only_loss": _flag("data.train_on", "answers"),
    **{name: Alias("lora.targets", _targets) for name in _TARGETS.split()},
    "lora_target_linear": _flag("lora.targets", "all-linear"),
    "use_lora": _either("method", "lora", "full"),
    "use_peft": _either("method", "lora", "full"),
    "finetuning_type": _words("method", {"lora": "lora", "full": "full"}),
    "adapter": Alias("method", _adapter),
    "load_in_4bit": _flag("model.quantize", "nf4"),
    "max_steps": _written("training.max_steps", lambda steps: None if steps == -1 else steps),
    "warmup_steps": Alias("training.warmup_steps", _warmup_steps),
    "resume_from_checkpoint": _written("training.resume", lambda path: False if path is None else path),
    "evaluation_strategy": _EVALUATION,
    "eval_strategy": _EVALUATION,
    "save_strategy": _SAVING,
    "train_sampling_strategy": Alias("training.group_by_length", _sampling),
    "report_to": Alias("monitor.report_to", _trackers),
    "trust_remote_code": Alias("model.trust_remote_code", _trusted),
    "bf16": _flag("precision", "bf16"),
    "fp16": _flag("precision", "fp16"),
    "fp32": _flag("precision", "fp32"),
    "dtype": _words("precision", _DTYPES),
    "torch_dtype": _words("precision", _DTYPES),
    "mixed_precision": _words("precision", _DTYPES | {"no": "fp32", False: "fp32"}),
    "use_cpu": _flag("device", "cpu"),
    "no_cuda": _flag("device", "cpu"),
    "use_mps_device": _flag("device", "mps"),
    # SFT's one loss is what happens anyway.
    "loss_type": Alias(
        "grpo.loss_type", lambda value: {} if value in (None, "nll") else {"grpo.loss_type": value}
    ),
    "recipe": _written("recipe", lambda name: "zeroth_order" if name == "zeroth-order" else name),
}

SECTION_ALIASES: dict[str, dict[str, str]] = {
    "model": {"path": "model.name", "id": "model.name", "name_or_path": "model.name"},
    "data": {"path": "data.source", "file": "data.source", "name": "data.source", "train": "data.source"},
    "lora": {"rank": "lora.r"},
}
"""Names that are clear only inside their section."""

DENIALS: dict[str, Denial] = {
    # `auto` may choose bf16, or fp16 on older GPUs, so a no to either has to say what then.
    "bf16": Denial("precision", "bf16", instead="fp32"),
    "fp16": Denial("precision", "fp16", instead="fp32"),
    "fp32": Denial("precision", "fp32"),
    "use_cpu": Denial("device", "cpu", contradicts=False),
    "no_cuda": Denial("device", "cpu", contradicts=False),
    "use_mps_device": Denial("device", "mps", contradicts=False),
}


def alias_of(path: tuple[str, ...]) -> Alias | None:
    """An alias counts at the top, in the section of its setting, and in `training`, where Hugging Face has them all."""
    name, section = path[-1], path[0]
    alias = ALIASES.get(name)
    if len(path) == 1:
        return alias
    if len(path) > 2 or section not in SECTIONS:
        return None
    if name in SECTION_ALIASES.get(section, {}):
        return Alias(SECTION_ALIASES[section][name])
    return alias if alias and (section == "training" or alias.key.startswith(f"{section}.")) else None
