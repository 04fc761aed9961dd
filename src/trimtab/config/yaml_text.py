"""The YAML that settings are written in: which plain words are numbers, what may stand in a file, and how much of it.

Numbers follow YAML 1.2 (`1e-4` is a number, `12:30` and `2024-01-01` are text). Only plain values, lists and mappings
are made: no tag can name a class or a function. Depth, count of values and what aliases unfold to are bounded, so that
a hostile file ends with an error and neither with the machine's memory nor with its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml

TAG = "tag:yaml.org,2002:"
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
DEEPEST = 50
"""Levels in one another; settings have three."""
MOST_VALUES = 20_000
"""Values in a file, those that aliases repeat counted each time; a config has some dozens, a long list of prompts
some thousands."""


_TOO_MANY = f"more than {MOST_VALUES:,} values"


class TooMuch(yaml.MarkedYAMLError):
    """What can be read, but not in any time or memory that settings are worth."""

    def __init__(self, problem: str, mark: yaml.Mark | None) -> None:
        super().__init__(None, None, problem, mark)


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with our number rules, for plain values, lists and mappings alone."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in {"null", "bool", "int", "float", "str", "seq", "map"}
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.duplicates: dict[int, tuple[yaml.ScalarNode, int]] = {}
        self._depth = self._count = 0

    def get_single_node(self) -> yaml.Node | None:
        """The one document, refused before anything is made of it where its aliases unfold without end."""
        node = super().get_single_node()
        if node is not None:
            _check_unfolded(node)
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Stops at what is too much where it comes to it, long before the end of the file."""
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > DEEPEST or self._count > MOST_VALUES:
            mark = self.peek_event().start_mark
            raise TooMuch(
                f"is nested deeper than {DEEPEST} levels" if self._depth > DEEPEST else f"has {_TOO_MANY}",
                mark,
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

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
    """Writes what `Loader` reads back unchanged: text that would read as a number gets quotes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML loses these line breaks in every style but the one that escapes them.
        style = '"' if any(sign in data for sign in "\r\x85\u2028\u2029") else None
        return self.represent_scalar(f"{TAG}str", data, style)


Dumper.add_representer(str, Dumper.represent_str)
for _class in (Loader, Dumper):
    _class.yaml_implicit_resolvers = {}  # none of YAML 1.1's own
    for _name, _pattern, _first in _SCALARS:
        _class.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_pattern})$"), list(_first))


def plain_tree(text: str) -> Any:
    """A document as plain values; raises ValueError where it cannot be read."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else loader.construct_object(node, deep=True)
    except (yaml.YAMLError, LookupError, ArithmeticError, TypeError) as error:
        raise ValueError(str(getattr(error, "problem", None) or error)) from None


def _check_unfolded(root: yaml.Node) -> None:
    """Count what aliases unfold to, each node once; one that holds itself has no end."""
    sizes: dict[int, int] = {}
    inside: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting[-1]
        if id(node) in sizes:
            waiting.pop()
            continue
        parts = list(_parts(node))
        ahead = [part for part in parts if id(part) not in sizes]
        if id(node) not in inside and ahead:
            inside.add(id(node))
            if any(id(part) in inside for part in ahead):
                raise TooMuch("has an alias inside what it stands for: it has no end", node.start_mark)
            waiting += ahead
            continue
        sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
        if sizes[id(node)] > MOST_VALUES:
            raise TooMuch(f"has aliases that unfold to {_TOO_MANY}", node.start_mark)
        inside.discard(id(node))
        waiting.pop()


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
