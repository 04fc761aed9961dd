"""What must hold between the settings of any run: data, schedule, evaluation, checkpoints, devices, export.

Looks at nothing but the settings; whether the machine can meet them is for placement/ to say.
"""

from __future__ import annotations

import os

from trimtab.config.facts import evaluates, is_given, kernel_home, saves_fall_on_evaluations, value_of_setting
from trimtab.config.rule import Conflict, Rules
from trimtab.config.schema import Config

RULES = Rules()
_HELD_OUT = "data.eval_fraction data.eval_source"

RULES.blame(
    "model.trust_remote_code model.name",
    lambda c: c.model.trust_remote_code and c.model.name not in c.model.trust_remote_code,
    "does not name the model, {c.model.name}: it is that model's code that would run",
    "name the repository or folder as model.name has it, or remove it",
)
RULES.blame(
    "model.revision model.trust_remote_code",
    lambda c: c.model.trust_remote_code and c.model.revision is None and not os.path.isdir(c.model.name),
    "is not set: the code of {c.model.name} is whatever its repository holds on the day of each run",
    "set it to the commit that you have read",
    warning=True,
)
RULES.blame(
    "model.quantize method",
    lambda c: c.model.quantize and c.method == "full",
    "holds frozen weights in four bits, but method: full trains them all",
    "set method: lora, or remove model.quantize",
)
RULES.blame(
    "model.quantize recipe",
    lambda c: c.model.quantize and c.recipe == "zeroth_order",
    "is for recipes that train by gradients: zeroth-order steps hold no more than the weights themselves",
    "remove it, or choose another recipe",
)
RULES.blame(
    "model.quantize device",
    lambda c: c.model.quantize and c.device == "mps",
    "has not been tried on Apple GPUs",
    "remove it, or set device: cpu or cuda",
)
RULES.blame(
    "model.quantize sharding",
    lambda c: c.model.quantize and c.sharding,
    "cannot go with sharding: FSDP shards parameters of floating point, and packed weights are bytes",
    "set sharding: false (each GPU then holds the four-bit model whole), or remove model.quantize",
)
RULES.blame(
    "model.quantize grpo.use_vllm recipe",
    lambda c: c.model.quantize and c.recipe == "grpo" and c.grpo.use_vllm,
    "cannot go with grpo.use_vllm: vLLM is given merged weights, and an adapter is not merged into four bits",
    "set grpo.use_vllm: false, or remove model.quantize",
)
RULES.blame(
    "training.group_by_length data.packing",
    lambda c: c.data.packing and c.training.group_by_length,
    "cannot go with data.packing: packed sequences are all of one length",
    "remove training.group_by_length, or set data.packing: false",
)
RULES.blame(
    f"training.keep_best {_HELD_OUT}",
    lambda c: c.training.keep_best and is_given(c, "training.keep_best") and not evaluates(c),
    "needs a held-out loss, but data.eval_fraction is 0 and there is no data.eval_source",
    "set data.eval_fraction: 0.1 or data.eval_source, or training.keep_best: false",
)
RULES.blame(
    "data.eval_fraction data.eval_source",
    lambda c: (
        c.data.eval_source is not None and is_given(c, "data.eval_fraction") and c.data.eval_fraction > 0
    ),
    "has no effect: data.eval_source is what the run evaluates on",
    "remove one of the two",
    warning=True,
)
RULES.blame(
    "training.warmup_ratio training.warmup_steps",
    lambda c: (
        c.training.warmup_steps is not None
        and is_given(c, "training.warmup_ratio")
        and c.training.warmup_ratio > 0
    ),
    "cannot go with training.warmup_steps: both set the length of the warm-up",
    "remove one of the two",
)
RULES.blame(
    "training.epochs training.max_steps",
    lambda c: c.training.max_steps is not None and is_given(c, "training.epochs"),
    "has no effect: training.max_steps says when the run ends",
    "remove one of the two",
    warning=True,
)
RULES.blame(
    "overwrite training.resume",
    lambda c: c.training.resume and c.overwrite,
    "cannot go with training.resume: it moves aside the checkpoint that the run would go on from",
    "remove overwrite to go on, or training.resume to start again",
)
RULES.blame(
    "training.resume output_dir",
    lambda c: c.training.resume is True and c.output_dir is None,
    "looks for a checkpoint in output_dir, which is not set: each run then gets a new folder",
    "set output_dir to the earlier run's folder, or training.resume to a checkpoint's path",
)
RULES.blame(
    "overwrite output_dir",
    lambda c: c.overwrite and c.output_dir is None,
    "has no effect without output_dir: each run then gets a new folder",
    "remove it, or set output_dir",
    warning=True,
)
RULES.blame(
    "lora method",
    lambda c: c.method == "full" and (is_given(c, "lora") or c.lora.model_fields_set),
    "has no effect with method: full",
    "remove it, or set method: lora",
    warning=True,
)
RULES.blame(
    "export.dtype export.to",
    lambda c: c.export.to == "merged" and c.export.dtype == "q8_0",
    "cannot go with export.to: merged: quantised formats belong to GGUF files",
    "set export.dtype: f32, f16 or bf16, or export.to: gguf",
)
RULES.blame(
    "model_parallel device",
    lambda c: c.model_parallel is True and c.device not in ("auto", "cuda"),
    "splits the model over several GPUs, but device is {c.device}",
    "set device: cuda, or model_parallel: null",
)
RULES.blame(
    "model_parallel sharding",
    lambda c: c.model_parallel and c.sharding,
    "cannot go with sharding: one splits the model inside a process, the other over processes",
    "set one of them to false",
)
RULES.blame(
    "model_parallel processes",
    lambda c: c.model_parallel and c.processes not in (None, 1),
    "needs all GPUs in one process, but processes is {c.processes}",
    "set processes: 1, or model_parallel: false",
)
RULES.blame(
    "processes device",
    lambda c: c.processes not in (None, 1) and ":" in c.device,
    "gives each process a GPU of its own, but device names one: {c.device}",
    "set device: cuda, or processes: 1",
)
RULES.blame(
    "precision device",
    lambda c: c.precision == "fp16" and c.device == "cpu",
    "fp16 training needs a GPU's gradient scaler, but device is cpu",
    "set precision: auto (fp32 on the CPU), or device: cuda",
)
RULES.blame(
    "monitor.slow_after_seconds monitor.stuck_after_seconds",
    lambda c: c.monitor.slow_after_seconds > c.monitor.stuck_after_seconds,
    "must not be above monitor.stuck_after_seconds ({c.monitor.stuck_after_seconds:g}): "
    "a run is slow before it is stuck",
    "set it to {c.monitor.stuck_after_seconds:g} or less",
)
RULES.blame(
    "data.endpoint_url data.source data.eval_source",
    lambda c: (
        c.data.endpoint_url is not None
        and not any(source.startswith("s3://") for source in (c.data.source, c.data.eval_source or ""))
    ),
    "has no effect: the data do not come from s3://",
    "remove it, or set data.source: s3://bucket/key",
    warning=True,
)


@RULES.reading("training.keep_best", "training.eval_steps", "training.save_steps", *_HELD_OUT.split())
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


@RULES.reading("training.effective_batch_size", "training.batch_size", "training.gradient_accumulation_steps")
def _no_number_of_processes(config: Config) -> Conflict | None:
    """How many processes there are is known at the launch; what none of them can give, before it."""
    training = config.training
    each = training.batch_size * training.gradient_accumulation_steps
    if training.effective_batch_size is None or training.effective_batch_size % each == 0:
        return None
    return Conflict(
        "training.effective_batch_size",
        f"is {training.effective_batch_size}, but each process brings {training.batch_size} × "
        f"{training.gradient_accumulation_steps} = {each} rows a step (training.batch_size × "
        "training.gradient_accumulation_steps): no number of processes makes that of it",
        f"set it to a multiple of {each}, or change one of the two",
    )


_EVALUATION = ("training.eval_steps", "training.eval_batch_size", "samples.held_out")


@RULES.reading(*_EVALUATION, *_HELD_OUT.split())
def _evaluation_of_nothing(config: Config) -> Conflict | None:
    why = "has no effect: data.eval_fraction is 0 and there is no data.eval_source"
    given = _first_set(config, *_EVALUATION)
    if evaluates(config) or given is None:
        return None
    return Conflict(given, why, "remove it, or set data.eval_fraction: 0.1", warning=True)


@RULES.reading("export.to", "export.dtype", "export.name")
def _export_of_nothing(config: Config) -> Conflict | None:
    given = _first_set(config, "export.dtype", "export.name")
    if config.export.to is not None or given is None:
        return None
    return Conflict(given, "has no effect without export.to", "set export.to, or remove it", warning=True)


@RULES.reading("training.lr_scheduler", "training.warmup_ratio", "training.warmup_steps")
def _warmup_of_a_constant(config: Config) -> Conflict | None:
    training = config.training
    key = "training.warmup_steps" if training.warmup_steps else "training.warmup_ratio"
    warms_up = is_given(config, key) and (training.warmup_steps or training.warmup_ratio)
    if training.lr_scheduler != "constant" or not warms_up:
        return None
    change = "remove it, or set training.lr_scheduler: constant_with_warmup"
    return Conflict(key, "has no effect with training.lr_scheduler: constant", change, warning=True)


def _first_set(config: Config, *keys: str) -> str | None:
    """The first of these that is neither null nor 0."""
    return next((key for key in keys if value_of_setting(config, key)), None)


RULES.blame(
    "model.attn_implementation model.trust_remote_code",
    lambda c: (
        "/" in (c.model.attn_implementation or "")
        and kernel_home(c.model.attn_implementation or "") not in c.model.trust_remote_code
    ),
    "names a kernel on the hub: code that would be fetched and run here",
    "write sdpa, or read that code and, if you trust it, add its repository to model.trust_remote_code",
)
