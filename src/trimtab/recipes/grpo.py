"""Reinforcement learning on rewards (GRPO) with TRL: on one device, split over several GPUs, or in several processes.

Everything that can be known is checked in one report before the first step. A reward that breaks its promise ends the
run; no result is ever made up in its place.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trimtab.config.facts import longest_prompt
from trimtab.config.schema import Config, GrpoSettings
from trimtab.placement import Check, PlacementPlan, Workload
from trimtab.recipes.preflight import Preflight
from trimtab.recipes.recipe import Job, Need, Prepared, Recipe, Say
from trimtab.recipes.run_folder import RunFolder

if TYPE_CHECKING:
    from trl import GRPOConfig

    from trimtab.recipes.fullest_rows import Fullest
    from trimtab.recipes.trainer_driver import TrainerDriver

SAME_NAMES = {
    *("num_generations", "temperature", "top_p", "top_k", "max_completion_length"),
    *("beta", "loss_type", "epsilon", "num_iterations", "scale_rewards"),
}
"""Settings that TRL has by the same name."""


def _workload(config: Config, on_cpu: bool) -> Workload:
    training, grpo = config.training, config.grpo
    colocated = grpo.use_vllm and grpo.vllm_mode == "colocate"
    return Workload(
        batch_size=training.batch_size,
        max_length=longest_prompt(config) + grpo.max_completion_length,
        gradient_checkpointing=training.gradient_checkpointing,
        generated=0 if grpo.use_vllm else training.batch_size * training.gradient_accumulation_steps,
        reserved_share=grpo.vllm_memory if colocated else 0.0,
        reference=grpo.beta > 0 and config.method == "full",
    )


def _need(config: Config) -> Need:
    training, grpo = config.training, config.grpo
    return Need(
        {
            "training.batch_size": training.batch_size,
            "grpo.max_completion_length": grpo.max_completion_length,
        },
        "weights, gradients, optimizer, activations and the cache of a generation",
        [
            "halve training.batch_size and double training.gradient_accumulation_steps",
            "set training.gradient_checkpointing=true",
            "lower grpo.max_completion_length",
        ],
    )


def _fullest(config: Config, number: int) -> Fullest:
    from trimtab.recipes.fullest_prompts import prompt_rows

    return prompt_rows(config, number)


def _preflight(config: Config, plan: PlacementPlan) -> Preflight:
    """What `trimtab plan` shows."""
    from trimtab.recipes.grpo_check import preflight

    report = preflight(config, plan)
    report.checks.append(Check("generation", None, "needs the weights: `trimtab train` tries it first"))
    return report


def _prepare(config: Config, plan: PlacementPlan, say: Say) -> Prepared:
    from trimtab.recipes.grpo_check import preflight

    report = preflight(config, plan)
    for line in report.data.report.lines() if report.data is not None else []:
        say(line)
    if report.failed:
        report.checks.append(Check("generation", None, "not tried: the checks above failed"))
        for line in report.lines():
            say(line)
        report.stop_on_failure()
    return Prepared(report.processor, report.data.train, report.data.eval, report.data.report, own=report)


def _prove(job: Job) -> None:
    """A few tokens of the real model, scored by every reward; then the whole report."""
    from trimtab.recipes.grpo_check import dry_generation

    report: Preflight = job.prepared.own
    if job.plan.strategy == "sharded":
        why = "not tried: no process holds the whole of a sharded model"
        report.checks.append(Check("generation", None, why))
    else:
        report.checks.append(dry_generation(job.model, job.plan, report, job.config))
    for line in report.lines():
        job.say(line)
    report.stop_on_failure()


def _build(job: Job) -> TrainerDriver:
    from trimtab.recipes.grpo_trainer import PlacedGRPOTrainer
    from trimtab.recipes.trainer_driver import TrainerDriver

    config, plan, prepared = job.config, job.plan, job.prepared
    rewards = prepared.own.rewards
    arguments = grpo_arguments(
        config, plan, job.run, evaluates=prepared.eval is not None, weights=rewards.weights
    )
    driver = TrainerDriver(
        job,
        PlacedGRPOTrainer,
        arguments,
        # Completions are not in a checkpoint: it is taken when all steps on them are done.
        stop_every=config.grpo.num_iterations,
        reward_funcs=list(rewards.functions),
        plan=plan,
        show=config.grpo.show_completions,
        say=job.say,
    )
    driver.trainer.on_completions = driver.monitor.completions if driver.main else None
    driver.trainer.on_bad_logits = driver.monitor.bad_logits if config.monitor.stop_on_nonfinite else None
    return driver


def grpo_arguments(
    config: Config, plan: PlacementPlan, run: RunFolder, *, evaluates: bool, weights: list[float]
) -> GRPOConfig:
    """TRL's settings from ours."""
    from trl import GRPOConfig

    from trimtab.recipes.trainer_driver import trainer_arguments

    grpo = config.grpo
    return GRPOConfig(
        **trainer_arguments(config, plan, run, evaluates=evaluates, best="eval_reward"),
        **grpo.model_dump(include=SAME_NAMES),
        mask_truncated_completions=grpo.mask_truncated,
        reward_weights=weights,
        model_init_kwargs=_reference(config, plan),
        # Rewards read the other columns.
        remove_unused_columns=False,
        **_generation(config),
    )


def _generation(config: Config) -> dict[str, Any]:
    """What generates: the model itself, or vLLM, which takes no setting of the other's."""
    from trimtab.recipes.grpo_check import model_context

    grpo = config.grpo
    if not grpo.use_vllm:
        # Models are loaded for training, without a cache; generation without one computes every prefix again.
        return {"generation_kwargs": {"use_cache": True}}
    longest = longest_prompt(config) + grpo.max_completion_length
    return {
        "use_vllm": True,
        "vllm_mode": grpo.vllm_mode,
        "vllm_server_base_url": grpo.vllm_server_base_url.rstrip("/") if grpo.vllm_mode == "server" else None,
        "vllm_gpu_memory_utilization": grpo.vllm_memory,
        # By itself it makes room for the model's whole context, which may be more than its share holds; what is
        # over that context it refuses, though no prompt may be so long.
        "vllm_max_model_length": min(longest, model_context(config) or longest),
        "trust_remote_code": bool(config.model.trust_remote_code),
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
        "trust_remote_code": bool(config.model.trust_remote_code),
    }


def _outcome(job: Job, driver: TrainerDriver) -> dict[str, Any]:
    rewards = job.prepared.own.rewards
    names = [function.__name__ for function in rewards.functions]
    found: dict[str, Any] = {"rewards": dict(zip(names, rewards.weights, strict=True))}
    if not driver.ended_early:
        found |= {
            "metrics": reward_figures(driver.history, driver.best),
            "completions": driver.trainer.latest_completions(),
        }
    return found


def reward_figures(history: list[dict[str, Any]], best: float | None = None) -> dict[str, dict[str, float]]:
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
    return metrics


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


GRPO = Recipe(
    name="grpo",
    settings=GrpoSettings,
    words=lambda config: "reinforcement learning (GRPO)",
    workload=_workload,
    need=_need,
    prepare=_prepare,
    build=_build,
    outcome=_outcome,
    preflight=_preflight,
    prove=_prove,
    rewarded=True,
    fullest=_fullest,
    fast=frozenset({"adapters", "head", "compile", "kernels"}),
)
