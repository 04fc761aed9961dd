"""All rules between settings, applied to a config: conflicts are errors, settings without effect are warnings."""

from __future__ import annotations

from collections.abc import Collection

from trimtab.config import rules_recipes, rules_run
from trimtab.config.facts import reward_weights
from trimtab.config.rule import Finding
from trimtab.config.schema import Config

__all__ = ["RULES", "Finding", "config_warnings", "reward_weights", "run_checks"]

RULES = [*rules_run.RULES, *rules_recipes.RULES]


def run_checks(config: Config, wrong: Collection[str] = ()) -> list[tuple[Finding, tuple[str, ...]]]:
    """Every finding with the settings that take part in it. Rules that read a `wrong` setting are left out."""
    findings = [(rule(config), keys) for keys, rule in RULES if not set(keys) & set(wrong)]
    return [(finding, keys) for finding, keys in findings if finding is not None]


def config_warnings(config: Config) -> list[str]:
    """One line for each setting that somebody gave and that has no effect, to print before a run."""
    found = [finding for finding, _ in run_checks(config) if finding.warning]
    return [f"{finding.key} {finding.reason}; {finding.change}" for finding in found]
