"""The way in: a YAML file, then `key=value` overrides, become one `Config`; every mistake goes into one report.

Reads (`read.py`), gives each setting its own name (here, by `aliases.py`), validates and checks (`validate.py`,
`checks.py`, rules in `rules_run.py` and with each recipe's section). There is no other source of settings: no
environment variable, no hidden file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.config.aliases import ALIASES, DENIALS, SECTION_ALIASES, Refused, alias_of
from trimtab.config.defaults import Default
from trimtab.config.elsewhere import ELSEWHERE
from trimtab.config.keys import SECTIONS, SHORTHANDS, kinds, setting_of, settings, suggest
from trimtab.config.problems import ConfigError, Problem, show
from trimtab.config.read import Given, read_overrides, read_yaml, text_of
from trimtab.config.schema import Config
from trimtab.config.validate import Setting, build

_GUESSED = 50
"""Unknown names for which the one that was meant is looked for."""
_REMOVE = "remove it; `trimtab config-schema` lists every setting"


@dataclass(frozen=True)
class Request:
    """What somebody asked for: settings with the recipe's defaults filled in, once, before anything is planned."""

    config: Config
    origin: str
    """Where the settings came from, in words."""
    defaults: tuple[Default, ...]
    """What the recipe chose, with its reasons, to be printed."""
    text: str = ""
    """The file that was read, as somebody wrote it."""
    found: Mapping[str, Setting] = field(default_factory=dict)
    """What was written, in the file or over it, by each setting's own key."""


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The settings in `path`, with `overrides` over them and the recipe's defaults where nothing was set.

    Raises `ConfigError` with every problem at once.
    """
    return load_request(path, overrides).config


def load_request(path: Path | None, overrides: Sequence[str], origin: str | None = None) -> Request:
    """The same, with what was chosen. `origin` stands for the path where that says nothing to a user."""
    text = text_of(path) if path else ""
    return _request(text, path, overrides, origin or str(path or "the command line"))


def load_text(text: str) -> Config:
    """The settings in a text that is no file yet."""
    return _request(text, Path("the text"), (), "the text").config


def _request(text: str, path: Path | None, overrides: Sequence[str], origin: str) -> Request:
    problems: list[Problem] = []
    from_file = read_yaml(text, path, problems) if path else []
    from_command_line = read_overrides(overrides, problems)
    if from_file is None:  # without it, what the rest means cannot be told
        raise ConfigError(problems)
    found, wrong = _resolve([*from_file, *from_command_line], problems)
    built = build(found, wrong, problems)
    if built is None:
        raise ConfigError(problems)
    config, defaults = built
    return Request(config, origin, tuple(defaults), text, found)


def _resolve(given: Iterable[Given], problems: list[Problem]) -> tuple[dict[str, Setting], set[str]]:
    """Settings by their own key, and the keys that are wrong already. The command line wins over the file."""
    latest = {item.path: item for item in given}
    meant: dict[str, list[Setting]] = {}
    wrong = {problem.key for problem in problems}
    unknown = 0
    for item in latest.values():
        try:
            for setting in settings_of(item, guess=unknown < _GUESSED):
                meant.setdefault(setting.key, []).append(setting)
        except Refused as refusal:
            alias = alias_of(item.path)
            wrong.add(alias.key if alias else item.name)
            unknown += 1
            value = show(item.value, item.name)
            problems.append(Problem(item.name, value, refusal.reason, refusal.change, item.origin))
    found: dict[str, Setting] = {}
    for key, candidates in meant.items():
        layer = max(candidate.given.origin.layer for candidate in candidates)
        first, *others = (c for c in candidates if c.given.origin.layer == layer)
        found[key] = first
        for other in others:
            if other.value != first.value:
                problems.append(_contradiction(first.given, other.given, key))
                wrong.add(key)
    for item in latest.values():
        _deny(item, found, wrong, problems)
        _check_strategy(item, found, wrong, problems)
    return found, wrong


def settings_of(item: Given, guess: bool = True) -> list[Setting]:
    """What one written setting sets. Raises `Refused` where it is not a setting of ours, or has no such value.

    With `guess` it names the setting that was perhaps meant, which takes its time.
    """
    path, key, value = item.path, item.name, item.value
    if key in SECTIONS:
        short = SHORTHANDS.get(key, "")
        plain = isinstance(value, str | int | float) and not isinstance(value, bool)
        if short and (plain or (value is None and "null" in kinds(short))):
            return [Setting(short, value, item)]
        also = f"text (short for {short}) or " if short else ""
        example = short or next(name for name in settings() if name.startswith(f"{key}."))
        raise Refused(f"must be {also}a section with settings under it", f"write e.g. {example}: VALUE")
    alias = alias_of(path)
    if alias and (alias.key == key or key not in settings()):
        if alias.convert:
            return [Setting(target, converted, item) for target, converted in alias.convert(value).items()]
        unset = value is None and alias.key != key and "null" not in kinds(alias.key)
        return [] if unset else [Setting(alias.key, value, item)]
    if setting_of(key):
        return [Setting(key, value, item)]
    return _unknown(item, guess)


def _unknown(item: Given, guess: bool) -> list[Setting]:
    known_elsewhere = ELSEWHERE.get(item.path[-1])
    if known_elsewhere and (len(item.path) == 1 or item.path[0] in SECTIONS):
        if item.value in known_elsewhere.harmless:
            return []
        raise Refused("is not a Trimtab setting", known_elsewhere.change)
    if not guess:
        raise Refused("is not a setting", _REMOVE)
    names = {name: alias.key for name, alias in ALIASES.items()} | SECTION_ALIASES.get(item.path[0], {})
    nested = isinstance(item.value, dict)
    closest = suggest(item.path, names, section_wanted=nested)
    hint = f"did you mean {closest}?" if closest else _REMOVE
    if nested and not closest and (meant := _meant_by(item.value)):
        hint = f"write {', '.join(meant)} instead"
    raise Refused("is not a setting", hint)


def _meant_by(section: dict[str, object]) -> list[str]:
    """The settings that a section of a name that we do not know holds; none where one of them is unknown too."""
    meant = []
    for name in section:
        ends = [key for key in settings() if key.rpartition(".")[2] == name]
        if name in ends:
            meant.append(name)
        elif alias := alias_of((name,)):
            meant.append(alias.key)
        elif len(ends) == 1:
            meant += ends
        else:
            return []
    return meant


def _contradiction(one: Given, other: Given, key: str) -> Problem:
    reason = f"contradicts {one.name} = {show(one.value, one.name)} ({one.origin}): both set {key}"
    return Problem(other.name, show(other.value, other.name), reason, "keep one of the two", other.origin)


def _deny(item: Given, found: dict[str, Setting], wrong: set[str], problems: list[Problem]) -> None:
    """Applies `bf16: false` and its like, which rule a value out and do not choose one."""
    denial = DENIALS.get(item.path[-1])
    if denial is None or item.value is not False or alias_of(item.path) is None:
        return
    chosen = found.get(denial.key)
    # `auto` beside a no leaves the choice open, unless it was said later.
    if chosen is None or (chosen.value == "auto" and chosen.given.origin.layer <= item.origin.layer):
        if denial.instead:
            found[denial.key] = Setting(denial.key, denial.instead, item)
    elif chosen.value == denial.value and chosen.given.origin.layer < item.origin.layer:
        del found[denial.key]
        if denial.instead:
            found[denial.key] = Setting(denial.key, denial.instead, item)
    elif (
        chosen.value == denial.value and chosen.given.origin.layer == item.origin.layer and denial.contradicts
    ):
        problems.append(_contradiction(chosen.given, item, denial.key))
        wrong.add(denial.key)


def _check_strategy(item: Given, found: dict[str, Setting], wrong: set[str], problems: list[Problem]) -> None:
    """`steps` says nothing without a number, and we make none up; `epoch` must be what then happens."""
    alias = alias_of(item.path)
    if item.path[-1] not in {"eval_strategy", "evaluation_strategy", "save_strategy"} or alias is None:
        return
    steps = found.get("training.eval_steps")
    if item.value == "steps" and alias.key not in found and alias.key not in wrong:
        reason, change = "does not say how often", f"add {alias.key}: N, or write epoch"
    elif item.value == "epoch" and item.path[-1] == "save_strategy" and steps and steps.value is not None:
        reason = (
            "cannot go with training.eval_steps: without training.save_steps a run saves when it evaluates"
        )
        change = f"write training.save_steps: {show(steps.value)}"
    else:
        return
    problems.append(Problem(item.name, show(item.value), reason, change, item.origin))
    wrong.add(alias.key)
