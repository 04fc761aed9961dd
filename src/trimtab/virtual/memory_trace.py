"""The history of a device's memory as `torch.cuda.memory._record_memory_history` keeps it: each deed of the allocator.

While a program records, the deeds of its allocators are written down in the form that torch's snapshot has; where it
does not, nothing is put in their way. Which line asked is not kept (`frames` is empty): requests are carried out later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from trimtab.virtual.allocator import Allocator
from trimtab.virtual.allocator_parts import Bin, Piece

Entry = dict[str, Any]
_DEEDS = ("_malloc", "_free", "_freed", "_segment", "_released")


class Trace:
    """What one allocator has done since its program began to record."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque()

    def told(self) -> list[Entry]:
        return [dict(entry) for entry in self._entries]

    def begin(self, pool: Allocator, most: int, clear: bool, skipped: Collection[str] = ()) -> None:
        """Write down what the allocator does from now on, the last `most` deeds of it; what is skipped is left out."""
        self.end(pool)
        self._entries = deque(() if clear else self._entries, maxlen=most)
        deeds = {name: getattr(pool, name) for name in _DEEDS}

        def note(action: str, piece: Piece) -> None:
            if action in skipped:
                return
            self._entries.append(
                {
                    "action": action,
                    "addr": piece.address,
                    "size": piece.size,
                    "stream": piece.home.stream,
                    "time_us": time.time_ns() // 1000,
                    "frames": [],
                }
            )

        def taken(number: int, nbytes: int) -> int:
            size: int = deeds["_malloc"](number, nbytes)
            note("alloc", pool.live[number])
            return size

        def let_go(number: int) -> None:
            note("free_requested", pool.live[number])
            deeds["_free"](number)

        def freed(piece: Piece) -> None:
            note("free_completed", piece)  # before it is joined with its neighbours
            deeds["_freed"](piece)

        def segment(home: Bin, size: int) -> Piece:
            made: Piece = deeds["_segment"](home, size)
            note("segment_alloc", made)
            return made

        def released(piece: Piece) -> None:
            note("segment_free", piece)
            deeds["_released"](piece)

        watching: tuple[Callable[..., Any], ...] = (taken, let_go, freed, segment, released)
        pool.__dict__.update(zip(_DEEDS, watching, strict=True))

    def end(self, pool: Allocator) -> None:
        """Leave the allocator alone again; what was written down stays."""
        for name in _DEEDS:
            pool.__dict__.pop(name, None)
