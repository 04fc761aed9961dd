"""All rules between settings, applied to a config: conflicts are errors, settings without effect are warnings."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from trimtab.config import rules_run, speed
from trimtab.config.facts import unused
from trimtab.config.keys import RECIPE_SECTIONS
from trimtab.config.rule import Conflict, Rules
from trimtab.config.schema import Config


def rules_for(recipe: str) -> Rules:
    """The rules of any run, those of the recipe's own section, and what the recipe does not use."""
    rules = Rules([*rules_run.RULES, *speed.RULES])
    for name, section in RECIPE_SECTIONS.items():
        if section.recipe == recipe:
            rules += section.rules
            keys, change = section.without_effect, "remove it"
        else:
            keys, change = (name,), f"remove it, or set recipe: {section.recipe}"
        rules.append(
            (("recipe", *keys), partial(unused, keys=keys, where=f"recipe: {recipe}", change=change))
        )
    return rules


def run_checks(config: Config, wrong: Collection[str] = ()) -> list[tuple[Conflict, tuple[str, ...]]]:
    """Every conflict with the settings that take part in it. Rules that read a `wrong` setting are left out."""
    found = [(rule(config), keys) for keys, rule in rules_for(config.recipe) if not set(keys) & set(wrong)]
    return [(conflict, keys) for conflict, keys in found if conflict is not None]


def config_warnings(config: Config) -> list[str]:
    """One line for each setting that somebody gave and that has no effect, to print before a run."""
    found = [conflict for conflict, _ in run_checks(config) if conflict.warning]
    return [f"{conflict.key} {conflict.reason}; {conflict.change}" for conflict in found]
