"""A config with some settings changed, as its author wrote it: the same text with the same comments, and nothing more.

Values are exchanged where they stand, and what is new is put into its section. The text that comes of it is read back,
and where it does not say what was meant (anchors, names that stand for several settings) the same settings are written
anew, without comments. It writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from trimtab.config.aliases import Refused
from trimtab.config.dump import dump_config
from trimtab.config.facts import value_of_setting
from trimtab.config.keys import SECTIONS, SHORTHANDS, settings
from trimtab.config.load import Request, load_text, settings_of
from trimtab.config.problems import ConfigError, Origin
from trimtab.config.read import Given
from trimtab.config.schema import Config
from trimtab.config.secrets import refuse_secrets
from trimtab.config.yaml_text import Dumper, Loader

TRUST = "model.trust_remote_code"
"""Given by a flag each time, never by a file."""


def changed_settings(before: Config, after: Config) -> dict[str, Any]:
    """The settings in which two configs differ, with the later values."""
    told = {key: value_of_setting(after, key) for key in settings() if key != TRUST}
    return {key: value for key, value in told.items() if value != value_of_setting(before, key)}


def edited_text(request: Request, wanted: Config) -> str:
    """The file of `request`, with what was said over it on the command line, and with what `wanted` has otherwise."""
    refuse_secrets(wanted)
    said = {key: s.value for key, s in request.found.items() if s.given.origin.layer > 0 and key != TRUST}
    changes = {**said, **changed_settings(request.config, wanted)}
    short = _edited(request.text, changes)
    if short is not None and _says(short, wanted):
        return short
    given = {key: setting.value for key, setting in request.found.items() if key != TRUST}
    plain = _written({**given, **changes})
    return plain if _says(plain, wanted) else dump_config(wanted)


def _says(text: str, wanted: Config) -> bool:
    try:
        return not changed_settings(load_text(text), wanted)
    except ConfigError:
        return False


def _written(tree: Mapping[str, Any]) -> str:
    """Settings by their keys, each under its section."""
    nested: dict[str, Any] = {}
    for key, value in tree.items():
        section, _, leaf = key.rpartition(".")
        if section in SECTIONS:
            nested.setdefault(section, {})[leaf] = value
        else:
            nested[key] = value
    return yaml.dump(nested, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


@dataclass(frozen=True)
class _Entry:
    """A setting where it stands."""

    key: yaml.ScalarNode
    value: yaml.Node
    sets: tuple[str, ...]
    """The settings that it sets; empty for what is none."""
    flow: bool
    """Whether it stands in braces."""


def _edited(text: str, changes: Mapping[str, Any]) -> str | None:
    """The text with these settings; None where that is beyond an exchange of values."""
    loader = Loader(text)
    root = loader.get_single_node()
    if root is None:
        return text.rstrip() + ("\n" if text.strip() else "") + _written(changes) if changes else text
    if not isinstance(root, yaml.MappingNode) or root.flow_style or _shares(root):
        return None
    entries = list(_entries(loader, root))
    edits: list[tuple[int, int, str]] = []
    fresh: dict[str, Any] = {}
    for key, value in changes.items():
        here = [entry for entry in entries if key in entry.sets]
        if any(len(entry.sets) > 1 for entry in here):
            return None
        for entry in here:
            if loader.construct_object(entry.value, deep=True) != value:
                edits += _exchanged(text, entry, value)
        if not here:
            fresh[key] = value
    added = _added(text, root, fresh)
    if added is None:
        return None
    more, rest = added
    for start, end, new in sorted([*edits, *more], key=lambda edit: edit[:2], reverse=True):
        text = text[:start] + new + text[end:]
    return text.rstrip("\n") + "\n" + (_written(rest) if rest else "")


def _shares(node: yaml.Node) -> bool:
    """Whether a part stands for others too (anchors, `<<`), so that a change of it would change those."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or one.tag.endswith(":merge"):
            return True
        seen.add(id(one))
        if isinstance(one, yaml.SequenceNode):
            waiting += one.value
        elif isinstance(one, yaml.MappingNode):
            waiting += [part for pair in one.value for part in pair]
    return False


def _entries(loader: Loader, mapping: yaml.MappingNode, above: tuple[str, ...] = ()) -> Iterator[_Entry]:
    for key, value in mapping.value:
        path = (*above, *key.value.split("."))
        if not above and key.value in SECTIONS and isinstance(value, yaml.MappingNode):
            yield from _entries(loader, value, path)
            continue
        given = Given(path, loader.construct_object(value, deep=True), Origin("", 0, 0))
        try:
            sets = tuple(setting.key for setting in settings_of(given, guess=False))
        except Refused:
            sets = ()
        yield _Entry(key, value, sets, bool(mapping.flow_style))


def _exchanged(text: str, entry: _Entry, value: Any) -> list[tuple[int, int, str]]:
    """Another value in an entry; beside it what it was, before what its author said of it."""
    start, end = entry.value.start_mark.index, _end(entry.value)
    old = text[start:end]
    new = _inline(value) if start > entry.key.end_mark.index + 1 else f" {_inline(value)}"
    rest = text[end:].partition("\n")[0]
    if (
        entry.flow
        or "\n" in old
        or not isinstance(entry.value, yaml.ScalarNode)
        or rest.strip()[:1] not in ("", "#")
    ):
        return [(start, end, new)]
    said = rest.strip().lstrip("#").strip()
    was = f"  # was {old.strip() or 'null'}" + (f" ({said})" if said else "")
    return [(start, end + len(rest), new + was)]


def _added(
    text: str, root: yaml.MappingNode, fresh: Mapping[str, Any]
) -> tuple[list[tuple[int, int, str]], dict[str, Any]] | None:
    """Where settings go that are not there yet, and those whose section is not there either."""
    nodes = {key.value: value for key, value in root.value}
    edits: list[tuple[int, int, str]] = []
    rest: dict[str, Any] = {}
    for section in dict.fromkeys(key.rpartition(".")[0] for key in fresh):
        own = {key.rpartition(".")[2]: fresh[key] for key in fresh if key.rpartition(".")[0] == section}
        node = nodes.get(section)
        if node is None:
            rest |= {f"{section}.{leaf}" if section else leaf: value for leaf, value in own.items()}
        elif isinstance(node, yaml.MappingNode) and node.value:
            edits.append(_inside(text, node, own))
        elif isinstance(node, yaml.ScalarNode) and section in SHORTHANDS and node.value:
            whole = {SHORTHANDS[section].rpartition(".")[2]: node.value, **own}
            edits.append((node.start_mark.index, node.end_mark.index, _inline(whole)))
        else:
            return None
    return edits, rest


def _inside(text: str, section: yaml.MappingNode, own: Mapping[str, Any]) -> tuple[int, int, str]:
    """Settings behind the last one of a section."""
    last = _end(section.value[-1][1])
    if section.flow_style:
        return last, last, "".join(f", {leaf}: {_inline(value)}" for leaf, value in own.items())
    line_end = text.find("\n", last)
    place = len(text) if line_end < 0 else line_end
    indent = " " * section.value[0][0].start_mark.column
    return place, place, "".join(f"\n{indent}{leaf}: {_inline(value)}" for leaf, value in own.items())


def _end(node: yaml.Node) -> int:
    """Where a node's own text ends: of a block of several lines the mark stands behind what follows it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _inline(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.dump(
        value, Dumper=Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()
