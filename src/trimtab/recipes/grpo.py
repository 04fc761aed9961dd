"""Reinforcement learning on rewards (GRPO) with TRL: load, adapt, verify, check, train, keep.

The device in force is the plan's, on one device, in one process over several GPUs, or in several processes. A reward
that breaks its promise ends the run; no result is ever made up in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PrinterCallback, set_seed
from trl import GRPOConfig

from trimtab.config import Config, keeps_best
from trimtab.config.defaults import with_recipe_defaults
from trimtab.data.prompts import prompt_limit
from trimtab.errors import TrimtabError
from trimtab.models import load_model
from trimtab.models.adapters import add_lora
from trimtab.monitor import MonitorCallback
from trimtab.monitor.trackers import check_trackers
from trimtab.placement import (
    PlacementGuard,
    PlacementPlan,
    bind_arguments,
    prepare_process,
    trainer_options,
    verify,
)
from trimtab.recipes.grpo_check import Checked, dry_generation, model_context, preflight
from trimtab.recipes.grpo_trainer import PlacedGRPOTrainer
from trimtab.recipes.interrupt import GracefulStop
from trimtab.recipes.run_folder import RunFolder, checkpoint_to_resume
from trimtab.recipes.trained import first_answers, keep, samples, train

Say = Callable[[str], None]


def run_grpo(config: Config, plan: PlacementPlan, run: RunFolder, say: Say = print) -> dict[str, Any]:
    """Train as the config says where the plan says; returns the summary that is also kept in the run's folder."""
    prepare_process(plan)
    config, _ = with_recipe_defaults(config)
    set_seed(config.seed)
    checkpoint = checkpoint_to_resume(config, run)
    check_trackers(config.monitor.report_to)

    report = preflight(config, plan)
    data, rewards = report.data, report.rewards
    for line in data.report.lines() if data is not None else []:
        say(line)
    model: Any = None
    if report.failed or plan.strategy == "sharded":
        why = "the checks above failed" if report.failed else "no process holds the whole of a sharded model"
        report.checks.append(Checked("generation", None, f"not tried: {why}"))
    else:
        model = _placed_model(config, plan, say)
        report.checks.append(dry_generation(model, plan, report, config))
    for line in report.lines():
        say(line)
    report.stop_on_failure()
    assert data is not None
    assert rewards is not None
    model = model if model is not None else _placed_model(config, plan, say)

    arguments = grpo_arguments(config, plan, run, evaluates=data.eval is not None, weights=rewards.weights)
    bind_arguments(arguments, plan)
    main = arguments.process_index == 0
    monitor = MonitorCallback(config.monitor, run.path, plan.device, devices=plan.devices)
    # Completions are not in a checkpoint: it is taken when all steps on them are done.
    stop = GracefulStop(monitor.say, every=config.grpo.num_iterations)
    trainer = PlacedGRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=list(rewards.functions),
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=report.tokenizer,
        callbacks=[monitor, PlacementGuard(plan, monitor.say if main else None), stop],
        plan=plan,
        show=config.grpo.show_completions,
        on_completions=monitor.completions if main else None,
    )
    trainer.remove_callback(PrinterCallback)

    if main:
        run.write_request(config, plan, data.report.as_dict())

    answers_before = first_answers(trainer, config, plan, run, resumed=checkpoint is not None)
    try:
        summary = train(trainer, config, plan, run, data, checkpoint, monitor, stop)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(config, plan) from error
    names = [function.__name__ for function in rewards.functions]
    summary["rewards"] = dict(zip(names, rewards.weights, strict=True))
    if not stop.ended_early:
        best = trainer.state.best_metric if arguments.load_best_model_at_end else None
        summary |= outcome(trainer.state.log_history, best)
        summary["completions"] = trainer.latest_completions()
        summary["samples"] = samples(trainer, config, plan, answers_before)
        keep(trainer, config, plan, run, summary)
    if main:
        run.write_json("summary.json", summary)
    if stop.ended_early:
        # The first process that leaves with an error has the launcher end the others, written or not.
        trainer.accelerator.wait_for_everyone()
    return summary


def _placed_model(config: Config, plan: PlacementPlan, say: Say) -> Any:
    """The model on the plan's devices, with its adapter, verified."""
    model: Any = load_model(config.model, plan)
    say(f"model {config.model.name} on {', '.join(plan.devices)}, weights {plan.weight_precision}")
    if config.method == "lora":
        torch.manual_seed(config.seed)
        model = add_lora(model, config.lora)
    verify(model, plan)
    return model


def grpo_arguments(
    config: Config, plan: PlacementPlan, run: RunFolder, *, evaluates: bool, weights: list[float]
) -> GRPOConfig:
    """TRL's settings from ours; device and precision come from the plan alone."""
    training, grpo = config.training, config.grpo
    rhythm = "steps" if training.eval_steps else "epoch"
    saves = "steps" if training.save_steps or training.eval_steps else "epoch"
    keep_best = keeps_best(config) and evaluates
    return GRPOConfig(
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
        eval_on_start=evaluates,
        eval_strategy=rhythm if evaluates else "no",
        eval_steps=training.eval_steps,
        save_strategy=saves,
        save_steps=training.save_steps or training.eval_steps or 500,
        save_total_limit=training.save_total_limit,
        load_best_model_at_end=keep_best,
        metric_for_best_model="eval_reward" if keep_best else None,
        greater_is_better=True if keep_best else None,
        logging_steps=training.logging_steps,
        logging_first_step=True,
        # A NaN loss must be seen, not replaced by the running mean.
        logging_nan_inf_filter=False,
        dataloader_num_workers=training.dataloader_workers,
        num_generations=grpo.num_generations,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        top_k=grpo.top_k,
        max_completion_length=grpo.max_completion_length,
        beta=grpo.beta,
        loss_type=grpo.loss_type,
        epsilon=grpo.epsilon,
        num_iterations=grpo.num_iterations,
        scale_rewards=grpo.scale_rewards,
        mask_truncated_completions=grpo.mask_truncated,
        reward_weights=weights,
        model_init_kwargs=_reference(config, plan),
        report_to=config.monitor.report_to or "none",
        disable_tqdm=True,
        seed=config.seed,
        data_seed=config.seed,
        # Rewards read the other columns.
        remove_unused_columns=False,
        push_to_hub=False,
        **_generation(config),
        **trainer_options(plan),
    )


def _generation(config: Config) -> dict[str, Any]:
    """What generates: the model itself, or vLLM, which takes no setting of the other's."""
    grpo = config.grpo
    if not grpo.use_vllm:
        # Models are loaded for training, without a cache; generation without one computes every prefix again.
        return {"generation_kwargs": {"use_cache": True}}
    longest = prompt_limit(config) + grpo.max_completion_length
    return {
        "use_vllm": True,
        "vllm_mode": grpo.vllm_mode,
        "vllm_server_base_url": grpo.vllm_server_base_url.rstrip("/") if grpo.vllm_mode == "server" else None,
        "vllm_gpu_memory_utilization": grpo.vllm_memory,
        # By itself it makes room for the model's whole context, which may be more than its share holds; what is
        # over that context it refuses, though no prompt may be so long.
        "vllm_max_model_length": min(longest, model_context(config) or longest),
        "trust_remote_code": config.model.trust_remote_code,
    }


def _reference(config: Config, plan: PlacementPlan) -> dict[str, Any] | None:
    """How TRL loads a reference for full tuning: where the policy lies. An adapter's reference is the model itself."""
    if config.method == "lora" or config.grpo.beta == 0:
        return None
    # TRL warns that these are ignored for a policy that is loaded already; they are for the reference.
    logging.getLogger("trl.trainer.grpo_trainer").addFilter(
        lambda record: "your model is already instantiated" not in record.getMessage()
    )
    return {
        "dtype": plan.torch_weight_dtype,
        "device_map": plan.load_device_map(),
        "attn_implementation": config.model.attn_implementation,
        "use_safetensors": True,
        "trust_remote_code": config.model.trust_remote_code,
    }


def outcome(history: list[dict[str, Any]], best: float | None = None) -> dict[str, Any]:
    """Mean rewards of the first and of the last fifth of the steps, and on held-out prompts before and after.

    `best` is the held-out reward of the checkpoint that is kept, where that is not the last one.
    """
    logged = [entry for entry in history if "reward" in entry]
    names = [
        key for key in (logged[0] if logged else {}) if key.startswith("rewards/") and key.endswith("/mean")
    ]
    fifth = max(1, len(logged) // 5)
    metrics = {}
    for key in ["reward", *names]:
        values = [float(entry[key]) for entry in logged if entry.get(key) is not None]
        if values:
            name = key.removeprefix("rewards/").removesuffix("/mean")
            name = "mean reward" if key == "reward" else f"reward {name}"
            metrics[name] = {"before": _mean(values[:fifth]), "after": _mean(values[-fifth:])}
    held = [entry["eval_reward"] for entry in history if entry.get("eval_reward") is not None]
    if held:
        metrics["held-out reward"] = {"before": held[0], "after": held[-1] if best is None else best}
    return {"eval_loss": {"before": None, "after": None}, "metrics": metrics}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _out_of_memory(config: Config, plan: PlacementPlan) -> TrimtabError:
    training, grpo = config.training, config.grpo
    return TrimtabError(
        f"out of memory on {', '.join(plan.devices)} with training.batch_size={training.batch_size}, "
        f"grpo.max_completion_length={grpo.max_completion_length}\n"
        "  why: weights, gradients, optimizer, activations and the cache of a generation did not fit (the plan's "
        "figure is an estimate)\n"
        "  change: halve training.batch_size and double training.gradient_accumulation_steps, set "
        "training.gradient_checkpointing=true, or lower grpo.max_completion_length"
    )
