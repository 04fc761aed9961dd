"""Noise by counter: z is a function of (seed, step, tensor, query, element) and of nothing else. It keeps no state.

Philox4x32 with seven rounds. Its key is the seed; its counter is (group, tensor, step, query), where a group is
eight consecutive elements of a tensor in row-major order. The four output words hold eight 16-bit halves, one for
each element. So z has the same bits on every device, whatever part of a tensor is asked for and in whatever order.

- `normal`: (popcount(half) - 8) / 2. Mean 0, variance exactly 1, seventeen values from -4 to 4, each exact in every
  dtype: rounding and device libraries have no say in it.
- `signs`: 1 - 2 * (half & 1). Plus or minus one.
- the halves themselves, by `draw_bits`: what a stochastic rounding of a weight to 16 bits compares with.

Integer torch operations alone, in chunks that fit a processor's cache: no noise tensor larger than a chunk is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["normal", "signs"]

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
GROUP = 8
WORD = 0xFFFFFFFF
# Below this a scale loses bits when halved (it would become subnormal), so z is made first and scaled after.
SMALLEST_SCALE = 2.0**-120

# torch splits an operation over threads in pieces of 32,768 elements: one piece for each thread, 256 KiB a buffer.
_GROUPS_PER_THREAD = 32_768
_MOST_THREADS = 8
_GROUPS_ON_DEVICE = 1 << 19


@dataclass(frozen=True)
class Stream:
    """Which noise: all of the counter but the element."""

    seed: int
    step: int
    tensor: int
    query: int = 0
    kind: Kind = "normal"

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"a noise seed has 64 bits, got {self.seed}")
        if not all(0 <= part <= WORD for part in (self.step, self.tensor, self.query)):
            raise ValueError(f"step, tensor and query have 32 bits each, got {self}")


class NoiseMaker:
    """Makes noise on one device, in buffers that it keeps. What it returns is overwritten by its next call."""

    def __init__(self, device: torch.device, most_elements: int | None = None) -> None:
        groups = _GROUPS_ON_DEVICE
        if device.type == "cpu":
            groups = _GROUPS_PER_THREAD * min(torch.get_num_threads(), _MOST_THREADS)
        if most_elements is not None:  # no larger buffers than the largest tensor can use
            groups = min(groups, _groups_of(most_elements) + 2)
        self.device = device
        self.groups = groups
        with torch.inference_mode(False):
            self._lanes = [torch.empty(groups, dtype=torch.int64, device=device) for _ in range(5)]
            self._words = torch.empty(groups, 2, dtype=torch.int64, device=device)
            # The second half of the work needs the first half's buffers no more, but for one.
            self._values = torch.empty(groups * GROUP, dtype=torch.float32, device=device)

    @property
    def chunk(self) -> int:
        """How many elements one call may ask for."""
        return (self.groups - 2) * GROUP

    def draw(self, stream: Stream, start: int, count: int, scale: float = 1.0) -> Tensor:
        """`scale * z` in fp32, for `count` elements from `start` on."""
        counter, offset = self._counter(start, count)
        return self._values_of(counter, stream, scale)[offset : offset + count]

    def draw_rows(self, stream: Stream, rows: Tensor, columns: int, scale: float = 1.0) -> Tensor:
        """`scale * z` in fp32 for these rows of a matrix: [rows, columns]."""
        aligned = columns % GROUP == 0
        span = columns // GROUP if aligned else (columns + 2 * GROUP - 2) // GROUP
        counter = self._lanes[0][: rows.numel() * span].view(-1, span)
        begin = rows.to(torch.int64) * columns
        first = torch.div(begin, GROUP, rounding_mode="floor")
        torch.add(first[:, None], torch.arange(span, device=self.device), out=counter)
        values = self._values_of(counter.view(-1), stream, scale).view(-1, span * GROUP)
        if aligned:
            return values
        place = (begin - first * GROUP)[:, None] + torch.arange(columns, device=self.device)
        return values.gather(1, place)

    def draw_bits(self, stream: Stream, start: int, count: int) -> Tensor:
        """The halves as they are, 0 to 65,535 in int32, for `count` elements from `start` on."""
        counter, offset = self._counter(start, count)
        # Of the kind that leaves the words alone.
        halves = self._philox(counter, replace(stream, kind="signs")).view(torch.int16)
        bits = self._values.view(torch.int32)[: halves.numel()]
        return bits.copy_(halves).bitwise_and_(0xFFFF)[offset : offset + count]

    def rows_at_once(self, columns: int) -> int:
        """How many rows of that width one call of `draw_rows` may ask for; 0 where not even one fits."""
        return self.groups // ((columns + 2 * GROUP - 2) // GROUP)

    def _counter(self, start: int, count: int) -> tuple[Tensor, int]:
        """The groups that hold these elements, and where in the first of them they begin."""
        first = start // GROUP
        groups = _groups_of(start + count) - first
        counter = self._lanes[0][:groups]
        torch.arange(first, first + groups, out=counter)
        return counter, start - first * GROUP

    def _values_of(self, counter: Tensor, stream: Stream, scale: float) -> Tensor:
        halves = self._philox(counter, stream).view(torch.int16)
        values = self._values[: halves.numel()]
        if stream.kind == "signs":
            # bit 0 -> 1, bit 1 -> -1
            halves.bitwise_and_(1).mul_(-2).add_(1)
            values.copy_(halves)
            return values if scale == 1.0 else values.mul_(scale)
        values.copy_(halves.sub_(8))
        if abs(scale) < SMALLEST_SCALE:
            return values.mul_(0.5).mul_(scale)
        return values.mul_(0.5 * scale)

    def _philox(self, counter: Tensor, stream: Stream) -> Tensor:
        """The halves of all groups, [groups * 8] as int64 words of four; for `normal` already their bit counts.

        Every 32-bit word has a 64-bit lane of its own, so that a product keeps its high half. Only what is about to
        be multiplied must have a clean upper half; the others may carry rubbish there. In the first rounds the words
        that do not yet depend on the group are numbers, computed once.
        """
        n = counter.numel()
        keys = [
            ((stream.seed + r * WEYL[0]) & WORD, ((stream.seed >> 32) + r * WEYL[1]) & WORD)
            for r in range(ROUNDS)
        ]
        c0, c1, c2, c3, spare = (lane[:n] for lane in self._lanes)
        step = stream.step * MULTIPLIERS[1]
        c0.mul_(MULTIPLIERS[0])
        torch.bitwise_right_shift(c0, 32, out=c2).bitwise_xor_(stream.query ^ keys[0][1]).bitwise_and_(WORD)
        first = ((step >> 32) ^ stream.tensor ^ keys[0][0]) * MULTIPLIERS[0]
        # Round 1: words 0 and 1 are constants, word 2 is in c2 and word 3 in c0.
        c2.mul_(MULTIPLIERS[1])
        torch.bitwise_right_shift(c2, 32, out=c1).bitwise_xor_((step & WORD) ^ keys[1][0]).bitwise_and_(WORD)
        c0.bitwise_xor_((first >> 32) ^ keys[1][1]).bitwise_and_(WORD)
        # Round 2: word 0 is in c1, word 1 in c2, word 2 in c0, and word 3 is a constant.
        c1.mul_(MULTIPLIERS[0])
        c0.mul_(MULTIPLIERS[1])
        torch.bitwise_right_shift(c1, 32, out=c3).bitwise_xor_((first & WORD) ^ keys[2][1]).bitwise_and_(WORD)
        torch.bitwise_right_shift(c0, 32, out=spare)
        c2.bitwise_xor_(spare).bitwise_xor_(keys[2][0]).bitwise_and_(WORD)
        c0, c1, c2, c3 = c2, c0, c3, c1
        for r in range(3, ROUNDS - 1):
            c0.mul_(MULTIPLIERS[0])
            c2.mul_(MULTIPLIERS[1])
            torch.bitwise_right_shift(c2, 32, out=spare)
            c1.bitwise_xor_(spare).bitwise_xor_(keys[r][0]).bitwise_and_(WORD)
            torch.bitwise_right_shift(c0, 32, out=spare)
            c3.bitwise_xor_(spare).bitwise_xor_(keys[r][1]).bitwise_and_(WORD)
            c0, c1, c2, c3 = c1, c2, c3, c0
        words = self._words[:n]
        c0.mul_(MULTIPLIERS[0])
        c2.mul_(MULTIPLIERS[1])
        for column, product, other, key in ((0, c2, c1, keys[-1][0]), (1, c0, c3, keys[-1][1])):
            torch.bitwise_right_shift(product, 32, out=spare)
            other.bitwise_xor_(spare).bitwise_xor_(key).bitwise_and_(WORD)
            torch.bitwise_left_shift(product, 32, out=spare)
            torch.bitwise_or(other, spare, out=words[:, column])
        flat = words.view(-1)
        return flat if stream.kind == "signs" else self._count_bits(flat)

    def _count_bits(self, words: Tensor) -> Tensor:
        """Replace each 16-bit half by the number of its set bits."""
        # Additions go by 16-bit views: for int64 torch multiplies by `alpha` first, which costs three times as much.
        spare = self._values.view(torch.int64)[: words.numel()]
        halves, spare_halves = words.view(torch.int16), spare.view(torch.int16)
        torch.bitwise_right_shift(words, 1, out=spare).bitwise_and_(0x5555_5555_5555_5555)
        halves.sub_(spare_halves)
        torch.bitwise_right_shift(words, 2, out=spare).bitwise_and_(0x3333_3333_3333_3333)
        words.bitwise_and_(0x3333_3333_3333_3333)
        halves.add_(spare_halves)
        # No sum exceeds 8, so none runs over into its neighbour.
        torch.bitwise_right_shift(words, 4, out=spare)
        halves.add_(spare_halves)
        words.bitwise_and_(0x0F0F_0F0F_0F0F_0F0F)
        torch.bitwise_right_shift(words, 8, out=spare)
        halves.add_(spare_halves)
        return words.bitwise_and_(0x001F_001F_001F_001F)


def noise(stream: Stream, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """The whole noise of a tensor, fp32: to look at and to test against. Training never makes it."""
    out = torch.empty(shape, dtype=torch.float32, device=device)
    flat = out.view(-1)
    maker = NoiseMaker(out.device, out.numel())
    for start in range(0, out.numel(), maker.chunk):
        part = flat[start : start + maker.chunk]
        part.copy_(maker.draw(stream, start, part.numel()))
    return out


def scalars(stream: Stream, tensors: list[int]) -> list[float]:
    """Element 0 of each of these tensors' noise, as numbers. They are few: computed in plain Python."""
    return [_element_zero(replace(stream, tensor=tensor)) for tensor in tensors]


def _element_zero(stream: Stream) -> float:
    k0, k1 = stream.seed & WORD, stream.seed >> 32
    c0, c1, c2, c3 = 0, stream.tensor, stream.step, stream.query
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & WORD, (p0 >> 32) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    half = c0 & 0xFFFF
    return 1.0 - 2.0 * (half & 1) if stream.kind == "signs" else (half.bit_count() - 8) / 2


def _groups_of(elements: int) -> int:
    return (elements + GROUP - 1) // GROUP
