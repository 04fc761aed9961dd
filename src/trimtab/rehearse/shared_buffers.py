"""The buffers that DDP copies from its first rank to the others before a pass. One that a program binds anew, of a size
that its rows decide, has another size on every rank. Looks at the stack, and at records.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

from trimtab.diagnose import source
from trimtab.diagnose.branches import Said

Record = dict[str, Any]
_FILE = os.path.join("torch", "nn", "parallel", "distributed.py")


def named() -> dict[str, dict[str, Any]]:
    """The shape of each buffer and the line that made it, while DDP shares them; else nothing."""
    from trimtab.virtual import origin

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_sync_module_buffers" and frame.f_code.co_filename.endswith(_FILE):
            found = {}
            for name, buffer in frame.f_locals["self"].module.named_buffers():
                born = origin.born_of(buffer)
                found[name] = {"shape": list(buffer.shape), "born": list(born[:2]) if born else None}
            return found
        frame = frame.f_back
    return {}


def parted(low: int, first: Record, high: int, second: Record) -> Said | None:
    """What to say of ranks whose buffers are of other sizes; None where these do not part them."""
    mine, theirs = first.get("buffers") or {}, second.get("buffers") or {}
    name = next((n for n in mine if n in theirs and mine[n]["shape"] != theirs[n]["shape"]), None)
    if name is None:
        return None
    sizes = [" x ".join(map(str, side[name]["shape"])) for side in (mine, theirs)]
    why = (
        f"DDP copies every buffer of rank 0 to the others before a pass, and `{name}`, which is made here, is "
        f"{sizes[0]} on rank {low} and {sizes[1]} on rank {high}"
    )
    fix = (
        f"Keep `{name}` at one size on every rank (a ring of fixed length), make it of what all ranks gather, or let "
        "each rank have its own: DistributedDataParallel(..., broadcast_buffers=False)."
    )
    born = mine[name]["born"] or theirs[name]["born"]
    return Said(source.cause(born[0], born[1], why) if born else None, fix)
