"""One entry of `lora.targets`: a role or name, which layers of its stack, which names in these. It looks at no weight.

`vision`, `attention:16-31`, `all-linear:24-`, `vision:0-3:q_proj,k_proj,v_proj`. A layer's number is the one in its
module's name; what stands outside the stacks (a connector) has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.errors import RequestError, some_of
from trimtab.placement.stacks import under

FORMS = "ROLE, ROLE:LAYERS or ROLE:LAYERS:NAMES, with layers as 3, 0-3 or 24- (to the last) and names as q_proj,k_proj"
_RANGE = re.compile(r"(\d+)(-(\d*))?")


@dataclass(frozen=True)
class Target:
    """What one entry asks for."""

    text: str
    who: str
    """A role, or the name of modules or blocks."""
    first: int | None = None
    """The first layer; None: all layers, and what stands outside them."""
    last: int | None = None
    """The last layer, itself included; None: to the end."""
    names: tuple[str, ...] = ()
    """Names of modules or blocks in those layers; none: all that the role means."""

    @classmethod
    def read(cls, text: str) -> Target:
        """Read an entry as it stands in the config."""
        who, *more = (part.strip() for part in text.split(":"))
        if not more and who:
            return cls(text, who)
        spans = _RANGE.fullmatch(more[0]) if more else None
        names = tuple(name.strip() for name in more[1].split(",")) if len(more) > 1 else ()
        if not who or spans is None or len(more) > 2 or not all(names):
            raise RequestError.of(f"lora.targets={text}: cannot be read", f"an entry is {FORMS}", _HOW)
        first = int(spans[1])
        last = first if spans[2] is None else int(spans[3]) if spans[3] else None
        if last is not None and last < first:
            raise RequestError.of(
                f"lora.targets={text}: layers {first}-{last}", "the last layer comes before the first", _HOW
            )
        return cls(text, who, first, last, names)

    def within(self, found: Sequence[str], stacks: Mapping[str, int]) -> list[str]:
        """Of the layers found for `who`, those that are meant; `stacks` says how many layers each stack has."""
        if self.first is None:
            return list(found)
        stack = self._stack(found, stacks)
        last = stacks[stack] - 1 if self.last is None else self.last
        if max(self.first, last) >= stacks[stack]:
            raise RequestError.of(
                f"lora.targets={self.text}: layers {self.first}-{'' if self.last is None else last}",
                f"{stack} has {stacks[stack]} layers, 0-{stacks[stack] - 1}",
                f"choose layers from 0 to {stacks[stack] - 1}",
            )
        layers = [f"{stack}.{number}" for number in range(self.first, last + 1)]
        inside = [name for name in found if any(under(name, layer) for layer in layers)]
        if not inside:
            raise RequestError.of(
                f"lora.targets={self.text}: nothing to adapt",
                f"layers {self.first}-{last} of {stack} have no {self.who}",
                "choose other layers, or another role",
            )
        return self._named(inside, stack) if self.names else inside

    def _stack(self, found: Sequence[str], stacks: Mapping[str, int]) -> str:
        """The one stack that the layers lie in."""
        holding = [stack for stack in stacks if any(under(name, stack) for name in found)]
        if len(holding) == 1:
            return holding[0]
        if not holding:
            raise RequestError.of(
                f"lora.targets={self.text}: {self.who} has no numbered layers",
                f"{some_of(list(found), 3)} stand outside the stacks of layers",
                f"write {self.who} alone, or the names of the modules",
            )
        sizes = ", ".join(f"{stack} ({stacks[stack]} layers)" for stack in holding)
        raise RequestError.of(
            f"lora.targets={self.text}: {self.who} has layers in {len(holding)} stacks",
            f"a layer's number means another one in each: {sizes}",
            f"name the block in the role's place, such as {holding[0]}:{self.text.partition(':')[2]}",
        )

    def _named(self, inside: Sequence[str], stack: str) -> list[str]:
        chosen: list[str] = []
        missing = []
        for name in self.names:
            # Only what follows the layer's number counts: `layers` or `3` is no name here.
            of_name = [n for n in inside if f".{name}." in f".{n.removeprefix(stack).split('.', 2)[2]}."]
            missing += [] if of_name else [name]
            chosen += of_name
        if missing:
            there = sorted({n.removeprefix(stack).split(".", 2)[2] for n in inside})
            raise RequestError.of(
                f"lora.targets={self.text}: {', '.join(missing)} not found in these layers",
                f"the {self.who} layers of {stack} have {', '.join(there)}",
                "use these names, or leave the names out",
            )
        return chosen

    def __str__(self) -> str:
        return self.text


_HOW = "write, for example, vision:0-3:q_proj,k_proj or attention:16-"
