"""CUDA's caching allocator as torch has it, for one device: which piece serves a request, what stays reserved.

Requests up to 1 MiB are cut from segments of 2 MiB, larger ones from segments of 20 MiB or of their own; a freed piece
joins its free neighbours and is handed out again on its stream; segments go back to the device when it is full, or by
`empty_cache`. It keeps sizes and addresses only. Never knows a tensor: see memory.py.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Protocol

from trimtab.virtual.allocator_growing import Growing, reach
from trimtab.virtual.allocator_parts import SHARED, SHIFT, Bin, Figures, Piece, PoolId, Space
from trimtab.virtual.allocator_settings import MIB, UNLIMITED, Settings

SMALL = MIB
"""The largest request that is cut from a small segment."""
SMALL_SEGMENT = 2 * MIB
_OWN_SEGMENT = 10 * MIB
"""Requests from here on get a segment of their own size, to the next 2 MiB."""
_BASE = 0x7F00_0000_0000


class NoRoom(Exception):
    """A request that does not fit, even after everything unused was given back."""


class Stretch(Protocol):
    """Events to carry out (see ledger.py): an allocation by its bytes, a release by `~` of its number."""

    events: array[int]
    done: int
    peak: int
    peak_at: int
    reserved: int


class Allocator:
    """The allocator of one device."""

    def __init__(self, total: int, context: int = 0, settings: Settings | None = None) -> None:
        self.total = total
        """The memory of the device, in bytes."""
        self.room = total - context
        """What it has for tensors: CUDA's own share is taken off."""
        self.allowed: int | None = None
        """Less than that where the program set a fraction."""
        self.beyond = False
        """Whether a request that does not fit is met all the same."""
        self.lock = threading.RLock()
        self.busy = False
        self.small_pool, self.large_pool, self.both = Figures(), Figures(), Figures()
        self.oversize = Figures()
        """Of pieces that may not be split: `allocations` and `segments`."""
        self.retries = self.ooms = self.synchronized = self.device_allocs = self.device_frees = 0
        self.live: dict[int, Piece] = {}
        """Pieces in use, by the number of their allocation."""
        self.number = 0
        """How many allocations were carried out."""
        self.waiting: list[Piece] = []
        """Freed, but used on another stream until the next request finds that done."""
        self.awaited = 0
        """How many were freed so: on hardware they wait as long as the other stream takes, which nobody knows here."""
        self._calls = 0
        self._freed_at: dict[int, int] = {}
        """By address, after how many requests a piece was freed (garbage_collection_threshold)."""
        self._bins: dict[tuple[PoolId, int, bool], Bin] = {}
        self._freeable: set[PoolId] = set()
        self._next = _BASE
        self._space = Space(_BASE)
        self._growing = Growing(self.room * 9 // 8, self._reserve, self._left)
        self.pool, self.stream = SHARED, 0
        self.select(0)
        self.configure(settings or Settings())

    @property
    def limit(self) -> int:
        return self.room if self.allowed is None else min(self.room, self.allowed)

    def _left(self) -> int:
        return self.room - self.both.reserved if not self.beyond else UNLIMITED

    def configure(self, settings: Settings) -> None:
        """How requests are met from now on."""
        self.settings = settings
        self._plain = settings.plain and not settings.collect_above
        self._growing.large_page = settings.large_segment
        if settings.fraction is not None:
            self.allowed = int(settings.fraction * self.total)

    def select(self, stream: int, pool: PoolId | None = None) -> None:
        """Requests are for this stream (and pool) from now on."""
        self.stream = stream
        self.pool = pool if pool is not None else self.pool
        self._small, self._large = (self._bin(self.pool, stream, small) for small in (True, False))

    def _bin(self, pool: PoolId, stream: int, small: bool) -> Bin:
        key = (pool, stream, small)
        if key not in self._bins:
            self._bins[key] = Bin(pool, stream, small, self.small_pool if small else self.large_pool)
        return self._bins[key]

    def replay(self, stretch: Stretch) -> None:
        """Carry out the events that are not done yet; the bytes of each become those that were taken for it."""
        with self.lock:
            if self.busy:
                return  # a finalizer that ran inside asks again
            self.busy = True
            events, both = stretch.events, self.both
            at, end = stretch.done, len(stretch.events)
            try:
                while at < end:
                    event = events[at]
                    at += 1
                    if event < 0:
                        self._free(~event)
                    elif event:
                        events[at - 1] = 0
                        self.number += 1
                        events[at - 1] = self._malloc(self.number - 1, event)
                        if both.allocated > stretch.peak:
                            stretch.peak, stretch.peak_at = both.allocated, at - 1
                        if both.reserved > stretch.reserved:
                            stretch.reserved = both.reserved
            finally:
                stretch.done = at
                self.busy = False

    def _malloc(self, number: int, nbytes: int) -> int:
        """Meet a request; gives the bytes that are taken for it."""
        if self.waiting:
            self._end_uses()
        settings, plain = self.settings, self._plain
        size = (nbytes + 511) & -512 if plain else settings.rounded(nbytes)
        home = self._small if size <= SMALL else self._large
        keys = home.keys
        place = bisect_left(keys, size << SHIFT)
        if not plain:
            self._calls += 1
            place = self._chosen(home, place, size)
        figures, both = home.figures, self.both
        if place < len(keys):
            piece = home.pieces.pop(keys.pop(place))
            was_split = piece.before is not None or piece.after is not None
        else:
            piece, was_split = self._from_device(home, size), False
        rest = piece.size - size
        if rest and (home.small or (rest > SMALL and size < settings.max_split) or settings.expandable):
            remainder, piece = piece, piece.cut(size, False)
            key = rest << SHIFT | remainder.address >> 9
            insort(keys, key)
            home.pieces[key] = remainder
            if was_split and not piece.grows:
                figures.split_bytes -= size
                both.split_bytes -= size
            elif not piece.grows:
                self._split_change(figures, 1, rest)
        else:
            size = piece.size
            piece.free = False
            if was_split and not piece.grows:
                figures.splits -= 1
                both.splits -= 1
                figures.split_bytes -= size
                both.split_bytes -= size
        piece.requested = nbytes
        self.live[number] = piece
        figures.allocated_gained += size
        figures.requested_gained += nbytes
        figures.allocations_gained += 1
        figures.allocations = now = figures.allocations + 1
        if now > figures.allocations_peak:
            figures.allocations_peak = now
        both.allocations = now = both.allocations + 1
        if now > both.allocations_peak:
            both.allocations_peak = now
        figures.allocated = now = figures.allocated + size
        if now > figures.allocated_peak:
            figures.allocated_peak = now
        both.allocated = now = both.allocated + size
        if now > both.allocated_peak:
            both.allocated_peak = now
        figures.requested = now = figures.requested + nbytes
        if now > figures.requested_peak:
            figures.requested_peak = now
        both.requested = now = both.requested + nbytes
        if now > both.requested_peak:
            both.requested_peak = now
        if size >= settings.max_split:
            self.oversize.add("allocations", 1)
        return size

    def _free(self, number: int) -> None:
        """An allocation is no longer held."""
        piece = self.live.pop(number)
        size, figures, both = piece.size, piece.home.figures, self.both
        figures.allocated -= size
        both.allocated -= size
        figures.allocations -= 1
        both.allocations -= 1
        if size >= self.settings.max_split:
            self.oversize.add("allocations", -1)
        if piece.uses:
            self.waiting.append(piece)
            self.awaited += 1
        else:
            self._freed(piece)

    def _freed(self, piece: Piece) -> None:
        """Put a piece among the free ones, joined with its free neighbours."""
        home, both = piece.home, self.both
        figures, keys, pieces = home.figures, home.keys, home.pieces
        figures.requested -= piece.requested
        both.requested -= piece.requested
        size, count = piece.size, 1
        before, after = piece.before, piece.after
        if before is not None and before.free and before.mapped:
            key = before.size << SHIFT | before.address >> 9
            del keys[bisect_left(keys, key)], pieces[key]
            piece.join(before)
            count = 0
        if after is not None and after.free and after.mapped:
            key = after.size << SHIFT | after.address >> 9
            del keys[bisect_left(keys, key)], pieces[key]
            piece.join(after)
            count -= 1
        piece.free = True
        key = piece.size << SHIFT | piece.address >> 9
        insort(keys, key)
        pieces[key] = piece
        if not self._plain:
            self._freed_at[piece.address] = self._calls
            if piece.grows:
                return
        if piece.before is None and piece.after is None:
            self._split_change(figures, count - 1, size - piece.size)
        else:
            self._split_change(figures, count, size)

    def _split_change(self, figures: Figures, count: int, nbytes: int) -> None:
        """The free pieces that cannot go back have become more or fewer."""
        if nbytes > 0:
            figures.split_bytes_gained += nbytes
        if count > 0:
            figures.splits_gained += count
        for part in (figures, self.both):
            part.splits = now = part.splits + count
            if now > part.splits_peak:
                part.splits_peak = now
            part.split_bytes = now = part.split_bytes + nbytes
            if now > part.split_bytes_peak:
                part.split_bytes_peak = now

    def use(self, number: int, stream: int) -> None:
        """An allocation is used on another stream (Tensor.record_stream)."""
        piece = self.live[number]
        if stream != piece.home.stream:
            piece.uses = (piece.uses or set()) | {stream}

    def _end_uses(self) -> None:
        waiting, self.waiting = self.waiting, []
        for piece in waiting:
            piece.uses = None
            self._freed(piece)

    def _chosen(self, home: Bin, place: int, size: int) -> int:
        """Which of the free pieces that are large enough serves; their number when none does."""
        settings, keys, pieces = self.settings, home.keys, home.pieces
        count = len(keys)
        if place < count and pieces[keys[place]].grows:
            if settings.expandable:
                # A piece at the end of its segment counts with what the segment can still grow.
                while place + 1 < count and reach(pieces[keys[place + 1]]) < reach(pieces[keys[place]]):
                    place += 1
            else:
                while place < count and pieces[keys[place]].grows:
                    place += 1
        if place == count:
            return count
        found = pieces[keys[place]].size
        oversize = (
            found >= settings.max_split
            if size < settings.max_split
            else found >= size + settings.max_rounding
        )
        return count if oversize else place

    def segment_size(self, size: int) -> int:
        """The bytes of the segment that is made for a request."""
        if size <= SMALL:
            return SMALL_SEGMENT
        return (
            self.settings.large_segment if size < _OWN_SEGMENT else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        )

    def _from_device(self, home: Bin, size: int) -> Piece:
        """Memory from the device, after giving back what is not in use where it must be."""
        if self.settings.collect_above and self.allowed is not None:
            self._collect(self.allowed)
        wanted = self.segment_size(size)
        found = self._made(home, size, wanted)
        if found is None and self.settings.max_split != UNLIMITED and self._give_back_oversize(home, size):
            found = self._made(home, size, wanted)
        if found is None:
            self.give_back()
            self.retries += 1
            found = self._made(home, size, wanted)
        if found is None:
            if not self.beyond:
                self.ooms += 1
                raise NoRoom
            found = self._segment(home, wanted)
        return found

    def _made(self, home: Bin, size: int, wanted: int) -> Piece | None:
        if self.allowed is not None and self.both.reserved + wanted > self.allowed:
            return None
        if self.settings.expandable and home.pool == SHARED:
            found, self._next = self._growing.piece(home, size, self._next)
            return found
        return self._segment(home, wanted) if wanted <= self._left() else None

    def _segment(self, home: Bin, size: int) -> Piece:
        made = Piece(home, self._space.take(size), size, True, None, None)
        self._reserve(home, size, 1)
        if size >= self.settings.max_split:
            self.oversize.add("segments", 1)
        return made

    def _reserve(self, home: Bin, size: int, segments: int) -> None:
        for part in (home.figures, self.both):
            part.add("reserved", size)
            part.add("segments", segments)
        self.device_allocs += size > 0
        self.device_frees += size < 0

    def give_back(self, pool: PoolId | None = None) -> None:
        """Return what is not in use to the device: whole segments, and whole pages of growing ones."""
        self.synchronized += 1
        self._end_uses()
        for home in list(self._bins.values()):
            wanted = (
                home.pool == pool if pool is not None else home.pool == SHARED or home.pool in self._freeable
            )
            for piece in list(home.pieces.values()) if wanted else ():
                if piece.grows:
                    self._growing.unmap(piece)
                elif piece.whole:
                    self._released(piece)

    def let_go(self, pool: PoolId) -> None:
        """Nobody holds a private pool any more: its memory goes back."""
        self._freeable.add(pool)
        self.give_back(pool)

    def refuse(self) -> None:
        """A request was found not to fit before it was made."""
        self.give_back()
        self.retries += 1
        self.ooms += 1

    def _released(self, piece: Piece) -> None:
        piece.home.take(piece)
        self._space.give_back(piece.address, piece.size)
        self._reserve(piece.home, -piece.size, -1)
        if piece.size >= self.settings.max_split:
            self.oversize.add("segments", -1)

    def _give_back_oversize(self, home: Bin, size: int) -> bool:
        """Return pieces that may not be split: one that is large enough, or several, the largest first."""
        least = max(size, self.settings.max_split)
        place = bisect_left(home.keys, least << SHIFT)
        if place < len(home.keys):
            self._released(home.pieces[home.keys[place]])
            return True
        given = 0
        while given < least and home.keys:
            largest = home.pieces[home.keys[-1]]
            if largest.size < self.settings.max_split or largest.grows:
                break
            given += largest.size
            self._released(largest)
        return given >= least

    def _collect(self, allowed: int) -> None:
        """Return the unused segments that waited longest, in rounds, until enough is free."""
        above = self.both.reserved - int(self.settings.collect_above * allowed)
        homes = [home for home in self._bins.values() if home.pool == SHARED and not home.small]
        found = [piece for home in homes for piece in home.pieces.values() if piece.whole]
        ages = {piece.address: self._calls - self._freed_at[piece.address] for piece in found}
        given = 0
        while given < above and found:
            mean = sum(ages[piece.address] for piece in found) / len(found)
            for piece in found:
                if ages[piece.address] >= mean:
                    given += piece.size
                    self._released(piece)
            found = [piece for piece in found if ages[piece.address] < mean]

    def room_for(self, nbytes: int) -> bool:
        """Whether a request could be met, after giving back what is not in use."""
        size = self.settings.rounded(nbytes)
        home = self._small if size <= SMALL else self._large
        if self._chosen(home, bisect_left(home.keys, size << SHIFT), size) < len(home.keys):
            return True
        free = (piece for home in self._bins.values() for piece in home.pieces.values())
        unused = sum(piece.size for piece in free if piece.grows or piece.whole)
        return self.both.reserved - unused + self.segment_size(size) <= self.limit

    def unused_in_private_pools(self) -> int:
        """Bytes that only requests for private pools could get."""
        homes = (home for home in self._bins.values() if home.pool != SHARED)
        return sum(piece.size for home in homes for piece in home.pieces.values())

    def segments(self) -> Iterator[list[Piece]]:
        """The memory, segment by segment in order of addresses, each as its pieces."""
        pieces = [piece for home in self._bins.values() for piece in home.pieces.values()]
        pieces += [*self.live.values(), *self.waiting]
        for head in sorted(pieces, key=lambda piece: piece.address):
            if head.before is None or not head.before.mapped:
                run: list[Piece] = []
                piece: Piece | None = head
                while piece is not None and piece.mapped:
                    run.append(piece)
                    piece = piece.after
                yield run

    def forked(self) -> None:
        """In a child process: a lock that another thread of the parent held is nobody's."""
        self.lock, self.busy = threading.RLock(), False

    def __deepcopy__(self, memo: dict[int, Any]) -> Allocator:
        return self
