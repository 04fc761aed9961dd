"""What CUDA's caching allocator is made of: pieces of memory, the free ones in order, and the figures that torch shows.

Decides nothing: see allocator.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort

SHIFT = 40
PoolId = tuple[int, int]
SHARED: PoolId = (0, 0)
"""The pool of everything that was not asked for in a private one."""


class Figures:
    """The statistics of the small pool, the large one, or both: now, at most, and (`gained`) all that ever came."""

    __slots__ = (
        "allocated",
        "allocated_gained",
        "allocated_peak",
        "allocations",
        "allocations_gained",
        "allocations_peak",
        "requested",
        "requested_gained",
        "requested_peak",
        "reserved",
        "reserved_gained",
        "reserved_peak",
        "segments",
        "segments_gained",
        "segments_peak",
        "split_bytes",
        "split_bytes_gained",
        "split_bytes_peak",
        "splits",
        "splits_gained",
        "splits_peak",
    )
    allocated: int
    """Bytes of the pieces in use."""
    allocated_gained: int
    allocated_peak: int
    allocations: int
    allocations_gained: int
    allocations_peak: int
    requested: int
    """Bytes that were asked for."""
    requested_gained: int
    requested_peak: int
    reserved: int
    """Bytes that were taken from the device."""
    reserved_gained: int
    reserved_peak: int
    segments: int
    segments_gained: int
    segments_peak: int
    split_bytes: int
    """Bytes of free pieces that cannot go back, because a neighbour in their segment is in use."""
    split_bytes_gained: int
    split_bytes_peak: int
    splits: int
    splits_gained: int
    splits_peak: int

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def add(self, name: str, amount: int) -> None:
        """Change one figure."""
        now = getattr(self, name) + amount
        setattr(self, name, now)
        if amount > 0:
            setattr(self, f"{name}_gained", getattr(self, f"{name}_gained") + amount)
            if now > getattr(self, f"{name}_peak"):
                setattr(self, f"{name}_peak", now)


class Bin:
    """The free pieces of one pool and stream, smallest first, of equal ones the lowest address first."""

    __slots__ = ("figures", "keys", "pieces", "pool", "small", "stream", "unmapped")

    def __init__(self, pool: PoolId, stream: int, small: bool, figures: Figures) -> None:
        self.pool, self.stream, self.small, self.figures = pool, stream, small, figures
        self.keys: list[int] = []
        """Size and address of each in one number."""
        self.pieces: dict[int, Piece] = {}
        self.unmapped: list[Piece] = []
        """Address space of growing segments that has no memory, by address."""

    def put(self, piece: Piece) -> None:
        key = piece.size << SHIFT | piece.address >> 9
        insort(self.keys, key)
        self.pieces[key] = piece

    def take(self, piece: Piece) -> None:
        key = piece.size << SHIFT | piece.address >> 9
        del self.keys[bisect_left(self.keys, key)]
        del self.pieces[key]


class Piece:
    """A stretch of memory: in use, or free; its neighbours are those of the same segment."""

    __slots__ = ("address", "after", "before", "free", "grows", "home", "mapped", "requested", "size", "uses")

    def __init__(
        self,
        home: Bin,
        address: int,
        size: int,
        free: bool,
        before: Piece | None,
        after: Piece | None,
        grows: bool = False,
    ) -> None:
        self.home = home
        self.address = address
        self.size = size
        self.free = free
        self.before = before
        self.after = after
        self.grows = grows
        """Whether it lies in a growing segment (expandable_segments)."""
        self.mapped = True
        """Whether there is memory behind it; of a growing segment not everywhere."""
        self.uses: set[int] | None = None
        """Other streams that use it (Tensor.record_stream)."""
        self.requested = 0

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None

    def join(self, neighbour: Piece) -> None:
        """Take in a neighbour."""
        if self.before is neighbour:
            self.address = neighbour.address
            self.before = neighbour.before
            if neighbour.before is not None:
                neighbour.before.after = self
        else:
            self.after = neighbour.after
            if neighbour.after is not None:
                neighbour.after.before = self
        self.size += neighbour.size

    def cut(self, size: int, free: bool) -> Piece:
        """Split it: the first so many bytes become a piece of their own, which is given."""
        before = self.before
        made = Piece(self.home, self.address, size, free, before, self, self.grows)
        if before is not None:
            before.after = made
        self.before = made
        self.address += size
        self.size -= size
        return made


class Space:
    """Where segments lie: of free pieces of one size the lowest serves, so that it decides which one that is.

    CUDA's driver hands out addresses from above to below, in stretches of 32 MiB; what is left of a stretch, or was
    given back, serves for what fits into it, the latest first.
    """

    __slots__ = ("_bottom", "_left")

    def __init__(self, top: int) -> None:
        self._bottom = top
        self._left: list[tuple[int, int]] = []
        """Address space that is free above the bottom: where it begins, and its bytes."""

    def take(self, size: int) -> int:
        for at in range(len(self._left) - 1, -1, -1):
            address, free = self._left[at]
            if size <= free:
                del self._left[at]
                self._keep(at, address + size, free - size)
                return address
        stretch = -(-size // _STRETCH) * _STRETCH
        self._bottom -= stretch
        self._keep(len(self._left), self._bottom + size, stretch - size)
        return self._bottom

    def give_back(self, address: int, size: int) -> None:
        self._keep(len(self._left), address, size)

    def _keep(self, at: int, address: int, size: int) -> None:
        if size:
            self._left.insert(at, (address, size))


_STRETCH = 32 << 20
