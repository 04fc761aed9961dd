"""What a finished run kept, made ready to be asked, heard or judged in one process. It trains and writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.config.schema import Config
from trimtab.placement import PlacementPlan
from trimtab.recipes.kept_folder import check_kept
from trimtab.recipes.recipe import Recipe


def alone(config: Config) -> Config:
    """The same run for one process: how many trained it, and what they took together, no longer matters."""
    training = config.training.model_copy(update={"effective_batch_size": None, "resume": False})
    return config.model_copy(update={"processes": None, "sharding": None, "training": training})


def kept_model(
    recipe: Recipe, config: Config, plan: PlacementPlan, weights: Path, *, trainable: bool = False
) -> Any:
    """The model of a run whose adapter or model lies in `weights`, where the plan puts it.

    `trainable`: as it is while it is tuned, for what looks for the tuned weights by that.
    """
    from trimtab.models.kept_adapter import with_adapter
    from trimtab.models.load import load_model

    check_kept(weights)
    settings = config.model
    if config.method == "full":
        settings = settings.model_copy(update={"name": str(weights), "revision": None})
    model: Any = load_model(settings, plan, recipe.family)
    if recipe.fit is not None:
        recipe.fit(config, model)
    if config.method == "lora":
        model = with_adapter(model, weights, is_trainable=trainable)
    return model
