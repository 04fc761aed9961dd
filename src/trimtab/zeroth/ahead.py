"""The perturbed weights of a captured pass, made on a stream of their own ahead of the products that read them.

Making weights takes a GPU's memory and integer units, products take its tensor units, so one hides behind the other.
The first pass takes down which weights are read and in which order; from then on each is made as soon as there is room
for it in a ring of scratch memory. Whoever makes a weight first writes the update that is owed to it from the step
before. Tensors that no product sweeps are brought up to date at the beginning of the pass, or, where nothing but
look-ups at the beginning and products at the end read them (an embedding, a head), while it runs. Streams and events
only: what is computed is that of `kernels.py` and `thin.py`, in an order that changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.zeroth import kernels, thin
from trimtab.zeroth.kernels import Launch, Sweeping
from trimtab.zeroth.parameters import Tuned
from trimtab.zeroth.sweep import DROPPED_BITS

_ALIGNED = 256


class OtherOrder(Exception):
    """A pass read other weights, or in another order, than the one before it."""


@dataclass(frozen=True)
class _Piece:
    """Rows of a weight that one product reads, or a table in which rows are looked up."""

    weight: Tensor
    """Those rows."""
    owner: int
    """The address of the whole."""
    first: int
    key: Tensor | None
    way: str
    """ahead: made in the ring. here: made by the product itself, or where it stands. table: looked up."""

    @property
    def name(self) -> tuple[int, int, int, str]:
        return self.owner, self.first, self.weight.numel(), self.way


@dataclass(frozen=True)
class _Plan:
    places: list[int]
    """Where in the ring each piece lies, in bytes."""
    after: list[int]
    """The last piece before it that lies there too; -1: none."""
    carries: list[bool]
    """Whether it brings its weight up to date."""
    late: frozenset[int]
    """Tables that are looked up before they are brought up to date."""
    begin: Any | None
    """The update of tensors that are brought up to date before anything else,"""
    between: Any | None
    """and of those that are between the first and the last products."""


class Ahead:
    """The weights of every pass through one model with one number of lanes."""

    def __init__(
        self,
        launch: Launch,
        tuned: Sequence[Tuned],
        ring: Tensor,
        sides: tuple[Any, Any] | None,
        *,
        one_line: bool,
        signs: bool,
        stochastic: bool,
    ) -> None:
        """`ring`: scratch, in bytes. `sides`: the streams to make weights and to update on; None: that of the pass."""
        self.launch, self.ring = launch, ring
        self.side: Any | None
        self.idle: Any | None
        self.side, self.idle = sides or (None, None)
        self.one_line, self.signs, self.stochastic = one_line, signs, stochastic
        self.lanes = launch.coefficients.numel()
        self._tuned = {t.parameter.data_ptr(): t for t in tuned}
        self._order: list[_Piece] = []
        self._plan: _Plan | None = None
        self._read = self._issued = self._done = 0
        self._events: dict[tuple[str, int], Any] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the operators of `lane_modules.py` take their weights from here."""
        global _running
        before, _running = _running, self
        self._read = self._issued = self._done = 0
        self._events = {}
        try:
            if self._plan is not None and self._plan.begin is not None:
                self._plan.begin.owed(self.launch, signs=self.signs)
            yield
            self._join()
            if self._plan is None:
                self._plan = self._planned()
            elif self._read != len(self._order):
                raise OtherOrder(f"{self._read} weights were read, {len(self._order)} the first time")
        finally:
            _running = before

    def product(self, x: Tensor, weight: Tensor, key: Tensor, transposed: bool, run: int) -> Tensor:
        """Each lane's share of the rows by the lane's own weight, which is made `run` rows at a time."""
        shares = x.reshape(self.lanes, -1, x.shape[-1])
        height, width = weight.shape
        if not transposed and thin.suits(shares.shape[1], self.lanes, width):
            owed = self._take(_Piece(weight, weight.data_ptr(), 0, key, "here"))
            made = thin.thin_product(shares, weight, key, *self._noise(), owed)
            return made.view(*x.shape[:-1], height)
        if transposed:
            return torch.bmm(shares, self._made(weight, weight, 0, key)).view(*x.shape[:-1], width)
        out = x.new_empty(*x.shape[:-1], height)
        columns = out.view(self.lanes, -1, height)
        for first in range(0, height, run):
            made = self._made(weight[first : first + run], weight, first * width, key)
            torch.bmm(shares, made.transpose(1, 2), out=columns[..., first : first + run])
            self._finish()
        return out

    def rows(self, table: Tensor, ids: Tensor, key: Tensor) -> Tensor:
        owed = self._take(_Piece(table, table.data_ptr(), 0, None, "table"))
        return kernels.perturbed_rows(table, ids, key, *self._noise(), owed)

    def _noise(self) -> tuple[Tensor, Tensor, bool, bool]:
        return self.launch.state, self.launch.coefficients, self.one_line, self.signs

    def _made(self, rows: Tensor, weight: Tensor, first: int, key: Tensor) -> Tensor:
        """[lanes, rows, width], until the next piece is asked for."""
        way = "ahead" if self._bytes(rows) <= self.ring.numel() else "here"
        piece = _Piece(rows, weight.data_ptr(), first, key, way)
        at = self._read
        owed = self._take(piece)
        if way == "here":
            return kernels.perturbed(rows, key, *self._noise(), first, owed=owed)
        if self._plan is None:
            return self._make(piece, 0, None)
        self._fork()
        self._issue()
        if self.side is not None:
            torch.cuda.current_stream().wait_event(self._events["made", at])
        return self._slot(rows, self._plan.places[at])

    def _take(self, piece: _Piece) -> Sweeping | None:
        """Count a piece as asked for. What it owes to its weight where it is made by whoever asks."""
        self._finish()
        at, self._read = self._read, self._read + 1
        if self._plan is None:
            self._order.append(piece)
            return None
        if at >= len(self._order) or self._order[at].name != piece.name:
            raise OtherOrder("weights are read in another order than the first time")
        if piece.way == "table":
            return self._sweeping(piece) if piece.owner in self._plan.late else None
        if piece.way == "here":
            self._join()
        return self._sweeping(piece) if self._plan.carries[at] else None

    def _sweeping(self, piece: _Piece) -> Sweeping:
        tuned = self._tuned[piece.owner]
        dropped = DROPPED_BITS[piece.weight.dtype] if self.stochastic else 0
        return Sweeping(self.launch.owed, tuned.decays, dropped)

    def _finish(self) -> None:
        """All pieces that were asked for have been read: their room is free again."""
        if self._plan is not None and self._done < self._read:
            self._done = self._read
            if self._issued:  # before the first product, tables are looked up that a piece may write to
                self._issue()

    def _issue(self) -> None:
        """Make every piece for which the ring has room by now."""
        assert self._plan is not None
        while self._issued < len(self._order) and self._plan.after[self._issued] < self._done:
            at, self._issued = self._issued, self._issued + 1
            piece = self._order[at]
            if piece.way != "ahead":
                continue
            owed = self._sweeping(piece) if self._plan.carries[at] else None
            if self.side is not None and ("read", self._done) not in self._events:
                self._events["read", self._done] = torch.cuda.current_stream().record_event()
                self.side.wait_event(self._events["read", self._done])
            with nullcontext() if self.side is None else torch.cuda.stream(self.side):
                self._make(piece, self._plan.places[at], owed)
                if self.side is not None:
                    self._events["made", at] = self.side.record_event()

    def _fork(self) -> None:
        """Begin with the updates that need only be there in the end."""
        assert self._plan is not None
        if self._plan.between is None or self._issued:
            return
        if self.idle is not None:
            self.idle.wait_event(torch.cuda.current_stream().record_event())
        with nullcontext() if self.idle is None else torch.cuda.stream(self.idle):
            self._plan.between.owed(self.launch, signs=self.signs)
            if self.idle is not None:
                self._events["between", 0] = self.idle.record_event()

    def _join(self) -> None:
        if ("between", 0) in self._events:
            torch.cuda.current_stream().wait_event(self._events.pop(("between", 0)))

    def _make(self, piece: _Piece, place: int, owed: Sweeping | None) -> Tensor:
        assert piece.key is not None
        out = self._slot(piece.weight, place)
        return kernels.perturbed(piece.weight, piece.key, *self._noise(), piece.first, out, owed)

    def _slot(self, rows: Tensor, place: int) -> Tensor:
        size = self.lanes * rows.numel() * rows.element_size()
        return self.ring[place : place + size].view(rows.dtype).view(self.lanes, *rows.shape)

    def _bytes(self, rows: Tensor) -> int:
        return -(-self.lanes * rows.numel() * rows.element_size() // _ALIGNED) * _ALIGNED

    def _planned(self) -> _Plan:
        order = self._order
        places, after, end = [0] * len(order), [-1] * len(order), 0
        for at, piece in enumerate(order):
            if piece.way != "ahead":
                continue
            size = self._bytes(piece.weight)
            end = 0 if end + size > self.ring.numel() else end
            places[at], end = end, end + size
            after[at] = self._last_in(places, at)
        return self._owing(places, after)

    def _owing(self, places: list[int], after: list[int]) -> _Plan:
        """Who brings which tensor up to date. Several lines are several terms, which a pass does not carry."""
        order = self._order
        ways, first = self._ways(), self._first_product()
        aheads = [at for at, piece in enumerate(order) if piece.way == "ahead"]
        begin: list[Tuned] = []
        between: list[Tuned] = []
        carried: set[int] = set()
        for owner, tuned in self._tuned.items() if self.one_line else ():
            found = ways.get(owner, set())
            if found == {"ahead"} or (found == {"here"} and (not aheads or first[owner] < aheads[-1])):
                carried.add(owner)
            elif aheads and found in ({"here"}, {"table"}):
                between.append(tuned)
            else:
                begin.append(tuned)
        seen: set[tuple[int, int]] = set()
        carries = []
        for piece in order:
            new = piece.way != "table" and piece.owner in carried and (piece.owner, piece.first) not in seen
            carries.append(new)
            seen.update([(piece.owner, piece.first)] if new else [])
        late = carried | {t.parameter.data_ptr() for t in between}
        return _Plan(places, after, carries, frozenset(late), self._update(begin), self._update(between))

    def _update(self, tuned: Sequence[Tuned]) -> Any:
        tensors = [(t.parameter.detach(), t.index, t.decays) for t in tuned]
        return kernels.UpdateAll(tensors, self.stochastic) if tensors else None

    def _last_in(self, places: Sequence[int], at: int) -> int:
        begin, end = places[at], places[at] + self._bytes(self._order[at].weight)
        for before in range(at - 1, -1, -1):
            piece = self._order[before]
            if piece.way == "ahead":
                start = places[before]
                if start < end and begin < start + self._bytes(piece.weight):
                    return before
        return -1

    def _ways(self) -> dict[int, set[str]]:
        """How each weight is read, by its address. A look-up before the first product can take what is owed along."""
        ways: dict[int, set[str]] = {}
        products = [at for at, piece in enumerate(self._order) if piece.way != "table"]
        for at, piece in enumerate(self._order):
            if piece.way != "table":
                ways.setdefault(piece.owner, set()).discard("table")
                ways[piece.owner].add(piece.way)
            elif products and at > products[0]:
                # The weights of products that come later may already be on their way: it would be read half done.
                ways.setdefault(piece.owner, set()).add("looked up late")
            else:
                ways.setdefault(piece.owner, {"table"})
        return ways

    def _first_product(self) -> dict[int, int]:
        first: dict[int, int] = {}
        for at, piece in enumerate(self._order):
            if piece.way != "table":
                first.setdefault(piece.owner, at)
        return first


_running: Ahead | None = None


def running() -> Ahead:
    assert _running is not None, "a pass with lanes runs inside Ahead.running()"
    return _running
