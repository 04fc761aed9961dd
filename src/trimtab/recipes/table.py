"""The table of recipes, which planning, the run, cards, reports and the command line read.

A new recipe is a file beside this one, its settings in config/, and a line here.
"""

from __future__ import annotations

from trimtab.config.schema import Config
from trimtab.recipes.grpo import GRPO
from trimtab.recipes.recipe import Recipe
from trimtab.recipes.sft import SFT
from trimtab.recipes.vision import VISION
from trimtab.recipes.voice import VOICE
from trimtab.recipes.zeroth_order import ZEROTH_ORDER

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (SFT, GRPO, ZEROTH_ORDER, VISION, VOICE)}


def recipe_of(config: Config) -> Recipe:
    return RECIPES[config.recipe]
