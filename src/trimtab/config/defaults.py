"""Defaults that depend on the recipe: filled in where nobody set a value, each with its reason, to be printed."""

from __future__ import annotations

from trimtab.config.facts import is_given, value_of_setting
from trimtab.config.keys import recipe_sections
from trimtab.config.schema import Config
from trimtab.config.section import Default

__all__ = ["Default", "with_recipe_defaults"]


def with_recipe_defaults(config: Config) -> tuple[Config, list[Default]]:
    """A copy with the recipe's own defaults filled in, and what they are; done again, it changes nothing.

    Nothing that was set is changed; null stands for the usual value where a setting takes null.
    """
    filled = config.model_copy(deep=True)
    chosen = [
        default
        for section in recipe_sections(config)
        for default in section.defaults(config)
        if value_of_setting(config, default.key) is None or not is_given(config, default.key)
    ]
    for key, value, _ in chosen:
        name, _, leaf = key.rpartition(".")
        setattr(getattr(filled, name) if name else filled, leaf, value)
    return filled, chosen
