"""Whose weights FSDP2 gathers, or whose gradients it reduces, in the collective that is about to be entered.

By their names two ranks can be told apart that make a collective of one size for two modules: nobody would wait, and
what they compute is mixed up. Looks at the stack alone.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

_FILE = os.path.join("_fully_shard", "_fsdp_collectives.py")
_CALLS = ("foreach_all_gather", "foreach_reduce")


def named() -> list[str]:
    """The names of the parameters; none where no collective of FSDP2 is under way, or they have no names yet."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CALLS and frame.f_code.co_filename.endswith(_FILE):
            names = [parameter._param_fqn for parameter in frame.f_locals.get("fsdp_params", ())]
            return names if all(names) else []
        frame = frame.f_back
    return []


def parted(first: list[str], second: list[str]) -> tuple[str, str] | None:
    """The modules of the first parameters that differ; None where all are the same, or one side does not know."""
    if not first or not second or first == second:
        return None
    pairs = zip(first, second, strict=False)
    one, other = next(((a, b) for a, b in pairs if a != b), (first[-1], second[-1]))
    return _module(one, other), _module(other, one)


def _module(name: str, other: str) -> str:
    """The name up to the part in which it differs from the other."""
    parts, others = name.split("."), other.split(".")
    same = next(
        (n for n, (a, b) in enumerate(zip(parts, others, strict=False)) if a != b),
        min(len(parts), len(others)),
    )
    return ".".join(parts[: same + 1])
