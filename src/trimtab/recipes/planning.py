"""From a config to its placement plan, with no weights loaded: the walk that `plan`, `fit` and `train` share."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import Config
from trimtab.hardware import Hardware, Launcher, probe
from trimtab.hardware.catalogue import planned_gpus
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
from trimtab.placement.sizing import DoesNotFit
from trimtab.placement.speed import SpeedRequest
from trimtab.recipes.effective_batch import check_effective_batch
from trimtab.recipes.recipe import Recipe
from trimtab.recipes.table import recipe_of
from trimtab.rehearse.session import VARIABLE as REHEARSED
from trimtab.rehearse.shield import aside

if TYPE_CHECKING:
    from trimtab.recipes.trials import Trials

_SHOWN = "estimated by formula: the rehearsed step itself shows whether it fits"


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
    return probe(Launcher(name="none"), accelerators=planned_gpus(gpus))


@dataclass(frozen=True)
class Known:
    """What a plan needs to know of the model that a config names; none of it hangs on the machine."""

    profile: ModelProfile
    architecture: str
    targets: tuple[str, ...]
    trained_tensors: int


def know_model(config: Config) -> Known:
    """Look at the model's skeleton, with its adapter; no weights are loaded."""
    with aside() if REHEARSED in os.environ else nullcontext():
        return _looked_at(config)


def _looked_at(config: Config) -> Known:
    from trimtab.models import load_skeleton
    from trimtab.models.adapters import adapter_targets, add_lora
    from trimtab.models.tuned import fitted

    recipe = recipe_of(config)
    model: Any = load_skeleton(config.model, recipe.family)
    fitted(config, model, recipe.fit)
    architecture = type(model).__name__
    targets: tuple[str, ...] = ()
    if config.method == "lora":
        targets = tuple(adapter_targets(model, config.lora.targets))
        model = add_lora(model, config.lora, recipe.family)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    return Known(profile_model(model), architecture, targets, trained)


def _known_from(planned: Planned) -> Known:
    return Known(planned.profile, planned.architecture, planned.targets, planned.trained_tensors)


def request_of(config: Config) -> PlacementRequest:
    """Where a config wants to run."""
    return PlacementRequest(**{field.name: getattr(config, field.name) for field in fields(PlacementRequest)})


def resolve_for(
    config: Config,
    hardware: Hardware,
    known: Known,
    asked: PlacementRequest | None = None,
    alone: MemoryShare | None = None,
    refuses: bool = True,
) -> PlacementPlan:
    """The plan by what is known: `placement.resolve` for this config's work."""
    request, recipe = asked or request_of(config), recipe_of(config)
    on_cpu = request.device == "cpu" or (request.device == "auto" and not hardware.accelerators)
    work = recipe.workload(config, on_cpu)
    speed = _speed(config, recipe)

    def resolved(refuses: bool) -> PlacementPlan:
        return resolve(
            request,
            hardware,
            known.profile,
            work,
            full_tuning=config.method == "full",
            speed=speed,
            alone=alone,
            refuses=refuses,
        )

    try:
        plan = resolved(refuses)
    except DoesNotFit:
        if REHEARSED not in os.environ or not hardware.accelerators:
            raise
        # A rehearsal is not refused for an estimate: the step itself shows what it takes.
        plan = resolved(False)
        plan = replace(plan, reasons={**plan.reasons, "memory": _SHOWN})
    if work.training:
        optimizer = choose_optimizer(config.training.optimizer, plan.kind)
        plan = replace(plan, reasons={**plan.reasons, "optimizer": f"{optimizer.name}: {optimizer.reason}"})
    return plan


def plan_run(
    config: Config,
    hardware: Hardware | None = None,
    *,
    before: Planned | None = None,
    trials: Trials | None = None,
    near_only: bool = False,
    refuses: bool = True,
    rows: tuple[Any, ...] = (),
) -> Planned:
    """Resolve the plan. What the machine cannot give is refused before anything slow is imported.

    `before`: a plan for the same model, which then is not looked at again. With `trials` its memory is executed,
    where that can be; with `near_only` only where a formula leaves it open. `refuses` off: no estimate of a training
    step refuses what may take less, and is tried at once. `rows`: prepared ones that trials take, see `own_rows.py`.
    """
    machine = hardware or probe()
    check_request(request_of(config), machine)
    look = know_model if trials is None else trials.know
    known = _known_from(before) if before is not None else look(config)
    if trials is None:
        plan = resolve_for(config, machine, known, refuses=refuses)
    else:
        from trimtab.recipes.executed_plan import Settling

        plan = Settling(config, machine, known, trials, rows).plan(near_only=near_only)
    check_effective_batch(config, plan)
    return Planned(machine, known.profile, known.architecture, known.targets, plan, known.trained_tensors)


def may_compile(config: Config) -> bool:
    """Whether a plan of this config may have its layers compiled."""
    speed = _speed(config, recipe_of(config))
    return speed is not None and speed.compile is not False


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
