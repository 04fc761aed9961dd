"""Supervised fine-tuning on answers, with TRL's SFTTrainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.config.schema import Config
from trimtab.placement import PlacementPlan, bare_model, return_outputs
from trimtab.placement.speed import PARTS
from trimtab.recipes.look import rows_answered
from trimtab.recipes.outcomes import held_out_loss
from trimtab.recipes.recipe import Job, Need, Prepared, Recipe, Say, rows_at_once

if TYPE_CHECKING:
    from trimtab.recipes.trainer_driver import TrainerDriver


def _need(config: Config) -> Need:
    return Need(
        {"training.batch_size": config.training.batch_size, "data.max_length": config.data.max_length},
        "weights, gradients, optimizer and activations",
        [
            "halve training.batch_size and double training.gradient_accumulation_steps",
            "set training.gradient_checkpointing=true",
            "lower data.max_length",
        ],
    )


def _prepare(config: Config, plan: PlacementPlan, say: Say) -> Prepared:
    from trimtab.data.prepare import prepare_data
    from trimtab.models import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    data = prepare_data(config.data, tokenizer, config.seed)
    for line in data.report.lines():
        say(line)
    return Prepared(tokenizer, data.train, data.eval, data.report)


def _build(job: Job) -> TrainerDriver:
    from trl import SFTConfig, SFTTrainer

    from trimtab.models.sparse_head import use_sparse_head
    from trimtab.recipes.trainer_driver import TrainerDriver, trainer_arguments

    config, plan = job.config, job.plan
    arguments = SFTConfig(
        **trainer_arguments(config, plan, job.run, evaluates=job.prepared.eval is not None),
        train_sampling_strategy="group_by_length" if config.training.group_by_length else "random",
        max_length=config.data.max_length,
        packing=config.data.packing,
        eval_packing=False,
        # Rows arrive with input_ids and labels; only packing still needs TRL's preparation.
        dataset_kwargs=None if config.data.packing else {"skip_prepare_dataset": True},
    )
    driver = TrainerDriver(job, SFTTrainer, arguments)
    if plan.kind == "cpu":
        use_sparse_head(bare_model(job.model))
    if plan.strategy == "split":
        return_outputs(job.model)
    return driver


SFT = Recipe(
    name="sft",
    words=lambda config: "supervised fine-tuning",
    workload=rows_at_once,
    need=_need,
    prepare=_prepare,
    build=_build,
    outcome=held_out_loss,
    look=rows_answered,
    fast=frozenset(PARTS),
)
