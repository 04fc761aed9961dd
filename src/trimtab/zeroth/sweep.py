"""The elementwise work of zeroth-order steps: changed copies of a tensor for a forward, and the update of all tensors.

Every value is computed in fp32 as `weight + coefficient * z`, the product rounded on its own, and rounded once to the
weight's type; so any device and any kernel that does the same gives the same bits. Only `update_` and `rescale_` write
to a weight. Plain torch, in chunks; nothing here knows of modules or losses.

A step moves a weight by far less than bf16 can tell, so rounding to the nearest would leave it where it was, for ever.
What `update_` and `rescale_` write is therefore rounded up or down by chance, so that it is right in the mean. The
chance is noise by counter like the rest (`UPDATE`, `PROJECTION`), so it too has the same bits everywhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.zeroth.noise import Kind, NoiseMaker, Stream
from trimtab.zeroth.parameters import Tuned

# Queries of the noise that rounds. No direction has these numbers.
UPDATE, PROJECTION = 0xFFFF_FFFF, 0xFFFF_FFFE
# How many of fp32's last bits a type leaves out. (Below fp16's normal range it is more; there the nearest is taken.)
DROPPED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


def fp32(value: float) -> float:
    """The nearest fp32 number: what a coefficient is before it meets a tensor."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def on_real_gpu(tensor: Tensor) -> bool:
    """Whether Triton's kernels can work on it: a CUDA tensor, of plain memory, and Triton is installed.

    A subclass (a virtual GPU's, a sharded or a quantised tensor) says what its operations do, not where its values lie.
    """
    return tensor.is_cuda and _triton() and type(tensor) in (Tensor, nn.Parameter)


def shapes_alone(tensors: Iterable[Tensor]) -> bool:
    """Whether it is a rehearsal in shapes: some of these are a virtual GPU's, and have no values.

    A kernel is checked there and not run. The smallest tensors may have values all the same.
    """
    return any(t.is_cuda and hasattr(t, "payload") and _unknown(t) for t in tensors)


def _unknown(tensor: Any) -> bool:
    return bool(tensor.payload.is_meta or tensor._block.unknown)


def by_kernels(tensor: Tensor, shapes: bool) -> bool:
    """Whether work on it goes by Triton's kernels: on a real GPU, and where its way is rehearsed in `shapes`."""
    return on_real_gpu(tensor) or (shapes and tensor.is_cuda and _triton())


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


@dataclass(frozen=True)
class Directions:
    """Lines through all tuned tensors at once: coefficient i times the noise of query i.

    A forward has one lane for each of them; an update subtracts them all, in order.
    """

    seed: int
    step: int
    kind: Kind
    queries: tuple[int, ...]
    coefficients: tuple[float, ...]

    def stream(self, tuned: Tuned, i: int) -> Stream:
        return Stream(self.seed, self.step, tuned.index, self.queries[i], self.kind)

    def moves(self, tuned: Tuned) -> bool:
        return True


@dataclass(frozen=True)
class Ratios:
    """Rescaled distances from an anchor: in lane i, tensor t is anchor + ratio * (weight - anchor)."""

    seed: int
    step: int
    anchors: Mapping[int, Tensor]
    lanes: tuple[Mapping[int, float], ...]

    def moves(self, tuned: Tuned) -> bool:
        return tuned.index in self.anchors


Change = Directions | Ratios


class Sweep:
    """Carries changes out, in scratch memory that it keeps. A returned tensor holds until the next call."""

    def __init__(self, tuned: Sequence[Tuned], stochastic: bool = True, shapes: bool | None = None) -> None:
        """`stochastic`: how what is written to a weight in bf16 or fp16 is rounded; otherwise to the nearest.

        `shapes`: whether it is a rehearsal in shapes, where the tuned tensors are too small to tell.
        """
        for each in tuned:  # elements are counted in row-major order, so they have to lie in it
            if not each.parameter.is_contiguous():
                each.parameter.data = each.parameter.data.contiguous()
        self.stochastic = stochastic
        self.shapes = shapes_alone(t.parameter for t in tuned) if shapes is None else shapes
        self._largest = max(t.parameter.numel() for t in tuned)
        # On real GPUs: the launches that update everything, valid while the tensors lie where they lay.
        self._addresses: list[int] = []
        self._updates: dict[torch.device, Any] = {}
        self._left: list[Tuned] = []
        self._launches: dict[tuple[torch.device, int], Any] = {}
        self._makers: dict[torch.device, NoiseMaker] = {}
        self._buffers: dict[tuple[torch.device, torch.dtype, str], Tensor] = {}

    def copies(
        self,
        tuned: Tuned,
        change: Change,
        lanes: Sequence[int],
        rows: slice | None = None,
        keep: bool = False,
    ) -> list[Tensor]:
        """The changed tensor in each of these lanes, or a range of its rows. `keep`: in memory of its own."""
        weight = tuned.parameter.detach()
        weight = weight if rows is None else weight[rows]
        start = 0 if rows is None else rows.start * weight[:1].numel()
        made = self._room(weight, len(lanes), keep)
        outs = [out.view(-1) for out in made]
        for at, part in self._chunks(weight):
            targets = [out[at : at + part.numel()] for out in outs]
            if isinstance(change, Directions):
                self._perturb(tuned, change, lanes, part, targets, start + at)
            else:
                anchor = change.anchors[tuned.index].view(-1)[start + at : start + at + part.numel()]
                stream = Stream(change.seed, change.step, tuned.index, PROJECTION)
                for target, lane in zip(targets, lanes, strict=True):
                    ratio = change.lanes[lane][tuned.index]
                    self._rescale(part, anchor, ratio, target, stream, start + at)
        return made

    def row_copies(
        self, tuned: Tuned, directions: Directions, lanes: Sequence[int], rows: Tensor
    ) -> list[Tensor]:
        """Chosen rows of the perturbed matrix in each of these lanes."""
        weight = tuned.parameter.detach()
        chosen = weight.index_select(0, rows)
        made = self._room(chosen, len(lanes), keep=False)
        width, maker = weight.shape[1], self._maker(weight.device)
        at_once = max(1, maker.rows_at_once(width))
        for at in range(0, rows.numel(), at_once):
            part, which = chosen[at : at + at_once], rows[at : at + at_once]
            targets = [out[at : at + at_once] for out in made]
            self._perturb(tuned, directions, lanes, part, targets, which)
        return made

    def update_(self, tuned: Sequence[Tuned], directions: Directions, shrink: float = 1.0) -> None:
        """weight = round(shrink * weight - c0 * z0 - c1 * z1 …): the only way a step changes a weight."""
        terms = [i for i, c in enumerate(directions.coefficients) if c != 0]
        # Losses that were never computed differ in nothing, and tell of no slope: a run's would.
        if terms or self.shapes:
            tuned = self._update_on_gpu(tuned, directions, shrink)
        with torch.no_grad():
            for each in tuned:
                factor = shrink if each.decays else 1.0
                if not terms and factor == 1.0:
                    continue
                for start, part in self._chunks(each.parameter.detach()):
                    wide = self._wide(part)
                    if factor != 1.0:
                        wide.mul_(factor)
                    for i in terms:
                        wide.sub_(self._draw(each, directions, i, start, part))
                    if wide is not part:
                        self._write(
                            part, wide, Stream(directions.seed, directions.step, each.index, UPDATE), start
                        )

    def _update_on_gpu(
        self, tuned: Sequence[Tuned], directions: Directions, shrink: float
    ) -> Sequence[Tuned]:
        """One launch for all that lies on a real GPU; returns what is left to do the plain way."""
        addresses = [t.parameter.data_ptr() for t in tuned]
        if self._addresses != addresses:
            self._addresses = addresses
            self._updates, self._left = _updates_by_device(tuned, self.stochastic, self.shapes)
        for device, update in self._updates.items():
            key = (device, len(directions.queries))
            if key not in self._launches:
                self._launches[key] = update.launch(key[1])
            launch, factor = self._launches[key]
            launch.fill(directions.seed, directions.step, directions.queries, directions.coefficients)
            factor.fill_(shrink)
            with torch.cuda.device(device):
                update(launch, factor, signs=directions.kind == "signs")
        return self._left

    def rescale_(self, tuned: Tuned, anchor: Tensor, ratio: float, seed: int, step: int) -> None:
        """weight = round(anchor + ratio * (weight - anchor)). A weight that has not moved stays as it is."""
        weight = tuned.parameter.detach()
        if ratio == 1.0 or torch.equal(weight, anchor):
            return
        stream = Stream(seed, step, tuned.index, PROJECTION)
        with torch.no_grad():
            for start, part in self._chunks(weight):
                self._rescale(part, anchor.view(-1)[start : start + part.numel()], ratio, part, stream, start)

    def _perturb(
        self,
        tuned: Tuned,
        directions: Directions,
        lanes: Sequence[int],
        part: Tensor,
        targets: list[Tensor],
        where: int | Tensor,
    ) -> None:
        wide = self._wide(part)
        drawn: tuple[int, float] | None = None
        noise = wide
        for target, lane in zip(targets, lanes, strict=True):
            query, c = directions.queries[lane], directions.coefficients[lane]
            if c == 0:
                target.copy_(part)
                continue
            # Both sides of a line come from one draw: w - (c * z) is w + (-c * z), bit for bit.
            if drawn != (query, -c):
                noise, drawn = self._draw(tuned, directions, lane, where, part), (query, c)
            combine = torch.add if drawn == (query, c) else torch.sub
            if target.dtype == torch.float32:
                combine(wide, noise, out=target)
            else:
                target.copy_(combine(wide, noise, out=self._buffer(part, "sum", part.numel()).view_as(part)))

    def _rescale(
        self, part: Tensor, anchor: Tensor, ratio: float, target: Tensor, stream: Stream, start: int
    ) -> None:
        base, wide = self._wide(anchor, "anchor"), self._wide(part)
        distance = self._buffer(part, "sum", part.numel()).view_as(part)
        torch.sub(wide, base, out=distance).mul_(ratio)
        self._write(target, distance.add_(base), stream, start)

    def _write(self, target: Tensor, wide: Tensor, stream: Stream, start: int) -> None:
        """Round to the target's type. What it leaves out of a value is the chance that the value is rounded up."""
        dropped = DROPPED_BITS[target.dtype]
        if self.stochastic and dropped:
            chance = self._maker(target.device).draw_bits(stream, start, target.numel())
            # A carry out of the last bits goes where it should: the next number of the type, away from zero.
            raw = wide.view(torch.int32)
            raw.add_(chance.bitwise_right_shift_(16 - dropped)).bitwise_and_(-(1 << dropped))
        target.copy_(wide)

    def _draw(
        self, tuned: Tuned, directions: Directions, i: int, where: int | Tensor, part: Tensor
    ) -> Tensor:
        maker, scale = self._maker(part.device), directions.coefficients[i]
        if isinstance(where, int):
            return maker.draw(directions.stream(tuned, i), where, part.numel(), scale)
        return maker.draw_rows(directions.stream(tuned, i), where, part.shape[1], scale)

    def _chunks(self, weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        flat, size = weight.view(-1), self._maker(weight.device).chunk
        # Without values, the first takes the scratch memory of them all.
        for start in range(0, size if self.shapes else flat.numel(), size):
            yield start, flat[start : start + size]

    def _wide(self, part: Tensor, use: str = "weight") -> Tensor:
        """The values in fp32: the tensor itself, or a copy in scratch."""
        if part.dtype == torch.float32:
            return part
        return self._buffer(part, use, part.numel()).view_as(part).copy_(part)

    def _maker(self, device: torch.device) -> NoiseMaker:
        if device not in self._makers:
            self._makers[device] = NoiseMaker(device, self._largest)
        return self._makers[device]

    def _room(self, like: Tensor, count: int, keep: bool) -> list[Tensor]:
        if keep:
            return [torch.empty(like.shape, dtype=like.dtype, device=like.device) for _ in range(count)]
        room = self._buffer(like, "copies", count * like.numel(), like.dtype)
        return list(room.view(count, *like.shape).unbind(0))

    def _buffer(self, like: Tensor, use: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = (like.device, dtype, use)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers.pop(key, None)  # freed before the larger one is made
            with torch.inference_mode(False):
                self._buffers[key] = torch.empty(size, dtype=dtype, device=like.device)
        return self._buffers[key][:size]


def _updates_by_device(
    tuned: Sequence[Tuned], stochastic: bool, shapes: bool
) -> tuple[dict[torch.device, Any], list[Tuned]]:
    """A launch that updates all tensors of each real GPU, and the tensors that lie elsewhere."""
    by_device: dict[torch.device, list[Tuned]] = {}
    for each in tuned:
        if by_kernels(each.parameter, shapes):
            by_device.setdefault(each.parameter.device, []).append(each)
    if not by_device:
        return {}, list(tuned)
    from trimtab.zeroth.kernels import UpdateAll

    updates = {
        device: UpdateAll([(t.parameter.detach(), t.index, t.decays) for t in some], stochastic)
        for device, some in by_device.items()
    }
    return updates, [t for t in tuned if t.parameter.device not in by_device]
