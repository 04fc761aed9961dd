"""Reads settings as they were written: a YAML file, then `key=value` words from the command line.

Gives each with the place it stands at. Never judges whether a setting exists or its value fits; it reports
only what cannot be read. Numbers follow YAML 1.2 (`1e-4` is a number, `12:30` and `2024-01-01` are text).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import yaml

from trimtab.config.keys import SECTIONS, choices, kinds
from trimtab.config.problems import COMMAND_LINE, Origin, Problem, is_secret, show
from trimtab.errors import RequestError

_TAG = "tag:yaml.org,2002:"
_SCALARS = [
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    (
        "bool",
        r"(?:y|Y)es|YES|(?:n|N)o|NO|(?:t|T)rue|TRUE|(?:f|F)alse|FALSE|(?:o|O)n|ON|(?:o|O)ff|OFF",
        "yYnNtTfFoO",
    ),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
]
_UNREADABLE = (yaml.YAMLError, ValueError, KeyError)
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


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with our number rules, for plain values, lists and mappings alone."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in {"null", "bool", "int", "float", "str", "seq", "map"}
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: dict[int, tuple[yaml.ScalarNode, int]] = {}

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Notes keys that stand twice here, where each mapping passes once, before `<<` adds keys to it."""
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in first:
                self.duplicates[id(key)] = (key, first[key.value])
            elif isinstance(key, yaml.ScalarNode):
                first[key.value] = key.start_mark.line + 1
        return node


class Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back unchanged: text that would read as a number gets quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML loses these line breaks in every style but the one that escapes them.
        style = '"' if any(sign in data for sign in "\r\x85\u2028\u2029") else None
        return self.represent_scalar(f"{_TAG}str", data, style)


Dumper.add_representer(str, Dumper.represent_str)
for _class in (_Loader, Dumper):
    _class.yaml_implicit_resolvers = {}  # none of YAML 1.1's own
    for _name, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_file(path: Path, problems: list[Problem]) -> list[Given] | None:
    """The settings in a YAML file; None when the whole of it cannot be read. A missing file is raised."""
    text = _text_of(path)
    try:
        loader = _Loader(text)
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
        except _UNREADABLE:
            reason = "cannot be read: a bracket or a quote is not closed, or a key stands twice"
            change = f"close it, and quote the whole argument for the shell: '{name}=[a, b]'"
            problems.append(Problem(name, show(text, name), reason, change, origin))
    return given


def _walk(
    loader: _Loader,
    path: tuple[str, ...],
    mapping: yaml.MappingNode,
    place: str,
    problems: list[Problem],
) -> Iterator[Given]:
    """The settings of a mapping, going down into the sections that the schema knows."""
    loader.flatten_mapping(mapping)
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
        elif len(here) == 1 and here[0] in SECTIONS and value_node.tag == f"{_TAG}null":
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
    loader = _Loader(text)
    value = _constructed(loader, loader.get_single_node())
    if loader.duplicates:
        raise ValueError("a key stands twice")
    if isinstance(value, dict) and len(path) == 1 and path[0] in SECTIONS:
        return [Given((*path, *str(key).split(".")), item, origin) for key, item in value.items()]
    return [Given(path, value, origin)]


def _constructed(loader: _Loader, node: yaml.Node | None) -> Any:
    """The value of a node; unlike PyYAML's own way, one that holds itself (`&a [*a]`) cannot be read."""
    return loader.construct_object(node, deep=True)


def _plain_value(text: str) -> Any:
    loader = _Loader("")
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


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        told = (f"the config {path} was not found", *_missing(path))
    except IsADirectoryError:
        told = (f"{path} is a folder", "settings are read from one YAML file", "name the file in it")
    except UnicodeDecodeError as error:
        told = (f"{path} is not UTF-8 text (byte {error.start})", "YAML is text", "save the file as UTF-8")
    except OSError as error:
        told = (f"{path} cannot be read", error.strerror or str(error), "check the path and its permissions")
    raise RequestError.of(*told)


def _missing(path: Path) -> tuple[str, str]:
    """Why there is no such file, and which one was perhaps meant."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist", "check the path"
    near = sorted(entry.name for entry in folder.iterdir() if entry.suffix in {".yaml", ".yml"})
    alike = get_close_matches(path.name, near, n=3, cutoff=0.5) or near[:3]
    meant = (
        f"did you mean {' or '.join(str(folder / name) for name in alike)}?" if alike else "check the path"
    )
    return f"there is no such file in {folder.resolve()}", meant
