"""From a config to its placement plan, with no weights loaded: the walk that `plan`, `fit` and `train` share."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import Config
from trimtab.hardware import Hardware, Launcher, probe
from trimtab.hardware.catalogue import accelerators
from trimtab.placement import (
    MemoryShare,
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

if TYPE_CHECKING:
    from trimtab.recipes.trials import Trials


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


def machine_with(gpus: str) -> Hardware:
    """This machine as if it had other GPUs: `2xH200`. Who started this process does not matter to them."""
    here = probe(Launcher(name="none"))
    return replace(here, accelerators=accelerators(gpus), cuda_build=here.cuda_build or "none here")


def plan_run(
    config: Config,
    hardware: Hardware | None = None,
    *,
    trials: Trials | None = None,
    near_only: bool = False,
) -> Planned:
    """Resolve the plan. What the machine cannot give is refused before anything slow is imported.

    With `trials` its memory is executed, where that can be; with `near_only` only where a formula leaves open what fits.
    """
    hardware = hardware or probe()
    request = PlacementRequest(
        **{field.name: getattr(config, field.name) for field in fields(PlacementRequest)}
    )
    check_request(request, hardware)

    from trimtab.models import load_skeleton
    from trimtab.models.adapters import adapter_targets, add_lora

    recipe = recipe_of(config)
    model: Any = load_skeleton(config.model, recipe.family)
    if recipe.fit is not None:
        recipe.fit(config, model)
    architecture = type(model).__name__
    targets: tuple[str, ...] = ()
    if config.method == "lora":
        targets = tuple(adapter_targets(model, config.lora.targets))
        model = add_lora(model, config.lora, recipe.family)
    profile = profile_model(model)
    on_cpu = request.device == "cpu" or (request.device == "auto" and not hardware.accelerators)
    work = recipe.workload(config, on_cpu)
    full = config.method == "full"
    speed = _speed(config, recipe)

    def resolved(asked: PlacementRequest, alone: MemoryShare | None, refuses: bool) -> PlacementPlan:
        return resolve(
            asked, hardware, profile, work, full_tuning=full, speed=speed, alone=alone, refuses=refuses
        )

    if trials is None:
        plan = resolved(request, None, True)
    else:
        from trimtab.recipes.executed_plan import Settling

        plan = Settling(config, hardware, request, resolved, trials).plan(near_only=near_only)
    if work.training:
        optimizer = choose_optimizer(config.training.optimizer, plan.kind)
        plan = replace(plan, reasons={**plan.reasons, "optimizer": f"{optimizer.name}: {optimizer.reason}"})
    check_effective_batch(config, plan)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return Planned(hardware, profile, architecture, targets, plan, trained)


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
