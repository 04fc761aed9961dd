"""Which settings there are, what each takes, and which one a wrong name probably meant.

All of it is read off the schema, so that a new setting needs no entry here. Never looks at values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from pydantic import BaseModel

from trimtab.config.facts import value_of_setting
from trimtab.config.limits import with_limits
from trimtab.config.schema import Config
from trimtab.config.section import RecipeSection

SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}

RECIPE_SECTIONS = {name: section for name, section in SECTIONS.items() if issubclass(section, RecipeSection)}
"""Those that belong to one recipe alone."""

SHORTHANDS = {"model": "model.name", "data": "data.source", "export": "export.to"}
"""Sections that may be written as plain text, and the setting that the text then fills."""

KIND_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list such as [a, b]",
    "object": "a mapping such as {a: b}",
    "null": "null",
}
_LIMITS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
}
_CLOSE_ENOUGH = 0.72
_BONUS = 0.1
_LONGEST_NAME = 100
"""Comparing takes the product of the lengths, and no setting's name is near as long."""


def recipe_sections(config: Config) -> list[RecipeSection]:
    """The settings of the config's own recipe."""
    sections = [getattr(config, name) for name in RECIPE_SECTIONS]
    return [section for section in sections if section.recipe == config.recipe]


def has_effect(config: Config, key: str) -> bool:
    """Whether the config's recipe uses a general setting."""
    return not any(key in section.without_effect for section in recipe_sections(config))


@cache
def settings() -> dict[str, dict[str, Any]]:
    """Every setting by its dotted key, with its JSON schema."""
    return _by_key(Config.model_json_schema())


@cache
def bounds(key: str) -> dict[str, Any]:
    """The JSON schema of the numbers that a setting takes, with a bound on both sides; empty where it takes none."""
    form = with_limits(key, settings().get(key, {}))
    return next((one for one in form.get("anyOf", [form]) if one.get("type") in ("integer", "number")), {})


def _by_key(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, form in schema["properties"].items():
        if name not in SECTIONS:
            found[name] = form
            continue
        section = schema["$defs"][SECTIONS[name].__name__]
        found.update({f"{name}.{leaf}": leaf_form for leaf, leaf_form in section["properties"].items()})
    return found


def schema_with_limits() -> dict[str, Any]:
    """The JSON schema of all settings, each number with its bounds."""
    schema = Config.model_json_schema()
    for name, form in schema["properties"].items():
        if name not in SECTIONS:
            schema["properties"][name] = with_limits(name, form)
            continue
        properties = schema["$defs"][SECTIONS[name].__name__]["properties"]
        properties.update({leaf: with_limits(f"{name}.{leaf}", own) for leaf, own in properties.items()})
    return schema


def setting_of(key: str) -> str | None:
    """The setting that a key belongs to: itself, or for `data.columns.text` the mapping `data.columns`."""
    if key in settings():
        return key
    parent = key.rpartition(".")[0]
    return parent if "object" in kinds(parent) else None


def forms(key: str) -> list[dict[str, Any]]:
    """The JSON schemas of what a setting takes, one of which has to fit; of no setting an empty one."""
    form = settings().get(key, {})
    alternatives: list[dict[str, Any]] = form.get("anyOf", [form])
    return alternatives


def kinds(key: str) -> set[str]:
    """The JSON types that a setting takes: integer, number, string, boolean, array, object, null."""
    return {str(form["type"]) for form in forms(key) if "type" in form}


def maps_to_numbers(key: str) -> bool:
    """Whether a setting that takes a mapping takes one of names to numbers."""
    return any(form.get("additionalProperties") == {"type": "number"} for form in forms(key))


def choices(key: str) -> list[str]:
    """The words that a setting takes, where it takes only some."""
    return [str(word) for form in forms(key) for word in form.get("enum", [])]


def describe(key: str) -> str:
    """What a setting takes, in words: `a whole number, 1 or more, or null`."""
    if key == "device":
        return "auto, cpu, mps, cuda or cuda:N"
    return " or ".join(map(_describe, forms(key)))


def _describe(form: Mapping[str, Any]) -> str:
    if "enum" in form:
        return "one of " + ", ".join(str(choice) for choice in form["enum"])
    limits = [f"{text} {plain_number(form[bound])}" for bound, text in _LIMITS.items() if bound in form]
    return " ".join([KIND_WORDS[form["type"]], " and ".join(limits)]).strip()


def plain_number(value: int | float) -> str:
    """A bound as people write it: 0 and not 0.0, 4294967296 and not 4.29497e+09."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def default_of(key: str) -> Any:
    """The value that a setting has when nobody sets it."""
    return value_of_setting(Config(), key)


def suggest(path: tuple[str, ...], aliases: Mapping[str, str], section_wanted: bool = False) -> str | None:
    """The whole key that a wrong one probably meant; `aliases` maps other known names to keys."""
    if len(path[-1]) > _LONGEST_NAME:
        return None
    candidates = {(name, name) for name in SECTIONS} if len(path) == 1 else set()
    if not section_wanted:
        candidates |= {(key.rpartition(".")[2], key) for key in settings()} | set(aliases.items())
    wanted, section = _squash(path[-1]), path[0] if len(path) > 1 else ""

    def score(candidate: tuple[str, str]) -> tuple[float, str]:
        name, key = _squash(candidate[0]), candidate[1]
        bonus = _BONUS if section and key.startswith(f"{section}.") else 0.0
        bonus += _BONUS if len(wanted) > 3 and name.startswith(wanted) else 0.0
        return (SequenceMatcher(None, wanted, name).ratio() + bonus, key)

    closest = max(candidates, key=score, default=("", ""))
    return closest[1] if score(closest)[0] >= _CLOSE_ENOUGH else None


def _squash(name: str) -> str:
    """`Batch-Size`, `batch_size` and `batchsize` are one name to somebody who types from memory."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
