"""Settings as people type them: `--name value`, `--name=value`, `--switch` and `--no-switch`, told as `name=value`.

Knows which settings are questions of yes or no; it judges neither names nor values. A flag without the value that it
needs stays as it is, for `read.py` to report with everything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trimtab.config.aliases import alias_of
from trimtab.config.keys import SECTIONS, kinds, setting_of

_FLAG = re.compile(r"--(?=[A-Za-z_])")
_ANSWERS = {"true", "false", "yes", "no", "on", "off", "none", "null", "~", "auto", "0", "1"}


def as_words(arguments: Sequence[str]) -> list[str]:
    """The same settings as `name=value`; all else as it stands, in its order.

    A number below zero is a value like any other; one that begins with two dashes is written `--name=--value`.
    """
    words: list[str] = []
    rest = [argument for argument in arguments if argument != "--"]
    while rest:
        word = rest.pop(0)
        if not _FLAG.match(word):
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = _spelled(name)
        denied = name.removeprefix("no_")
        if equals:
            words.append(f"{name}={value}")
        elif not _is_known(name) and denied != name and _takes(denied) == {"boolean"}:
            words.append(f"{denied}=false")
        elif rest and _is_value(rest[0], _takes(name)):
            words.append(f"{name}={rest.pop(0)}")
        else:
            words.append(f"{name}=true" if "boolean" in _takes(name) else word)
    return words


def _spelled(name: str) -> str:
    """With underscores for dashes, but for names of the user's own, such as a column's."""
    return name if _is_known(name) else name.replace("-", "_")


def _is_known(name: str) -> bool:
    return name in SECTIONS or setting_of(name) is not None or alias_of(tuple(name.split("."))) is not None


def _takes(name: str) -> set[str]:
    """The types of value that a name takes; one that is not ours may be a switch, or have a value."""
    if not _is_known(name):
        return {"boolean", "string"}
    alias = alias_of(tuple(name.split(".")))
    if alias is not None and alias.switch:
        return {"boolean"}
    return kinds(alias.key if alias else setting_of(name) or "") - {"null"}


def _is_value(word: str, takes: set[str]) -> bool:
    if takes == {"boolean"}:
        return word.lower() in _ANSWERS
    name, equals, _ = word.partition("=")
    return not _FLAG.match(word) and not (equals and _is_known(name))
