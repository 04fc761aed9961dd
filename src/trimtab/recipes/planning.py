"""From a config to its placement plan, with no weights loaded: the walk that `plan` and `train` share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from trimtab.config.schema import Config
from trimtab.hardware import Hardware, probe
from trimtab.placement import (
    ModelProfile,
    PlacementPlan,
    PlacementRequest,
    check_request,
    profile_model,
    resolve,
)
from trimtab.placement.optimizer import choose_optimizer
from trimtab.placement.speed import SpeedRequest
from trimtab.recipes.effective_batch import check_effective_batch
from trimtab.recipes.recipe import Recipe
from trimtab.recipes.table import recipe_of


@dataclass(frozen=True)
class Planned:
    """A plan with what it was made from."""

    hardware: Hardware
    profile: ModelProfile
    architecture: str
    targets: tuple[str, ...]
    """Names of the layers that get an adapter; empty when all weights are tuned."""
    plan: PlacementPlan
    trained_tensors: int = 0


def plan_run(config: Config, hardware: Hardware | None = None, before: Planned | None = None) -> Planned:
    """Resolve the plan. What the machine cannot give is refused before anything slow is imported.

    `before`: a plan for the same model, which then is not looked at again.
    """
    hardware = hardware or probe()
    request = PlacementRequest(
        **{field.name: getattr(config, field.name) for field in fields(PlacementRequest)}
    )
    check_request(request, hardware)

    recipe = recipe_of(config)
    if before is not None:
        profile, architecture, targets = before.profile, before.architecture, before.targets
        trained = before.trained_tensors
    else:
        profile, architecture, targets, trained = _known(config, recipe)
    on_cpu = request.device == "cpu" or (request.device == "auto" and not hardware.accelerators)
    work = recipe.workload(config, on_cpu)
    full = config.method == "full"
    plan = resolve(request, hardware, profile, work, full_tuning=full, speed=_speed(config, recipe))
    if work.training:
        optimizer = choose_optimizer(config.training.optimizer, plan.kind)
        plan = replace(plan, reasons={**plan.reasons, "optimizer": f"{optimizer.name}: {optimizer.reason}"})
    check_effective_batch(config, plan)
    return Planned(hardware, profile, architecture, targets, plan, trained)


def _known(config: Config, recipe: Recipe) -> tuple[ModelProfile, str, tuple[str, ...], int]:
    """What the model's skeleton tells, with its adapter: no weights are loaded."""
    from trimtab.models import load_skeleton
    from trimtab.models.adapters import adapter_targets, add_lora

    model: Any = load_skeleton(config.model, recipe.family)
    if recipe.fit is not None:
        recipe.fit(config, model)
    architecture = type(model).__name__
    targets: tuple[str, ...] = ()
    if config.method == "lora":
        targets = tuple(adapter_targets(model, config.lora.targets))
        model = add_lora(model, config.lora, recipe.family)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return profile_model(model), architecture, targets, trained


def _speed(config: Config, recipe: Recipe) -> SpeedRequest | None:
    """None for steps without gradients, which have ways of their own."""
    if not recipe.fast:
        return None
    return SpeedRequest.of(
        config.speed,
        offered=recipe.fast,
        recipe=recipe.name,
        full_tuning=config.method == "full",
        dora=config.method == "lora" and config.lora.dora,
        attention=config.model.attn_implementation,
    )
