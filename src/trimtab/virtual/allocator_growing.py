"""Segments that grow (expandable_segments): address space for a whole device, to which memory is given page by page.

A page is 2 MiB for small requests, 20 MiB for others. Never chooses between free pieces: allocator.py does.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from trimtab.virtual.allocator_parts import Bin, Piece

if TYPE_CHECKING:
    from collections.abc import Callable


class Growing:
    """The growing segments of one device."""

    def __init__(self, space: int, reserve: Callable[[Bin, int, int], None], free: Callable[[], int]) -> None:
        self.space = space
        """Address space of a segment: what the device has, and an eighth more."""
        self._reserve = reserve
        self._free = free
        """How many bytes the device can still give."""
        self.small_page, self.large_page = 2 << 20, 20 << 20

    def _page(self, home: Bin) -> int:
        return self.small_page if home.small else self.large_page

    def piece(self, home: Bin, size: int, address: int) -> tuple[Piece | None, int]:
        """A piece at the lowest address where so much is free or can be grown; and where address space is left.

        None where the device has too little; what was given until then stays, as free pieces.
        """
        found = self._candidate(home, size)
        if found is None:
            page = self._page(home)
            space = -(-max(self.space, size) // page) * page
            found = Piece(home, -(-address // page) * page, space, True, None, None, True)
            found.mapped = False
            home.unmapped.append(found)
            address = found.address + space
        if not found.mapped and not self._map(found, min(found.size, size)):
            return None, address
        while found.size < size:
            following = found.after
            assert following is not None
            if not self._map(following, min(size - found.size, following.size)):
                return None, address
            found = following
        home.take(found)
        return found, address

    def _candidate(self, home: Bin, size: int) -> Piece | None:
        for first in home.unmapped:
            if first.before is not None and first.before.free:
                first = first.before
            room = 0
            walk: Piece | None = first
            while walk is not None and walk.free and room < size:
                room += walk.size
                walk = walk.after
            if room >= size:
                return first
        return None

    def _map(self, piece: Piece, size: int) -> bool:
        """Give memory to the beginning of a stretch of address space."""
        page, home = self._page(piece.home), piece.home
        mapped = min(-(-size // page) * page, piece.size)
        if mapped > self._free():
            return False
        home.unmapped.remove(piece)
        if mapped < piece.size:
            rest = Piece(home, piece.address + mapped, piece.size - mapped, True, piece, piece.after, True)
            rest.mapped = False
            if piece.after is not None:
                piece.after.before = rest
            piece.after, piece.size = rest, mapped
            insort(home.unmapped, rest, key=_address)
        piece.mapped = True
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                home.take(neighbour)
                piece.join(neighbour)
        home.put(piece)
        self._reserve(home, mapped, 0)
        return True

    def unmap(self, piece: Piece) -> None:
        """Take the memory from the whole pages of a free piece."""
        page, home = self._page(piece.home), piece.home
        first = -(-piece.address // page) * page
        last = (piece.address + piece.size) // page * page
        if first >= last:
            return
        home.take(piece)
        if first > piece.address:
            home.put(piece.cut(first - piece.address, True))
        if piece.size > last - first:
            inner = piece.cut(last - first, True)
            home.put(piece)
            piece = inner
        piece.mapped = False
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and not neighbour.mapped:
                home.unmapped.remove(neighbour)
                piece.join(neighbour)
        if not piece.whole:
            insort(home.unmapped, piece, key=_address)
        self._reserve(home, first - last, 0)


def _address(piece: Piece) -> int:
    return piece.address


def reach(piece: Piece) -> int:
    """The size of a free piece with what its segment can still grow behind it."""
    following = piece.after
    return piece.size + (following.size if following is not None and not following.mapped else 0)
