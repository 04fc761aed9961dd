"""How good the model is that a run kept: measured again, as the run did it, on what it held out or on other data.

Nothing is trained, and nothing is written into the run's folder.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan, own_stream, prepare_process
from trimtab.recipes.kept import alone, kept_model
from trimtab.recipes.planning import plan_run
from trimtab.recipes.recipe import Job, Prepared, Recipe, Say
from trimtab.recipes.run_folder import RunFolder
from trimtab.recipes.table import recipe_of
from trimtab.recipes.takes import Takes

SPOKEN = 8
"""Rows of each part that a voice is judged by, where nothing else is asked for."""


@dataclass(frozen=True)
class Measured:
    """What was measured, by the names that a run's summary has for the figures."""

    plan: PlacementPlan
    held_rows: int
    loss: float | None
    """None where nothing is held out, and for a recipe whose loss tells nothing."""
    metrics: dict[str, float]
    takes: Takes | None
    """Of a model that speaks."""


def evaluate(
    config: Config, folder: Path, weights: Path, *, data: str | None = None, rows: int | None = None, say: Say
) -> Measured:
    """Measure the run with this config, which is kept in `folder` with its adapter or model in `weights`.

    `data` in place of what it held out; `rows` held-out rows are answered, or as many of each part spoken.
    """
    recipe = recipe_of(config)
    config = alone(_without_display(config, rows))
    plan = plan_run(config, refuses=False).plan
    prepare_process(plan)
    with own_stream(plan) if recipe.captures else nullcontext():
        return _measured(recipe, recipe.again(config, folder), plan, weights, data, rows, say)


def _without_display(config: Config, rows: int | None) -> Config:
    """The settings of an evaluation: nobody is asked what the samples ask, and no tracker hears of it."""
    monitor = config.monitor.model_copy(update={"progress": "none", "report_to": []})
    samples: dict[str, Any] = {"prompts": []} | ({} if rows is None else {"held_out": rows})
    return config.model_copy(
        update={"monitor": monitor, "samples": config.samples.model_copy(update=samples)}
    )


def _prepared(recipe: Recipe, config: Config, plan: PlacementPlan, data: str | None, say: Say) -> Prepared:
    """The run's data as it was; with `data` in place of what it held out."""
    if data is None:
        return recipe.prepare(config, plan, say)
    other = config.model_copy(update={"data": config.data.model_copy(update={"eval_source": data})})
    prepared = recipe.prepare(other, plan, say)
    if recipe.takes is None:
        return prepared
    # With a source of its own for evaluation nothing is held out of the run's, and not all of that was trained on.
    return replace(prepared, train=recipe.prepare(config, plan, lambda line: None).train)


def _measured(
    recipe: Recipe,
    config: Config,
    plan: PlacementPlan,
    weights: Path,
    data: str | None,
    rows: int | None,
    say: Say,
) -> Measured:
    from transformers import set_seed

    set_seed(config.seed)
    prepared = _prepared(recipe, config, plan, data, say)
    _check_held(recipe, config, prepared)
    with tempfile.TemporaryDirectory(prefix="trimtab-evaluate-") as scratch:
        # A driver writes as it goes; here it does so where nobody looks.
        job = Job(config, plan, RunFolder(Path(scratch)), say, None, prepared)
        job.model = kept_model(recipe, config, plan, weights, trainable=True)
        say(f"model {config.model.name} with {weights.name}/ on {', '.join(plan.devices)}")
        with recipe.build(job) as driver:
            figures = driver.measure() if prepared.eval else {}
            metrics = _rewards(figures) if recipe.rewarded else figures
            loss = None if recipe.rewarded else metrics.pop("loss", None)
            if recipe.look is not None and recipe.takes is None and config.samples.held_out and prepared.eval:
                look = recipe.look(job, driver.model)
                if look.of:
                    metrics[f"{look.scored} on {look.of} held-out rows"] = look.right / look.of
            spoken = SPOKEN if rows is None else rows
            takes = recipe.takes(job, driver.model, spoken) if recipe.takes is not None and spoken else None
    held = len(prepared.eval) if prepared.eval is not None else 0
    return Measured(plan, held, loss, metrics, takes)


def _check_held(recipe: Recipe, config: Config, prepared: Prepared) -> None:
    if not prepared.eval and recipe.takes is None:
        raise RequestError.of(
            f"data.eval_fraction={config.data.eval_fraction:g}: the run held nothing out",
            "what it was trained on does not tell how good it is",
            "give other rows with --data",
        )


def _rewards(figures: dict[str, float]) -> dict[str, float]:
    """Of all that a trainer tells of generations, what they were paid, by the summary's names."""
    paid = {"held-out reward": figures["reward"]} if "reward" in figures else {}
    for name, value in figures.items():
        if name.startswith("rewards/") and name.endswith("/mean"):
            paid[f"held-out reward {name.removeprefix('rewards/').removesuffix('/mean')}"] = value
    return paid
