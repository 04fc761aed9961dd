"""What a change of each setting means for a run that goes on from a checkpoint. A setting in no class is refused.

Only sorts; what was and what is now is compared in recipes/begun_with.py. `tests/config/test_going_on.py` fails for a
setting of the schema that is in no class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from trimtab.config.keys import RECIPE_SECTIONS, has_effect
from trimtab.config.schema import Config

Change = Literal["free", "computed", "length", "batch", "placed", "content", "held_out", "kept"]
"""free: of no weight (what is shown, saved, measured). computed: the same by another way, equal up to rounding.
length: where the run ends. batch: rows of a step, whose product counts. placed: judged by the plan that comes of it.
content: judged by what is read, not by its name. held_out: of no weight, but for which checkpoint is the best.
kept: the run would be another from the first step on."""

_BY_CLASS: dict[Change, str] = {
    "free": """
        training.eval_batch_size training.effective_batch_size training.eval_steps training.save_steps
        training.save_total_limit training.keep_best training.logging_steps training.dataloader_workers
        training.resume training.resume_changed output_dir overwrite model.trust_remote_code
        monitor.progress monitor.slow_after_seconds monitor.stuck_after_seconds monitor.stop_on_nonfinite
        monitor.report_to monitor.start_stuck_after_seconds monitor.on_stuck monitor.restarts
        training.halve_batch_on_oom samples.prompts samples.max_new_tokens samples.held_out
        export.to export.dtype export.name
        grpo.unfenced grpo.show_completions grpo.vllm_server_base_url grpo.vllm_memory
        vision.metric vision.show vision.unmask_steps
        voice.check_clips voice.temperature voice.top_p voice.top_k voice.show
    """,
    "computed": """
        model.attn_implementation training.gradient_checkpointing model_parallel processes
        zeroth.lanes grpo.use_vllm grpo.vllm_mode
        speed.adapters speed.head speed.compile speed.padding speed.kernels speed.activation_memory_budget
    """,
    "length": "training.epochs training.max_steps",
    "batch": "training.batch_size training.gradient_accumulation_steps",
    "placed": "device precision sharding",
    "content": """
        model.name model.revision model.chat_template
        data.source data.media_root data.format data.columns data.eval_fraction data.max_rows data.too_long
        data.bad_rows data.keep_duplicates data.split data.subset data.endpoint_url
        vision.dataset vision.max_pixels voice.min_seconds voice.max_seconds voice.silence voice.clipping
    """,
    "held_out": "data.eval_source",
    "kept": """
        recipe method seed model.ignore_weights model.quantize
        data.max_length data.packing data.train_on
        lora.r lora.alpha lora.rslora lora.dora lora.dropout lora.targets
        training.learning_rate training.lr_scheduler training.warmup_ratio training.warmup_steps
        training.weight_decay training.max_grad_norm training.optimizer training.group_by_length
        grpo.reward grpo.chat grpo.system grpo.prompt grpo.num_generations grpo.temperature grpo.top_p grpo.top_k
        grpo.max_prompt_length grpo.max_completion_length grpo.beta grpo.loss_type grpo.epsilon grpo.num_iterations
        grpo.scale_rewards grpo.mask_truncated grpo.answer_column grpo.pattern grpo.target_length grpo.tests_column
        grpo.test_seconds grpo.test_megabytes
        zeroth.method zeroth.task zeroth.template zeroth.labels zeroth.label_column zeroth.answer zeroth.eps
        zeroth.queries zeroth.rounding zeroth.interval zeroth.projection_eps zeroth.projection_step
        zeroth.projection_clip zeroth.projection_iterations zeroth.projection_roles
        vision.objective vision.check_pictures vision.views vision.mask_token vision.answer_length
        shirg.size shirg.crop shirg.centre_x shirg.centre_y shirg.pool shirg.keep shirg.attention shirg.similarity
        shirg.edges shirg.distance shirg.radial shirg.radial_sigma shirg.noise shirg.merge shirg.token_dropout
        voice.codec voice.system voice.scene
    """,
}
CHANGES: Mapping[str, Change] = {key: kind for kind, keys in _BY_CLASS.items() for key in keys.split()}
"""Every setting by its dotted key."""


def change_of(key: str, was: Config, now: Config) -> Change:
    """What another value of the setting means, between these two requests of one run."""
    if not _takes_part(key, was) and not _takes_part(key, now):
        return "free"
    return CHANGES.get(key, "kept")


def _takes_part(key: str, config: Config) -> bool:
    """Whether the setting reaches this run at all: not one of another recipe, or of a method that is not used."""
    section = key.partition(".")[0]
    if section in RECIPE_SECTIONS:
        return RECIPE_SECTIONS[section].recipe == config.recipe
    if section == "shirg":
        return config.recipe == "vision" and config.vision.views == "shirg"
    if section == "lora":
        return config.method == "lora" and has_effect(config, key)
    if key == "training.epochs":
        return config.training.max_steps is None
    if key == "training.warmup_ratio":
        return config.training.warmup_steps is None
    return has_effect(config, key)
