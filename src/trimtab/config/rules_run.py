"""What must hold between the settings of any run: data, schedule, evaluation, checkpoints, devices.

Looks at nothing but the settings; whether the machine can meet them is for placement/ to say.
"""

from __future__ import annotations

from trimtab.config.facts import evaluates, is_given, saves_fall_on_evaluations, value_of_setting
from trimtab.config.rule import Conflict, Rules
from trimtab.config.schema import Config

RULES = Rules()


@RULES.reading("data.packing", "training.group_by_length")
def _packing_and_grouping(config: Config) -> Conflict | None:
    if not (config.data.packing and config.training.group_by_length):
        return None
    return Conflict(
        "training.group_by_length",
        "cannot go with data.packing: packed sequences are all of one length",
        "remove training.group_by_length, or set data.packing: false",
    )


@RULES.reading("training.keep_best", "data.eval_fraction", "data.eval_source")
def _best_of_nothing(config: Config) -> Conflict | None:
    asked = config.training.keep_best and is_given(config, "training.keep_best")
    if not asked or evaluates(config):
        return None
    return Conflict(
        "training.keep_best",
        "needs a held-out loss, but data.eval_fraction is 0 and there is no data.eval_source",
        "set data.eval_fraction: 0.1 or data.eval_source, or training.keep_best: false",
    )


@RULES.reading(
    "training.keep_best",
    "training.eval_steps",
    "training.save_steps",
    "data.eval_fraction",
    "data.eval_source",
)
def _best_between_evaluations(config: Config) -> Conflict | None:
    if not config.training.keep_best or not evaluates(config) or saves_fall_on_evaluations(config):
        return None
    eval_steps, save_steps = config.training.eval_steps, config.training.save_steps
    often = f"evaluates every {eval_steps} steps" if eval_steps else "evaluates once an epoch"
    reason = f"needs an evaluation at each checkpoint, but the run {often} and saves every {save_steps} steps"
    change = (
        f"set training.eval_steps: {save_steps}, remove training.save_steps, or set training.keep_best: false"
    )
    if is_given(config, "training.keep_best"):
        return Conflict("training.keep_best", reason, change)
    return Conflict("training.keep_best", f"(the default) is not applied: it {reason}", change, warning=True)


_EVALUATION = ("training.eval_steps", "training.eval_batch_size", "samples.held_out")


@RULES.reading(*_EVALUATION, "data.eval_fraction", "data.eval_source")
def _evaluation_of_nothing(config: Config) -> Conflict | None:
    set_keys = [key for key in _EVALUATION if value_of_setting(config, key)]
    if evaluates(config) or not set_keys:
        return None
    return Conflict(
        set_keys[0],
        "has no effect: data.eval_fraction is 0 and there is no data.eval_source",
        "remove it, or set data.eval_fraction: 0.1",
        warning=True,
    )


@RULES.reading("data.eval_fraction", "data.eval_source")
def _two_held_out_parts(config: Config) -> Conflict | None:
    held_out = is_given(config, "data.eval_fraction") and config.data.eval_fraction > 0
    if config.data.eval_source is None or not held_out:
        return None
    return Conflict(
        "data.eval_fraction",
        "has no effect: data.eval_source is what the run evaluates on",
        "remove one of the two",
        warning=True,
    )


@RULES.reading("training.warmup_ratio", "training.warmup_steps")
def _two_warmups(config: Config) -> Conflict | None:
    training = config.training
    ratio_asked = is_given(config, "training.warmup_ratio") and training.warmup_ratio > 0
    if training.warmup_steps is None or not ratio_asked:
        return None
    return Conflict(
        "training.warmup_ratio",
        "cannot go with training.warmup_steps: both set the length of the warm-up",
        "remove one of the two",
    )


@RULES.reading("training.lr_scheduler", "training.warmup_ratio", "training.warmup_steps")
def _warmup_of_a_constant(config: Config) -> Conflict | None:
    training = config.training
    if training.lr_scheduler != "constant":
        return None
    key = "training.warmup_steps" if training.warmup_steps else "training.warmup_ratio"
    if not is_given(config, key) or not (training.warmup_steps or training.warmup_ratio):
        return None
    return Conflict(
        key,
        "has no effect with training.lr_scheduler: constant",
        "remove it, or set training.lr_scheduler: constant_with_warmup",
        warning=True,
    )


@RULES.reading("training.epochs", "training.max_steps")
def _epochs_and_steps(config: Config) -> Conflict | None:
    if config.training.max_steps is None or not is_given(config, "training.epochs"):
        return None
    return Conflict(
        "training.epochs",
        "has no effect: training.max_steps says when the run ends",
        "remove one of the two",
        warning=True,
    )


@RULES.reading("training.resume", "overwrite")
def _resume_and_overwrite(config: Config) -> Conflict | None:
    if not (config.training.resume and config.overwrite):
        return None
    return Conflict(
        "overwrite",
        "cannot go with training.resume: it removes the checkpoint that the run would go on from",
        "remove overwrite to go on, or training.resume to start again",
    )


@RULES.reading("training.resume", "output_dir")
def _resume_from_nowhere(config: Config) -> Conflict | None:
    if config.training.resume is not True or config.output_dir is not None:
        return None
    return Conflict(
        "training.resume",
        "looks for a checkpoint in output_dir, which is not set: each run then gets a new folder",
        "set output_dir to the earlier run's folder, or training.resume to a checkpoint's path",
    )


@RULES.reading("overwrite", "output_dir")
def _overwrite_of_nothing(config: Config) -> Conflict | None:
    if not config.overwrite or config.output_dir is not None:
        return None
    return Conflict(
        "overwrite",
        "has no effect without output_dir: each run then gets a new folder",
        "remove it, or set output_dir",
        warning=True,
    )


@RULES.reading("method", "lora")
def _lora_unused(config: Config) -> Conflict | None:
    if config.method != "full" or not (is_given(config, "lora") or config.lora.model_fields_set):
        return None
    return Conflict("lora", "has no effect with method: full", "remove it, or set method: lora", warning=True)


@RULES.reading("export.to", "export.dtype")
def _quantised_transformers_folder(config: Config) -> Conflict | None:
    if config.export.to != "merged" or config.export.dtype != "q8_0":
        return None
    return Conflict(
        "export.dtype",
        "cannot go with export.to: merged: quantised formats belong to GGUF files",
        "set export.dtype: f32, f16 or bf16, or export.to: gguf",
    )


@RULES.reading("export.to", "export.dtype", "export.name")
def _export_of_nothing(config: Config) -> Conflict | None:
    given = [key for key in ("export.dtype", "export.name") if value_of_setting(config, key) is not None]
    if config.export.to is not None or not given:
        return None
    return Conflict(given[0], "has no effect without export.to", "set export.to, or remove it", warning=True)


@RULES.reading("model_parallel", "device")
def _split_on_one_device(config: Config) -> Conflict | None:
    if config.model_parallel is not True or config.device in ("auto", "cuda"):
        return None
    return Conflict(
        "model_parallel",
        f"splits the model over several GPUs, but device is {config.device}",
        "set device: cuda, or model_parallel: null",
    )


@RULES.reading("model_parallel", "sharding")
def _split_and_shard(config: Config) -> Conflict | None:
    if not (config.model_parallel and config.sharding):
        return None
    return Conflict(
        "model_parallel",
        "cannot go with sharding: one splits the model inside a process, the other over processes",
        "set one of them to false",
    )


@RULES.reading("model_parallel", "processes")
def _split_in_many_processes(config: Config) -> Conflict | None:
    if not config.model_parallel or config.processes is None or config.processes == 1:
        return None
    return Conflict(
        "model_parallel",
        f"needs all GPUs in one process, but processes is {config.processes}",
        "set processes: 1, or model_parallel: false",
    )


@RULES.reading("processes", "device")
def _many_processes_on_one_gpu(config: Config) -> Conflict | None:
    if config.processes is None or config.processes == 1 or ":" not in config.device:
        return None
    return Conflict(
        "processes",
        f"gives each process a GPU of its own, but device names one: {config.device}",
        "set device: cuda, or processes: 1",
    )


@RULES.reading("precision", "device")
def _half_on_cpu(config: Config) -> Conflict | None:
    if config.precision != "fp16" or config.device != "cpu":
        return None
    return Conflict(
        "precision",
        "fp16 training needs a GPU's gradient scaler, but device is cpu",
        "set precision: auto (fp32 on the CPU), or device: cuda",
    )


@RULES.reading("monitor.slow_after_seconds", "monitor.stuck_after_seconds")
def _slow_after_stuck(config: Config) -> Conflict | None:
    slow, stuck = config.monitor.slow_after_seconds, config.monitor.stuck_after_seconds
    if slow <= stuck:
        return None
    return Conflict(
        "monitor.slow_after_seconds",
        f"must not be above monitor.stuck_after_seconds ({stuck:g}): a run is slow before it is stuck",
        f"set it to {stuck:g} or less",
    )


@RULES.reading("data.endpoint_url", "data.source", "data.eval_source")
def _endpoint_unused(config: Config) -> Conflict | None:
    sources = [config.data.source, config.data.eval_source or ""]
    if config.data.endpoint_url is None or any(source.startswith("s3://") for source in sources):
        return None
    return Conflict(
        "data.endpoint_url",
        "has no effect: the data do not come from s3://",
        "remove it, or set data.source: s3://bucket/key",
        warning=True,
    )
