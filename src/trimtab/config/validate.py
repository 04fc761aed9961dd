"""From settings by key to a `Config`, or to every problem that stands in the way.

Says what pydantic and the checks found in the user's own terms. Never raises on a wrong value, and never repeats
pydantic's texts, which quote the values.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trimtab.config.checks import run_checks
from trimtab.config.defaults import Default, with_recipe_defaults
from trimtab.config.facts import leaves, value_of_setting
from trimtab.config.keys import (
    KIND_WORDS,
    SECTIONS,
    bounds,
    choices,
    default_of,
    describe,
    forms,
    kinds,
    maps_to_numbers,
    plain_number,
    setting_of,
    settings,
)
from trimtab.config.library_names import names_for, nearest
from trimtab.config.problems import Problem, show
from trimtab.config.read import Given
from trimtab.config.rule import Conflict
from trimtab.config.schema import Config
from trimtab.config.secrets import secret_in

Built = tuple[Config, list[Default]]
"""A config with its recipe's defaults filled in, and what they are."""
_WORD_FOR = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_KNOWN_WRONG = {"gpu": "cuda", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_UNKNOWN_NAME = {
    "training.optimizer": "transformers has no optimizer of this name",
    "model.attn_implementation": "transformers has no attention kernel of this name",
    "monitor.report_to": "Trimtab does not know this tracker",
}
_LONGEST_WORD = 100
_STRAY = re.compile(r"[\0\ud800-\udfff]")
"""What a command line or an escape can bring and neither a path nor UTF-8 has: a zero, half of a character."""
_MOST_BITS = 256


@dataclass(frozen=True)
class Setting:
    """A setting by its own key, and what somebody wrote to set it."""

    key: str
    value: Any
    given: Given

    @property
    def note(self) -> str:
        """The alias that was written, with its value where that was converted."""
        if self.given.name in (self.key, self.key.partition(".")[0]):
            return ""
        if self.given.value == self.value:
            return f"written as {self.given.name}"
        return f"from {self.given.name} = {show(self.given.value, self.given.name)}"

    def problem(self, reason: str, change: str = "") -> Problem:
        """What is wrong with it; without a `change` of its own, to write what the setting takes."""
        value = show(self.value, "" if self.key in settings() else self.key)
        return Problem(self.key, value, reason, change or _way_out(self.key), self.given.origin, self.note)


def build(found: Mapping[str, Setting], wrong: set[str], problems: list[Problem]) -> Built | None:
    """The config, or None with the reasons added to `problems`. Keys in `wrong` are known to be so already."""
    usable = {key: _as_meant(setting) for key, setting in found.items() if key not in wrong}
    for key, setting in list(usable.items()):
        problem = _secret(setting) or _trust_by_file(setting) or _before_pydantic(setting)
        if problem:
            problems.append(problem)
            wrong.add(key)
            del usable[key]
    try:
        config = Config.model_validate(_nested(usable))
    except ValidationError as error:
        faults = _by_setting(error.errors(include_url=False, include_context=True))
        for key, details in faults.items():
            problems.append(_translate(usable, key, details))
            wrong.add(key)
        # Again without the wrong ones, so that conflicts among the right ones are in the same report.
        left = {key: setting for key, setting in usable.items() if setting_of(key) not in faults}
        config = Config.model_validate(_nested(left))
    filled, chosen = with_recipe_defaults(config)
    for conflict, keys in run_checks(filled, {setting_of(key) or key for key in wrong}):
        if not conflict.warning:
            problems.append(_conflict(filled, usable, conflict, keys))
    return None if problems else (filled, chosen)


def _nested(found: Mapping[str, Setting]) -> dict[str, Any]:
    """Settings as pydantic takes them. What the command line says of one column is laid over the file's mapping."""
    tree: dict[str, Any] = {}
    ordered = sorted(found.values(), key=lambda s: (s.given.origin.layer, s.key.count(".")))
    for setting in ordered:
        *parents, leaf = setting.key.split(".")
        branch = tree
        for depth, parent in enumerate(parents):
            inner = branch.get(parent, {})
            if depth and not isinstance(inner, dict):
                break  # `data.columns` is no mapping: pydantic will say so
            branch[parent] = dict(inner)
            branch = branch[parent]
        else:
            branch[leaf] = setting.value
    return tree


def _as_meant(setting: Setting) -> Setting:
    """On the command line, where the shell has eaten any quotes, `model.revision=1234567` means the text, and `none`
    null where no text can stand."""
    key, text = setting_of(setting.key) or setting.key, setting.given.text
    number = isinstance(setting.value, int | float) and not isinstance(setting.value, bool)
    takes = kinds(key)
    if text == "none" and "null" in takes and ("string" not in takes or choices(key)):
        return Setting(setting.key, None, setting.given)
    if text is None or not number or takes & {"integer", "number"} or not takes & {"string", "object"}:
        return setting
    return Setting(setting.key, text, setting.given)


def _secret(setting: Setting) -> Problem | None:
    """A value that may not be kept; nothing of it is shown."""
    why = secret_in(setting_of(setting.key) or setting.key, setting.value)
    if why is None:
        return None
    return Problem(setting.key, "(not shown)", *why, setting.given.origin)


def _trust_by_file(setting: Setting) -> Problem | None:
    """A file may come from anywhere: that code of a repository may run is for the person at the command line to say."""
    if setting.key != "model.trust_remote_code" or setting.given.origin.layer or not setting.value:
        return None
    return setting.problem(
        "would run a repository's code because a file says so",
        "remove it here; read that code, and if you trust it add --trust-remote-code OWNER/NAME to the command",
    )


def _before_pydantic(setting: Setting) -> Problem | None:
    """What pydantic would let through: true as the number 1, numbers without bound, names that a library lacks."""
    value = setting.value
    if (number := _too_long(value)) is not None:
        return setting.problem(f"holds a number of {number.bit_length():,} bits, which nothing here can use")
    takes = kinds(setting.key)
    if takes & {"integer", "number"}:
        return _number_problem(setting)
    given = value if isinstance(value, list) else [value]
    for name in given if (known := names_for(setting.key)) else ():
        if isinstance(name, str) and name not in known and not _is_kernel(setting.key, name):
            near = nearest(name, known)
            change = f"did you mean {near}? Or write one of " if near else "write one of "
            return setting.problem(_UNKNOWN_NAME[setting.key], change + ", ".join(known))
    if any(isinstance(number, float) and not math.isfinite(number) for number in leaves(value)):
        return setting.problem("holds a number that is not finite")
    if isinstance(value, str) and (stray := _STRAY.search(value)):
        return setting.problem(
            f"holds {stray.group()!a}, which no name of a file and no text may hold", "write it without"
        )
    return None


def _number_problem(setting: Setting) -> Problem | None:
    value = setting.value
    if isinstance(value, bool):
        return setting.problem("must be a number, not true or false")
    if not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return setting.problem("must be a finite number")
    form = bounds(setting.key)
    for bound, passes, text in (("maximum", operator.gt, "at most"), ("minimum", operator.lt, "at least")):
        if bound in form and passes(value, form[bound]):
            return setting.problem(f"must be {text} {plain_number(form[bound])}")
    return None


def _too_long(value: Any) -> int | None:
    """A whole number that has no counterpart in any library: of hundreds of digits."""
    whole = (leaf for leaf in leaves(value) if isinstance(leaf, int))
    return next((number for number in whole if number.bit_length() > _MOST_BITS), None)


def _is_kernel(key: str, name: str) -> bool:
    """Whether it names a kernel on the hub, `owner/name`, of which no list is here."""
    return key == "model.attn_implementation" and "/" in name


def _by_setting(errors: list[ErrorDetails]) -> dict[str, list[ErrorDetails]]:
    """One group for each setting: a union of types gives an error for each of its branches."""
    groups: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        first, *rest = (str(part) for part in error["loc"])
        key = f"{first}.{rest[0]}" if first in SECTIONS and rest else first
        groups.setdefault(key, []).append(error)
    return groups


def _translate(found: Mapping[str, Setting], key: str, errors: list[ErrorDetails]) -> Problem:
    rest = errors[0]["loc"][key.count(".") + 1 :]
    inside = f"{key}.{rest[0]}" if rest else key
    setting = found.get(inside) or found.get(key)
    if setting is None:
        # Only single columns were given: the one at fault is not named where the mapping as a whole is.
        setting = next(candidate for name, candidate in found.items() if setting_of(name) == key)
    value, kind, context = setting.value, errors[0]["type"], errors[0].get("ctx", {})
    words = choices(key) or (["auto", "cpu", "mps", "cuda"] if key == "device" else [])
    if words and isinstance(value, str):
        near = get_close_matches(value[:_LONGEST_WORD], words, n=1, cutoff=0.7)
        meant = _KNOWN_WRONG.get(value.lower()) or (near[0] if near else None)
        change = f"did you mean {meant}?" if meant in words else ""
        return setting.problem(f"must be {describe(key)}", change)
    if kind in _BOUNDS:
        bound, text = _BOUNDS[kind]
        return setting.problem(f"must be {text} {plain_number(context[bound])}")
    if kind == "string_too_short":
        return setting.problem("must not be empty")
    if kind == "int_from_float":
        return setting.problem("must be a whole number")
    if isinstance(value, list) and "array" in kinds(key):
        return setting.problem("must be a list of texts, each in quotes where it looks like a number")
    if "object" in kinds(key) and (setting.key == inside != key or isinstance(value, dict)):
        if maps_to_numbers(key):
            return setting.problem(f"{key} maps names to numbers", "write e.g. {a: 1.0, b: 0.2}")
        return setting.problem(
            f"{key} maps texts to texts", "write a name, in quotes where it looks like a number"
        )
    wanted = " or ".join(KIND_WORDS[form["type"]] for form in forms(key))
    return setting.problem(f"must be {wanted}, not {_WORD_FOR.get(type(value), 'null')}")


def _way_out(key: str) -> str:
    key = setting_of(key) or key
    free_text = kinds(key) <= {"string", "null"} and not choices(key) and key != "device"
    quotes = ", in quotes where it looks like something else" if free_text else ""
    return f"write {describe(key)}{quotes}; the default is {show(default_of(key))}"


def _conflict(
    config: Config, found: Mapping[str, Setting], conflict: Conflict, keys: tuple[str, ...]
) -> Problem:
    own = found.get(conflict.key)
    others = [found[key] for key in keys if key in found and key != conflict.key]
    parts = [own.note if own else "the default"]
    parts += [f"{other.key} {other.given.origin.phrase}" for other in others]
    origins = [setting.given.origin for setting in ([own] if own else others)]
    value = value_of_setting(config, conflict.key)
    note = "; ".join(part for part in parts if part)
    return Problem(
        conflict.key, show(value), conflict.reason, conflict.change, next(iter(origins), None), note
    )
