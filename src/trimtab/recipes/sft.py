"""Supervised fine-tuning with TRL's SFTTrainer: load, adapt, verify, train, keep.

The device in force is the plan's: in the model, in the trainer's arguments and in the batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer

from trimtab.config import Config, keeps_best
from trimtab.data import PreparedData, prepare_data
from trimtab.errors import TrimtabError
from trimtab.models import load_model, load_tokenizer
from trimtab.models.adapters import add_lora
from trimtab.models.sparse_head import use_sparse_head
from trimtab.monitor import MonitorCallback
from trimtab.monitor.trackers import check_trackers
from trimtab.placement import (
    PlacementGuard,
    PlacementPlan,
    bare_model,
    bind_arguments,
    prepare_process,
    return_outputs,
    trainer_options,
    verify,
)
from trimtab.recipes.interrupt import GracefulStop
from trimtab.recipes.run_folder import RunFolder, checkpoint_to_resume
from trimtab.recipes.trained import first_answers, keep, samples, train

Say = Callable[[str], None]


def run_sft(config: Config, plan: PlacementPlan, run: RunFolder, say: Say = print) -> dict[str, Any]:
    """Train as the config says where the plan says; returns the summary that is also kept in the run's folder."""
    prepare_process(plan)
    set_seed(config.seed)
    checkpoint = checkpoint_to_resume(config, run)
    check_trackers(config.monitor.report_to)

    tokenizer = load_tokenizer(config.model)
    data = prepare_data(config.data, tokenizer, config.seed)
    for line in data.report.lines():
        say(line)

    model: Any = load_model(config.model, plan)
    say(f"model {config.model.name} on {', '.join(plan.devices)}, weights {plan.weight_precision}")
    if config.method == "lora":
        model = add_lora(model, config.lora)
    verify(model, plan)

    arguments = sft_arguments(config, plan, run, data)
    bind_arguments(arguments, plan)
    main = arguments.process_index == 0
    monitor = MonitorCallback(config.monitor, run.path, plan.device, devices=plan.devices)
    stop = GracefulStop(monitor.say)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=tokenizer,
        callbacks=[monitor, PlacementGuard(plan, monitor.say if main else None), stop],
    )
    trainer.remove_callback(PrinterCallback)
    if plan.kind == "cpu":
        use_sparse_head(bare_model(model))
    if plan.strategy == "split":
        return_outputs(model)

    if main:
        run.write_request(config, plan, data.report.as_dict())

    answers_before = first_answers(trainer, config, plan, run, resumed=checkpoint is not None)
    try:
        summary = train(trainer, config, plan, run, data, checkpoint, monitor, stop)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(config, plan) from error
    if not stop.ended_early:
        summary["eval_loss"] = {"before": _first_eval_loss(trainer), "after": _final_eval_loss(trainer)}
        summary["samples"] = samples(trainer, config, plan, answers_before)
        keep(trainer, config, plan, run, summary)
    if main:
        run.write_json("summary.json", summary)
    if stop.ended_early:
        # The first process that leaves with an error has the launcher end the others, written or not.
        trainer.accelerator.wait_for_everyone()
    return summary


def sft_arguments(config: Config, plan: PlacementPlan, run: RunFolder, data: PreparedData) -> SFTConfig:
    """TRL's settings from ours; device and precision come from the plan alone."""
    training = config.training
    evaluates = data.eval is not None
    rhythm = "steps" if training.eval_steps else "epoch"
    saves = "steps" if training.save_steps or training.eval_steps else "epoch"
    keep_best = keeps_best(config) and evaluates
    return SFTConfig(
        output_dir=str(run.checkpoints),
        num_train_epochs=training.epochs,
        max_steps=training.max_steps or -1,
        per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.eval_batch_size or training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        gradient_checkpointing=training.gradient_checkpointing,
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler,
        warmup_steps=training.warmup_ratio if training.warmup_steps is None else training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        optim=training.optimizer,
        train_sampling_strategy="group_by_length" if training.group_by_length else "random",
        # Inside train(): evaluate() before it would leave the model unwrapped, and ranks would never meet.
        eval_on_start=evaluates,
        eval_strategy=rhythm if evaluates else "no",
        eval_steps=training.eval_steps,
        save_strategy=saves,
        save_steps=training.save_steps or training.eval_steps or 500,
        save_total_limit=training.save_total_limit,
        load_best_model_at_end=keep_best,
        metric_for_best_model="eval_loss" if keep_best else None,
        greater_is_better=False if keep_best else None,
        logging_steps=training.logging_steps,
        logging_first_step=True,
        # A NaN loss must be seen, not replaced by the running mean.
        logging_nan_inf_filter=False,
        dataloader_num_workers=training.dataloader_workers,
        max_length=config.data.max_length,
        packing=config.data.packing,
        eval_packing=False,
        # Rows arrive with input_ids and labels; only packing still needs TRL's preparation.
        dataset_kwargs=None if config.data.packing else {"skip_prepare_dataset": True},
        report_to=config.monitor.report_to or "none",
        disable_tqdm=True,
        seed=config.seed,
        data_seed=config.seed,
        remove_unused_columns=True,
        push_to_hub=False,
        **trainer_options(plan),
    )


def _first_eval_loss(trainer: SFTTrainer) -> float | None:
    """Held-out loss before the first step. The trainer's history keeps it, also across a resume."""
    return next(
        (e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e and e["step"] == 0), None
    )


def _final_eval_loss(trainer: SFTTrainer) -> float | None:
    """Held-out loss of the weights that are kept; evaluated again only where the trainer did not just do so."""
    if trainer.args.load_best_model_at_end and trainer.state.best_metric is not None:
        return trainer.state.best_metric
    last = next((entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry), None)
    if last is not None and last["step"] == trainer.state.global_step:
        return last["eval_loss"]
    return trainer.evaluate()["eval_loss"] if trainer.eval_dataset is not None else None


def _out_of_memory(config: Config, plan: PlacementPlan) -> TrimtabError:
    return TrimtabError(
        f"out of memory on {plan.device} with training.batch_size={config.training.batch_size}, "
        f"data.max_length={config.data.max_length}\n"
        "  why: weights, gradients, optimizer and activations did not fit (the plan's figure is an estimate)\n"
        "  change: halve training.batch_size and double training.gradient_accumulation_steps, set "
        "training.gradient_checkpointing=true, or lower data.max_length"
    )
