"""The perturbed weights of a captured pass, made on a stream of their own ahead of the products that read them.

Making weights is bound by memory, so it hides behind attention, norms and whatever else leaves a GPU waiting. Beside a
product it would only take the product's place: a product waits until all that was begun is made. The first pass takes
down which weights are read and in which order; from then on each is made as soon as there is room for it in a ring of
scratch memory. Whoever makes a weight first writes the update that is owed to it from the step before. Tensors that no
product sweeps are brought up to date at the beginning of the pass, or, where nothing but look-ups at the beginning and
products at the end read them (an embedding, a head), while it runs. Streams and events only: what is computed is that
of `kernels.py` and `thin.py`, in an order that changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimtab.zeroth import kernels, thin
from trimtab.zeroth.kernels import Launch, Part, Perturbed, Sweeping
from trimtab.zeroth.order import Plan, Read, Way, plan
from trimtab.zeroth.parameters import Tuned
from trimtab.zeroth.sweep import DROPPED_BITS


class OtherOrder(Exception):
    """A pass read other weights, or in another order, than the one before it."""


@dataclass(frozen=True)
class _Piece:
    """What is read: the rows, of several tensors where one product reads them together, and the keys of their noise."""

    rows: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    read: Read

    @property
    def height(self) -> int:
        return sum(rows.shape[0] for rows in self.rows)

    def shares(self, made: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Rows, their key and their part of `made` [lanes, height, width]."""
        parts = made.split([rows.shape[0] for rows in self.rows], 1)
        return list(zip(self.rows, self.keys, parts, strict=True))


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
        self._plan: Plan | None = None
        self._made: list[Callable[[], None]] = []
        """Makes each batch of the plan."""
        self._begin: Any = None
        self._between: Any = None
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
            if self._begin is not None:
                self._begin.owed(self.launch, signs=self.signs)
            yield
            self._wait("between", 0)
            if self._plan is None:
                self._make_plan()
            elif self._read != len(self._order):
                raise OtherOrder(f"{self._read} weights were read, {len(self._order)} the first time")
        finally:
            _running = before

    def product(self, x: Tensor, weight: Tensor, key: Tensor, transposed: bool, run: int) -> Tensor:
        """Each lane's share of the rows by the lane's own weight, which is made `run` rows at a time."""
        shares = x.reshape(self.lanes, -1, x.shape[-1])
        height, width = weight.shape
        if not transposed and thin.suits(shares.shape[1], self.lanes, height, width):
            owed = self._take(self._piece((weight,), (key,), 0, "here"))
            made = thin.thin_product(shares, weight, key, *self._noise(), None if owed is None else owed[0])
            return made.view(*x.shape[:-1], height)
        if transposed:
            return torch.bmm(shares, self._weights((weight,), (key,))).view(*x.shape[:-1], width)
        out = x.new_empty(*x.shape[:-1], height)
        columns = out.view(self.lanes, -1, height)
        for first in range(0, height, run):
            made = self._weights((weight[first : first + run],), (key,), first * width, weight)
            torch.bmm(shares, made.transpose(1, 2), out=columns[..., first : first + run])
            self._finish()
        return out

    def products(self, x: Tensor, weights: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        """The same with several weights, side by side in the output: one product reads them all."""
        shares = x.reshape(self.lanes, -1, x.shape[-1])
        made = self._weights(tuple(weights), tuple(keys))
        return torch.bmm(shares, made.transpose(1, 2)).view(*x.shape[:-1], made.shape[1])

    def rows(self, table: Tensor, ids: Tensor, key: Tensor) -> Tensor:
        owed = self._take(self._piece((table,), (key,), 0, "table"))
        return kernels.perturbed_rows(table, ids, key, *self._noise(), None if owed is None else owed[0])

    def _noise(self) -> tuple[Tensor, Tensor, bool, bool]:
        return self.launch.state, self.launch.coefficients, self.one_line, self.signs

    def _weights(
        self, rows: tuple[Tensor, ...], keys: tuple[Tensor, ...], first: int = 0, whole: Tensor | None = None
    ) -> Tensor:
        """[lanes, rows, width], until the next piece is asked for. `first`: where in `whole` the rows begin."""
        piece = self._piece(rows, keys, first, "ahead", whole)
        if piece.read.size > self.ring.numel():
            piece = self._piece(rows, keys, first, "here", whole)
        at = self._read
        owed = self._take(piece)
        if piece.read.way == "here":
            made = rows[0].new_empty(self.lanes, piece.height, rows[0].shape[1])
            return self._make(piece, made, owed)
        slot = self._slot(piece, 0 if self._plan is None else self._plan.places[at])
        if self._plan is None:
            return self._make(piece, slot, None)
        self._fork()
        self._issue()
        self._wait("made", self._issued - 1)  # and with it for all before
        return slot

    def _make(self, piece: _Piece, out: Tensor, owed: Sequence[Sweeping] | None) -> Tensor:
        """By a launch for each tensor."""
        for number, (rows, key, part) in enumerate(piece.shares(out)):
            carried = None if owed is None else owed[number]
            kernels.perturbed(rows, key, *self._noise(), piece.read.first, part, carried)
        return out

    def _piece(
        self,
        rows: tuple[Tensor, ...],
        keys: tuple[Tensor, ...],
        first: int,
        way: Way,
        whole: Tensor | None = None,
    ) -> _Piece:
        size = self.lanes * sum(each.numel() * each.element_size() for each in rows)
        whole_groups = all(each.numel() % kernels.GROUP == 0 and each.data_ptr() % 16 == 0 for each in rows)
        kind = str(rows[0].dtype) if whole_groups else ""
        owner, *also = (each.data_ptr() for each in (rows if whole is None else (whole,)))
        return _Piece(rows, keys, Read(owner, first, size, way, kind, tuple(also)))

    def _take(self, piece: _Piece) -> list[Sweeping] | None:
        """Count a piece as asked for. What is owed to its tensors, where whoever asks has to see to it."""
        self._finish()
        at, self._read = self._read, self._read + 1
        if self._plan is None:
            self._order.append(piece)
            return None
        if at >= len(self._order) or self._order[at].read != piece.read:
            raise OtherOrder("weights are read in another order than the first time")
        if piece.read.way == "table":
            return self._sweeping(piece) if piece.read.owner in self._plan.late else None
        if piece.read.way == "here":
            self._wait("between", 0)
        return self._sweeping(piece) if self._plan.carries[at] else None

    def _sweeping(self, piece: _Piece) -> list[Sweeping]:
        dropped = DROPPED_BITS[piece.rows[0].dtype] if self.stochastic else 0
        return [Sweeping(self.launch.owed, self._tuned[owner].decays, dropped) for owner in piece.read.owners]

    def _finish(self) -> None:
        """All pieces that were asked for have been read: their room is free again."""
        if self._plan is not None and self._done < self._read:
            self._done = self._read
            if self._issued:  # before the first product, tables are looked up that a piece may write to
                self._issue()

    def _issue(self) -> None:
        """Make every batch for which the ring has room by now."""
        assert self._plan is not None
        batches = self._plan.batches
        while self._issued < len(batches) and batches[self._issued].after < self._done:
            number, self._issued = self._issued, self._issued + 1
            if self.side is None:
                self._made[number]()
                continue
            if ("read", self._done) not in self._events:
                self._events["read", self._done] = torch.cuda.current_stream().record_event()
                self.side.wait_event(self._events["read", self._done])
            with torch.cuda.stream(self.side):
                self._made[number]()
                self._events["made", number] = self.side.record_event()

    def _fork(self) -> None:
        """Begin with the updates that need only be there in the end."""
        if self._between is None or self._issued:
            return
        if self.idle is None:
            self._between.owed(self.launch, signs=self.signs)
            return
        self.idle.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self.idle):
            self._between.owed(self.launch, signs=self.signs)
            self._events["between", 0] = self.idle.record_event()

    def _wait(self, what: str, number: int) -> None:
        """The products wait for it, if they have not yet."""
        if (what, number) in self._events:
            torch.cuda.current_stream().wait_event(self._events.pop((what, number)))

    def _slot(self, piece: _Piece, place: int) -> Tensor:
        flat = self.ring[place : place + piece.read.size].view(piece.rows[0].dtype)
        return flat.view(self.lanes, piece.height, -1)

    def _make_plan(self) -> None:
        # Several lines at once are several terms of an update, which a pass does not carry.
        reads = [piece.read for piece in self._order]
        made = self._plan = plan(reads, self.ring.numel(), self._tuned, carry=self.one_line)
        self._begin, self._between = self._update(made.begin), self._update(made.between)
        self._made = [self._maker(batch.reads) for batch in made.batches]

    def _maker(self, reads: Sequence[int]) -> Callable[[], None]:
        """What makes the weights of a batch."""
        assert self._plan is not None
        carries = {self._plan.carries[at] for at in reads}
        pieces = [(self._order[at], self._plan.places[at]) for at in reads]
        if pieces[0][0].read.kind == "" or len(carries) > 1:
            return partial(self._make_alone, reads)
        dtype = pieces[0][0].rows[0].dtype
        parts = []
        for piece, place in pieces:
            at, width = place // dtype.itemsize, piece.rows[0].shape[1]
            for owner, rows in zip(piece.read.owners, piece.rows, strict=True):
                tuned = self._tuned[owner]
                parts.append(
                    Part(rows, tuned.index, tuned.decays, at, piece.height * width, piece.read.first)
                )
                at += rows.numel()
        whole = self.ring[: self.ring.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        many = Perturbed(parts, whole, carry=carries == {True}, stochastic=self.stochastic)
        return lambda: many(self.launch, self.one_line, self.signs)

    def _make_alone(self, reads: Sequence[int]) -> None:
        """By launches of their own: what is not of whole groups, or in part brings its tensors up to date."""
        assert self._plan is not None
        for at in reads:
            piece = self._order[at]
            owed = self._sweeping(piece) if self._plan.carries[at] else None
            self._make(piece, self._slot(piece, self._plan.places[at]), owed)

    def _update(self, owners: Collection[int]) -> Any:
        some = [self._tuned[owner] for owner in owners]
        tensors = [(t.parameter.detach(), t.index, t.decays) for t in some]
        return kernels.UpdateAll(tensors, self.stochastic) if tensors else None


_running: Ahead | None = None


def running() -> Ahead:
    assert _running is not None, "a pass with lanes runs inside Ahead.running()"
    return _running
