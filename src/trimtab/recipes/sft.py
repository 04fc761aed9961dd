"""Supervised fine-tuning on answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan, return_outputs
from trimtab.placement.speed import ANY_HEAD, PARTS
from trimtab.recipes.fullest_rows import text_rows
from trimtab.recipes.look import rows_answered
from trimtab.recipes.outcomes import held_out_loss
from trimtab.recipes.recipe import Job, Need, Prepared, Recipe, Say, rows_at_once

if TYPE_CHECKING:
    from trimtab.fast.rows import Means
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
    return Prepared(tokenizer, data.train, data.eval, data.report, length=lambda row: len(row["input_ids"]))


def _build(job: Job) -> TrainerDriver:
    from transformers import TrainingArguments

    from trimtab.data.collate import Collate
    from trimtab.data.packing import packed
    from trimtab.fast.answers import use_answers
    from trimtab.fast.rows import lay_rows
    from trimtab.recipes.sft_trainer import SftTrainer
    from trimtab.recipes.trainer_driver import TrainerDriver, trainer_arguments

    config, plan, prepared = job.config, job.plan, job.prepared
    arguments = TrainingArguments(
        **trainer_arguments(config, plan, job.run, evaluates=prepared.eval is not None),
        train_sampling_strategy="group_by_length" if config.training.group_by_length else "random",
        remove_unused_columns=False,
    )
    means, against = means_of(plan), told_against(plan)
    laid = lay_rows(
        job.model, means, packing=config.data.packing, longest=config.data.max_length, against=against
    )
    if laid.layout != "rows" and against is None:
        job.say(f"speed: {laid.reason}")
    way = use_answers(job.model, means, plain=config.speed.head == "plain")
    if way == "own" and plan.speed.head == "chunked":
        job.say("speed: the loss is made of the model's own logits, for they are more than its head makes")
    for part, found in (("padding", laid.layout == "rows"), ("head", way != "own")):
        if part in plan.speed.demanded and not found:
            why = (
                laid.reason
                if part == "padding"
                else "its logits are more than its head makes of its hidden states"
            )
            raise RequestError.of(f"speed.{part} was asked for", why, f"set speed.{part}: auto")
    if config.data.packing:
        job.prepared = replace(prepared, train=packed(prepared.train, config.data.max_length))
    collate = Collate(laid.layout, prepared.processor.pad_token_id, shares=laid.shares)
    driver = TrainerDriver(job, SftTrainer, arguments, data_collator=collate)
    if plan.strategy == "split":
        return_outputs(job.model)
    return driver


def told_against(plan: PlacementPlan) -> str | None:
    """Why the plan has rows padded; None where they are to lie end to end."""
    return None if plan.speed.padding == "none" else plan.reasons.get("speed.padding", "the plan says so")


def means_of(plan: PlacementPlan) -> Means:
    """What the plan has the model computed with, for those that try it."""
    import torch

    from trimtab.fast.rows import Means
    from trimtab.models.load import shapes_only
    from trimtab.virtual.state import machine

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision)
    rehearsed = machine() is not None
    on_gpu = plan.kind == "cuda" and (not rehearsed or shapes_only())
    gpu = torch.device(plan.device) if on_gpu else None
    return Means(torch.device(plan.load_device), gpu, half, tried=not shapes_only(), rehearsed=rehearsed)


SFT = Recipe(
    name="sft",
    words=lambda config: "supervised fine-tuning",
    workload=rows_at_once,
    need=_need,
    prepare=_prepare,
    build=_build,
    outcome=held_out_loss,
    look=rows_answered,
    fast=frozenset({*PARTS, ANY_HEAD}),
    fullest=text_rows,
)
