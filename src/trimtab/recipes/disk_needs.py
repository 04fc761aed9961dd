"""What a run will write at most, in bytes, from the plan and the settings: checkpoints, weights, logs, samples, export.

Made to be too large rather than too small; the tests hold it against the true bytes of runs of every recipe. It looks
at the base model's tokenizer files and at nothing else, and writes nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.facts import keeps_best
from trimtab.file_system import file_system_of, size_of
from trimtab.placement.profile import BYTES, ModelProfile, Workload
from trimtab.recipes.room_on_disk import FILES, Room
from trimtab.recipes.run_folder import RunFolder, default_folder
from trimtab.recipes.table import recipe_of

if TYPE_CHECKING:
    from trimtab.config.schema import Config
    from trimtab.placement import PlacementPlan
    from trimtab.recipes.planning import Planned

STATES = {
    **{"sgd": 4, "adagrad": 4, "adafactor": 4, "lion": 4, "lomo": 0, "adalomo": 4},
    **{"ademamix": 12, "grokadamw": 12, "adamw_anyprecision": 12},
}
"""Bytes that an optimizer keeps of each trained number, by how its name begins; Adam's two moments take 8."""
EXPORTED = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
_BLOCK = 4096
_BESIDE_WEIGHTS = 96 * 2**10
"""Of one checkpoint: arguments, scheduler, random states, adapter card, manifest."""
_EACH_RANK = 24 * 2**10
_EACH_TENSOR = 1600
"""Names and headers of a trained tensor, in the weights and three times in the optimizer's file."""
_EACH_LOG = 900
_EACH_REWARDED_LOG = 5000
_TOKEN_OF_VOCABULARY = 160
_SMALL_FILES = 2**20
"""Config, plan, data report, summary, samples, model card."""


def planned_room(config: Config, planned: Planned) -> Room:
    """For a run that is only planned: its data is not read yet."""
    run = RunFolder(Path(config.output_dir or default_folder(config)).expanduser())
    return room_for(config, planned.plan, planned.profile, planned.trained_tensors, run)


def room_for(
    config: Config,
    plan: PlacementPlan,
    profile: ModelProfile,
    tensors: int,
    run: RunFolder,
    rows: int | None = None,
) -> Room:
    """The estimate; `tensors` is how many are trained, `rows` those of the training data, where they are known."""
    work = recipe_of(config).workload(config, plan.kind == "cpu")
    trained = _trained_bytes(config, plan, profile, work)
    whole = (profile.parameters - profile.trainable) * BYTES[plan.weight_precision] + trained
    kept_weights = trained + _head(config, plan, profile) if config.method == "lora" else whole
    words = _processor_bytes(config, profile)
    steps, an_epoch = _steps(config, plan, rows)
    checkpoint = _BESIDE_WEIGHTS + plan.processes * _EACH_RANK + tensors * _EACH_TENSOR + FILES * _BLOCK
    if work.training:
        state = next((size for name, size in STATES.items() if config.training.optimizer.startswith(name)), 8)
        weights, optimizer = kept_weights, profile.trainable * state
        # Of a sharded run the trainer writes what it would load by itself, and the same once more for FSDP.
        copies = 2 if plan.strategy == "sharded" else 1
        checkpoint += copies * weights + optimizer + words + _logs(config, steps)
    else:
        weights, optimizer = trained, trained if work.anchors else 0
        checkpoint += weights + optimizer
    export = _export_bytes(config, profile, plan, words)
    kept = kept_weights + words + tensors * _EACH_TENSOR + FILES * _BLOCK
    return Room(
        folder=run.path,
        system=file_system_of(run.path),
        checkpoint=checkpoint,
        at_once=checkpoints_at_once(config, steps, an_epoch, loop=not work.training),
        kept=kept,
        export=export,
        beside=_SMALL_FILES
        + 2 * _logs(config, steps)
        + _samples(config)
        + 4 * 16 * (steps or 0) * work.lanes,
        there=size_of(run.checkpoints) + size_of(run.kept_folder(config)) if run.goes_on(config) else 0,
        largest=max(weights, optimizer, export, kept_weights) + tensors * _EACH_TENSOR,
    )


def checkpoints_at_once(config: Config, steps: int | None, an_epoch: int | None, *, loop: bool) -> int | None:
    """How many checkpoints lie in the folder while one is being written; None where all are kept, and not known."""
    training = config.training
    every = training.save_steps or training.eval_steps or an_epoch
    saves = None if every is None or steps is None else math.ceil(steps / every)
    if saves is None and training.max_steps is None and not (training.save_steps or training.eval_steps):
        saves = math.ceil(training.epochs)
    limit, best = training.save_total_limit, keeps_best(config)
    if limit is None:
        return None if saves is None else saves + 1  # an interrupt saves once more
    # A loop keeps the best beside the limit; a trainer counts it in, but never has fewer than it and the last.
    most = limit + best + 1 if loop else max(limit, 1 + best) + 1
    return most if saves is None else min(most, saves + 1)


def _steps(config: Config, plan: PlacementPlan, rows: int | None) -> tuple[int | None, int | None]:
    """Steps of the whole run and of one epoch; None where only the data tells."""
    training = config.training
    each = training.batch_size * training.gradient_accumulation_steps * plan.processes
    if rows is not None and config.recipe == "grpo":
        rows *= config.grpo.num_generations * config.grpo.num_iterations
    an_epoch = None if rows is None else max(1, math.ceil(rows / each))
    by_epochs = None if an_epoch is None else math.ceil(training.epochs * an_epoch)
    return training.max_steps or by_epochs, an_epoch


def _trained_bytes(config: Config, plan: PlacementPlan, profile: ModelProfile, work: Workload) -> int:
    """Adapters are fp32, and so is what has gradients; a model tuned whole without any stays as it was loaded."""
    each = 4 if work.training or config.method == "lora" else BYTES[plan.weight_precision]
    return profile.trainable * each


def _head(config: Config, plan: PlacementPlan, profile: ModelProfile) -> int:
    """PEFT writes a head that has an adapter whole, beside it."""
    targets = config.lora.targets
    named = targets if isinstance(targets, list) else [targets]
    held = any("lm_head" in name for name in named)
    return held * profile.vocabulary * profile.hidden * BYTES[plan.weight_precision]


def _export_bytes(config: Config, profile: ModelProfile, plan: PlacementPlan, words: int) -> int:
    if config.export.to is None:
        return 0
    own = "f16" if config.export.to != "merged" else "f32" if plan.weight_precision == "fp32" else "f16"
    # What stays in fp32 whatever is asked for: norms, and what the format cannot hold.
    return int(profile.parameters * EXPORTED[config.export.dtype or own] * 1.02) + words + 2**20


def _logs(config: Config, steps: int | None) -> int:
    each = _EACH_REWARDED_LOG if config.recipe == "grpo" else _EACH_LOG
    if config.recipe == "grpo":
        each += config.grpo.show_completions * 8 * config.data.max_length
    return each * math.ceil((steps or 0) / config.training.logging_steps + 2)


def _samples(config: Config) -> int:
    if config.recipe == "vision":
        return config.vision.show * 3 * 512**2
    if config.recipe == "voice":
        return config.voice.show * 5 * int(2 * 24_000 * config.voice.max_seconds) + 8 * 2**20
    return (len(config.samples.prompts) + config.samples.held_out) * config.samples.max_new_tokens * 16


def _processor_bytes(config: Config, profile: ModelProfile) -> int:
    """The tokenizer's files and what stands beside them, as the base model has them; else by the vocabulary."""
    from trimtab.models.load import model_source
    from trimtab.models.shape_names import is_shape

    guess = profile.vocabulary * _TOKEN_OF_VOCABULARY
    if is_shape(config.model.name):
        return guess
    folder: Any = Path(model_source(config.model))
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(config.model.name, "tokenizer.json", revision=config.model.revision)
        folder = Path(found).parent if isinstance(found, str) else None
    if folder is None or not (folder / "tokenizer.json").is_file():
        return guess
    names = ("token", "vocab", "merges", "chat_template", "special_", "added_", "preprocessor", "processor")
    files = [file for file in folder.iterdir() if file.name.startswith(names) and file.is_file()]
    total: int = sum(file.stat().st_size for file in files)
    return total * 11 // 10 + 64 * 2**10
