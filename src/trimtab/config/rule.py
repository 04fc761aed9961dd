"""What a rule between settings is, and what it finds. The general rules are in `rules_run.py`, a recipe's with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from trimtab.config.schema import Config


@dataclass(frozen=True)
class Conflict:
    """A setting that cannot stand next to the others, or (`warning`) that does nothing there."""

    key: str
    reason: str
    change: str
    warning: bool = False


Rule: TypeAlias = "Callable[[Config], Conflict | None]"


class Rules(list[tuple[tuple[str, ...], Rule]]):
    """Rules, each with the settings that it reads; it is left out where one of them is wrong already."""

    def reading(self, *keys: str) -> Callable[[Rule], Rule]:
        """Decorates a rule that reads these settings."""

        def add(rule: Rule) -> Rule:
            self.append((keys, rule))
            return rule

        return add

    def blame(
        self, keys: str, when: Callable[[Config], object], reason: str, change: str, *, warning: bool = False
    ) -> None:
        """Adds a rule: the first of `keys` is at fault when `when` holds; the texts may show settings as {c.device}."""

        def rule(c: Config) -> Conflict | None:
            return Conflict(at_fault, reason.format(c=c), change.format(c=c), warning) if when(c) else None

        at_fault, *others = keys.split()
        self.append(((at_fault, *others), rule))
