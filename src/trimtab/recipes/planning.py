"""From a config to its placement plan, with no weights loaded: the walk that `plan` and `train` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.config.defaults import with_recipe_defaults
from trimtab.config.schema import Config
from trimtab.hardware import Hardware, probe
from trimtab.placement import (
    ModelProfile,
    PlacementPlan,
    PlacementRequest,
    Workload,
    check_request,
    profile_model,
    resolve,
)


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from."""

    hardware: Hardware
    profile: ModelProfile
    architecture: str
    targets: tuple[str, ...]
    """Names of the layers that get an adapter; empty when all weights are tuned."""
    plan: PlacementPlan


def placement_request(config: Config) -> PlacementRequest:
    return PlacementRequest(
        device=config.device,
        precision=config.precision,
        model_parallel=config.model_parallel,
        sharding=config.sharding,
        processes=config.processes,
    )


def workload(config: Config, *, on_cpu: bool = False) -> Workload:
    """What one step of the recipe pushes through the model."""
    config, _ = with_recipe_defaults(config)
    zeroth = config.zeroth if config.recipe == "zeroth_order" else None
    lanes = 1
    if zeroth is not None:
        passes = zeroth.queries + 1 if zeroth.method == "fzoo" else 2
        # As the optimizer chooses by itself.
        by_default = 1 if on_cpu else passes if config.method == "lora" else 2
        lanes = min(zeroth.lanes or by_default, passes)
    grpo = config.grpo if config.recipe == "grpo" else None
    length = config.data.max_length
    if grpo is not None:
        length = (
            grpo.max_prompt_length or max(1, length - grpo.max_completion_length)
        ) + grpo.max_completion_length
    generated = config.training.batch_size * config.training.gradient_accumulation_steps
    return Workload(
        batch_size=config.training.batch_size,
        max_length=length,
        gradient_checkpointing=config.training.gradient_checkpointing,
        training=zeroth is None,
        lanes=lanes,
        anchors=zeroth is not None and zeroth.method == "dizo",
        generated=generated if grpo is not None and not grpo.use_vllm else 0,
        reserved_share=grpo.vllm_memory
        if grpo is not None and grpo.use_vllm and grpo.vllm_mode == "colocate"
        else 0.0,
        reference=grpo is not None and grpo.beta > 0 and config.method == "full",
    )


def plan_run(config: Config, hardware: Hardware | None = None) -> Planned:
    """Resolve the plan. What the machine cannot give is refused before anything slow is imported."""
    hardware = hardware or probe()
    request = placement_request(config)
    check_request(request, hardware)

    from trimtab.models import load_skeleton
    from trimtab.models.adapters import adapter_targets, add_lora

    model: Any = load_skeleton(config.model)
    architecture = type(model).__name__
    targets: tuple[str, ...] = ()
    if config.method == "lora":
        targets = tuple(adapter_targets(model, config.lora.targets))
        model = add_lora(model, config.lora)
    profile = profile_model(model)
    on_cpu = request.device == "cpu" or (request.device == "auto" and not hardware.accelerators)
    work = workload(config, on_cpu=on_cpu)
    plan = resolve(request, hardware, profile, work, full_tuning=config.method == "full")
    return Planned(hardware, profile, architecture, targets, plan)
