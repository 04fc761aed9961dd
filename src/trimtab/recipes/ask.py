"""A question to the model that a finished run kept. It trains nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan, prepare_process
from trimtab.recipes.planning import plan_run
from trimtab.recipes.recipe import Recipe
from trimtab.recipes.table import recipe_of


def ask(config: Config, weights: Path, question: str, pictures: Sequence[Path]) -> str:
    """The answer of the run with this config, whose adapter or model lies in `weights`, where its plan puts it."""
    recipe = recipe_of(config)
    if recipe.answer is None:
        raise RequestError.of(
            f"a question to a run with recipe: {config.recipe}",
            "its model chooses among given answers, and its prompts are a task's own",
            "ask a run of another recipe",
        )
    plan = plan_run(config.model_copy(update={"processes": None, "sharding": None})).plan
    prepare_process(plan)
    return recipe.answer(config, plan, _kept_model(recipe, config, plan, weights), question, pictures)


def _kept_model(recipe: Recipe, config: Config, plan: PlacementPlan, weights: Path) -> Any:
    from trimtab.models.load import load_model

    settings = config.model
    if config.method == "full":
        settings = settings.model_copy(update={"name": str(weights), "revision": None})
    model: Any = load_model(settings, plan, recipe.family)
    if recipe.fit is not None:
        recipe.fit(config, model)
    if config.method == "lora":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(weights))
    return model
