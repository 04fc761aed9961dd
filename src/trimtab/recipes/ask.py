"""A question to the model that a finished run kept. It trains nothing and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.placement import prepare_process
from trimtab.recipes.kept import alone, kept_model
from trimtab.recipes.planning import plan_run
from trimtab.recipes.table import recipe_of


def ask(config: Config, weights: Path, question: str, pictures: Sequence[Path]) -> str:
    """The answer of the run with this config, whose adapter or model lies in `weights`, where its plan puts it."""
    recipe = recipe_of(config)
    if recipe.family.samples == "audio":
        raise RequestError.of(
            f"a question to a run with recipe: {config.recipe}",
            "its model speaks what it is given, and answers nothing",
            "let it speak: trimtab speak RUN --text …",
        )
    if recipe.answer is None:
        raise RequestError.of(
            f"a question to a run with recipe: {config.recipe}",
            "its model chooses among given answers, and its prompts are a task's own",
            "ask a run of another recipe",
        )
    plan = plan_run(alone(config), refuses=False).plan
    prepare_process(plan)
    return recipe.answer(config, plan, kept_model(recipe, config, plan, weights), question, pictures)
