"""Reads settings as they were written: a YAML file, then `key=value` words from the command line.

Gives each with the place it stands at. Never judges whether a setting exists or its value fits; it reports
only what cannot be read. What YAML is here, and how much of it, says `yaml_text.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from trimtab.config.keys import SECTIONS, choices, kinds
from trimtab.config.problems import COMMAND_LINE, Origin, Problem, is_secret, show
from trimtab.config.yaml_text import TAG, Loader, TooMuch
from trimtab.errors import RequestError
from trimtab.reading import MOST_SETTINGS, read_text

_UNREADABLE = (yaml.YAMLError, ValueError, LookupError, ArithmeticError, TypeError)
"""What PyYAML raises: its own errors, and bare ones for values such as `!!int abc`."""


@dataclass(frozen=True)
class Given:
    """One setting as somebody wrote it."""

    path: tuple[str, ...]
    value: Any
    origin: Origin
    text: str | None = None
    """The characters of a plain value on the command line, where quotes are the shell's and say nothing."""

    @property
    def name(self) -> str:
        return ".".join(self.path)


def read_yaml(text: str, path: Path, problems: list[Problem]) -> list[Given] | None:
    """The settings in the text of a YAML file; None when the whole of it cannot be read."""
    try:
        loader = Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(error, path, text))
        return None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
        change = "write `name: value` lines, e.g. `model: smollm2`"
        origin = Origin(str(path), root.start_mark.line + 1, 0)
        problems.append(Problem(str(path), None, f"holds {kind}, not settings", change, origin))
        return None
    given = list(_walk(loader, (), root, str(path), problems))
    for key, first_line in loader.duplicates.values():  # those inside a value, which the walk does not enter
        origin = Origin(str(path), key.start_mark.line + 1, 0)
        problems.append(_duplicate_problem(key.value, first_line, origin))
    return given


def read_overrides(overrides: Sequence[str], problems: list[Problem]) -> list[Given]:
    """The settings given as `key=value`, in order; values are read as YAML."""
    given: list[Given] = []
    for number, word in enumerate(overrides, 1):
        origin = Origin(COMMAND_LINE, number, 1)
        name, equals, text = word.partition("=")
        name, text = name.strip().lstrip("-"), text.strip()
        if not equals or not name:
            reason = "is not of the form key=value or --key value"
            change = "write e.g. training.learning_rate=1e-4; put quotes around an argument with spaces in it"
            if word.startswith("--"):
                reason = "needs a value"
                change = (
                    f"write {word} VALUE, or {word}=VALUE where it begins with dashes or reads as a setting"
                )
            problems.append(Problem(show(word, word), None, reason, change, origin))
            continue
        path = tuple(name.split("."))
        only_text = bool(kinds(name)) and kinds(name) <= {"string", "null"} and not choices(name)
        if only_text and text.startswith("{"):
            # A template such as `{sentence} It was` is no mapping where only text can stand.
            given.append(Given(path, text, origin, text))
            continue
        if not text.startswith(("[", "{", '"', "'")):
            # Not handed to the YAML parser: `#`, `: ` and `*` in a path or a prompt mean themselves here.
            given.append(Given(path, _plain_value(text), origin, text))
            continue
        try:
            given.extend(_bracketed(path, text, origin))
        except TooMuch as error:
            change = "write a shorter value, or a file of settings"
            problems.append(Problem(name, show(text, name), str(error.problem), change, origin))
        except _UNREADABLE:
            reason = "cannot be read: a bracket or a quote is not closed, or a key stands twice"
            change = f"close it, and quote the whole argument for the shell: '{name}=[a, b]'"
            problems.append(Problem(name, show(text, name), reason, change, origin))
    return given


def _walk(
    loader: Loader,
    path: tuple[str, ...],
    mapping: yaml.MappingNode,
    place: str,
    problems: list[Problem],
) -> Iterator[Given]:
    """The settings of a mapping, going down into the sections that the schema knows."""
    try:
        loader.flatten_mapping(mapping)
    except yaml.YAMLError as error:
        origin = Origin(place, mapping.start_mark.line + 1, 0)
        problems.append(_value_problem(error, ".".join((*path, "<<")), origin))
        return
    for key_node, value_node in mapping.value:
        origin = Origin(place, key_node.start_mark.line + 1, 0)
        if not isinstance(key_node, yaml.ScalarNode):
            reason, change = "the name of a setting must be plain text", "write `name: value`"
            problems.append(Problem(".".join(path) or place, None, reason, change, origin))
            continue
        here = (*path, *key_node.value.split("."))
        if id(key_node) in loader.duplicates:
            _, first_line = loader.duplicates.pop(id(key_node))
            problems.append(_duplicate_problem(".".join(here), first_line, origin))
        elif len(here) == 1 and here[0] in SECTIONS and isinstance(value_node, yaml.MappingNode):
            yield from _walk(loader, here, value_node, place, problems)
        elif len(here) == 1 and here[0] in SECTIONS and value_node.tag == f"{TAG}null":
            pass  # `lora:` with everything under it commented out
        else:
            try:
                yield Given(here, _constructed(loader, value_node), origin)
            except _UNREADABLE as error:
                problems.append(_value_problem(error, ".".join(here), origin))


def _duplicate_problem(key: str, first_line: int, origin: Origin) -> Problem:
    reason = f"stands twice, first on line {first_line}: only one of the two can count"
    return Problem(key, None, reason, "remove one of them", origin)


def _bracketed(path: tuple[str, ...], text: str, origin: Origin) -> list[Given]:
    """A list, mapping or quoted text on the command line; a mapping for a section counts as its settings."""
    loader = Loader(text)
    value = _constructed(loader, loader.get_single_node())
    if loader.duplicates:
        raise ValueError("a key stands twice")
    if isinstance(value, dict) and len(path) == 1 and path[0] in SECTIONS:
        return [Given((*path, *str(key).split(".")), item, origin) for key, item in value.items()]
    return [Given(path, value, origin)]


def _constructed(loader: Loader, node: yaml.Node | None) -> Any:
    """The value of a node; unlike PyYAML's own way, one that holds itself (`&a [*a]`) cannot be read."""
    return loader.construct_object(node, deep=True)


def _plain_value(text: str) -> Any:
    loader = Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    try:
        return loader.construct_document(yaml.ScalarNode(tag, text))
    except ValueError:  # an integer of thousands of digits
        return text


def _value_problem(error: Exception, key: str, origin: Origin) -> Problem:
    detail = getattr(error, "problem", None)
    reason = f"cannot be read: {detail}" if detail and not is_secret(key) else "cannot be read as YAML"
    return Problem(
        key, None, reason, "write a plain value, a list or a mapping; text may stand in quotes", origin
    )


def _syntax_problem(error: yaml.YAMLError, path: Path, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    line = mark.line + 1 if mark else text[: getattr(error, "position", 0)].count("\n") + 1
    lines = text.splitlines()
    source = lines[line - 1] if line <= len(lines) else ""
    detail = getattr(error, "problem", None) or "a character that YAML does not allow"
    if isinstance(error, TooMuch):
        change = "settings are some dozens of lines: check that this is the file that was meant"
        return Problem(str(path), None, detail, change, Origin(str(path), line, 0))
    reason = "is not valid YAML" if is_secret(source) else f"is not valid YAML: {detail}"
    if "\t" in source[: len(source) - len(source.lstrip())]:
        reason, change = "is not valid YAML: a tab in the indentation", "indent with spaces"
    elif "single document" in str(getattr(error, "context", "")):
        reason, change = "holds more than one YAML document", "keep one; remove the `---` line between them"
    else:
        change = (
            f"look at line {line} and the one before: indentation, a missing `:` or quote, an open bracket"
        )
    return Problem(str(path), None, reason, change, Origin(str(path), line, 0))


def text_of(path: Path) -> str:
    """The text of a file of settings. A missing file is raised."""
    try:
        return read_text(path, MOST_SETTINGS)
    except FileNotFoundError:
        told = (f"the config {path} was not found", *_missing(path))
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        told = (f"{path} cannot be read", reason, "check the path and its permissions")
    raise RequestError.of(*told)


def _missing(path: Path) -> tuple[str, str]:
    """Why there is no such file, and which one was perhaps meant."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist", "check the path"
    try:
        near = sorted(entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"})
    except OSError as error:
        return f"the folder {folder} cannot be listed ({error.strerror})", "check the path"
    alike = get_close_matches(path.name, near, n=3, cutoff=0.5) or near[:3]
    meant = (
        f"did you mean {' or '.join(str(folder / name) for name in alike)}?" if alike else "check the path"
    )
    return f"there is no such file in {folder.resolve()}", meant
