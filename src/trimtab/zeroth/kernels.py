"""Triton kernels for a real GPU: the work of `sweep.py` without a noise tensor, the same bits by the same arithmetic.

Noise is made in registers, from the counter, where it is used. What changes from step to step (seed, step, queries,
coefficients) is read from device memory, so that a launch can be part of a CUDA graph. Imported only where a tensor is
on a real GPU and Triton is installed; nothing here decides what is computed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.zeroth.sweep import DROPPED_BITS

GROUP = 8
# Groups of eight elements for each program: 4,096 elements keep 128 threads busy with 16-byte accesses. Beside
# products, smaller programs make room for them sooner.
_GROUPS = 512
_AHEAD_GROUPS = 256
_SMALL_GROUPS = 64
_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# No fused multiply-add: a product is rounded on its own, as on the CPU.
_EXACT: dict[str, Any] = {} if _INTERPRETED else {"enable_fp_fusion": False}


@dataclass(frozen=True)
class Owed:
    """The update of a step along one line, not yet written to the weights."""

    seed: int
    step: int
    query: int
    coefficient: float
    shrink: float

    def packed(self) -> bytes:
        seed = (self.seed & 0xFFFFFFFF, self.seed >> 32)
        return struct.pack("<4I2fI", *seed, self.step, self.query, self.coefficient, self.shrink, 1)


STATE = 3
"""Words before the queries in `Launch.state`: the seed's low and high half, the step."""
OWED = 7
"""Words of an owed update: the seed's halves, step, query, coefficient, factor of decay, whether there is one."""


class Launch:
    """What the kernels read from device memory. Filled before a pass; its address never changes."""

    def __init__(self, lanes: int, device: torch.device) -> None:
        self.words = torch.zeros(STATE + 2 * lanes + OWED, dtype=torch.int32, device=device)
        self.state = self.words[: STATE + lanes]
        """int32: seed low, seed high, step, then the query of each lane"""
        self.coefficients = self.words[STATE + lanes : STATE + 2 * lanes].view(torch.float32)
        self.owed = self.words[STATE + 2 * lanes :]
        """int32: the update of the step before, where it was left to this pass"""
        self._staged = torch.zeros(0, dtype=torch.int32)

    def fill(
        self,
        seed: int,
        step: int,
        queries: Sequence[int],
        coefficients: Sequence[float],
        owed: Owed | None = None,
    ) -> None:
        packed = struct.pack(f"<{STATE + len(queries)}I", seed & 0xFFFFFFFF, seed >> 32, step, *queries)
        packed += struct.pack(f"<{len(coefficients)}f", *coefficients)
        packed += bytes(4 * OWED) if owed is None else owed.packed()
        # A copy from memory that is not pinned has read it when it returns.
        self._staged = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        self.words.copy_(self._staged, non_blocking=True)


@triton.jit
def _wide(a, b):
    """Both halves of a 32 by 32 bit product."""
    product = a.to(tl.uint64) * b
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _words(group, tensor, step, query, key0, key1):
    """Philox4x32-7 on the counter (group, tensor, step, query)."""
    c0 = group.to(tl.uint32)
    c1 = tl.zeros_like(c0) + tensor
    c2 = tl.zeros_like(c0) + step
    c3 = tl.zeros_like(c0) + query
    k0 = key0
    k1 = key1
    for _ in tl.static_range(7):
        high0, low0 = _wide(c0, 0xD2511F53)
        high1, low1 = _wide(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _ones(half, INTERPRETED: tl.constexpr):
    """How many of the sixteen bits are set."""
    if INTERPRETED:
        count = half - ((half >> 1) & 0x5555)
        count = (count & 0x3333) + ((count >> 2) & 0x3333)
        count = (count + (count >> 4)) & 0x0F0F
        count = (count + (count >> 8)) & 0x1F
        return count.to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [half], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _halves(group, tensor, step, query, key0, key1):
    """Sixteen random bits for each of eight elements of a group: [groups, 8] in uint32."""
    r0, r1, r2, r3 = _words(group, tensor, step, query, key0, key1)
    slot = tl.arange(0, 8)[None, :]
    low = tl.where(slot < 2, r0[:, None], r1[:, None])
    high = tl.where(slot < 6, r2[:, None], r3[:, None])
    word = tl.where(slot < 4, low, high)
    return (word >> ((slot & 1) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def _noise(group, tensor, step, query, key0, key1, SIGNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """What z of eight elements for each group is made of, as `_times` takes it: [groups, 8] in fp32."""
    half = _halves(group, tensor, step, query, key0, key1)
    if SIGNS:
        return 1.0 - 2.0 * (half & 1).to(tl.float32)
    else:
        return _ones(half, INTERPRETED).to(tl.float32)


@triton.jit
def _times(noise, coefficient, SIGNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """coefficient * z, rounded once; the coefficient is that of `_coefficient`.

    z is half of what the set bits are more than eight. The half went into the coefficient, which loses nothing by it;
    eight times a number is exact, so that one fused operation rounds what a subtraction and a product would.
    """
    if SIGNS:
        return coefficient * noise
    elif INTERPRETED:  # numpy's is not fused
        return coefficient * (noise - 8.0)
    else:
        return tl.fma(noise, coefficient, -8.0 * coefficient)


@triton.jit
def _rounded(value, half, DROPPED: tl.constexpr):
    """fp32 that the narrow type holds exactly: the bits it drops are the chance of the next number from zero."""
    raw = value.to(tl.int32, bitcast=True) + (half >> (16 - DROPPED)).to(tl.int32)
    return (raw & (-1 << DROPPED)).to(tl.float32, bitcast=True)


@triton.jit
def _coefficient(coefficients, lane, SIGNS: tl.constexpr):
    """What one unit of `_noise` is worth."""
    if SIGNS:
        return tl.load(coefficients + lane)
    else:
        return tl.load(coefficients + lane) * 0.5


@triton.jit
def _updated(
    value, group, tensor, owed, decays,
    SIGNS: tl.constexpr, DROPPED: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The value once the owed update is written, in fp32: what `_update` would write, bit for bit."""
    key0, key1 = tl.load(owed).to(tl.uint32), tl.load(owed + 1).to(tl.uint32)
    step = tl.load(owed + 2).to(tl.uint32)
    numbers = (owed + 4).to(tl.pointer_type(tl.float32))
    if decays != 0:
        value = value * tl.load(numbers + 1)
    z = _noise(group, tensor, step, tl.load(owed + 3).to(tl.uint32), key0, key1, SIGNS, INTERPRETED)
    value = value - _times(z, _coefficient(numbers, 0, SIGNS), SIGNS, INTERPRETED)
    if DROPPED:
        value = _rounded(value, _halves(group, tensor, step, 0xFFFFFFFF, key0, key1), DROPPED)
    if DROPPED == 16:
        return value  # bf16 holds every such number, fp16 not the small ones
    else:
        return value.to(DTYPE).to(tl.float32)


@triton.jit
def _logsumexp(logits, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """log(sum(exp(row))) in fp32, read once, whatever the type of the logits."""
    row = logits + tl.program_id(0).to(tl.int64) * WIDTH
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(high, value)
        # A lane that has seen nothing but -inf stays at zero.
        kept = tl.where(high == float("-inf"), 0.0, tl.exp(high - higher))
        fresh = tl.where(value == float("-inf"), 0.0, tl.exp(value - higher))
        total = total * kept + fresh
        high = higher
    top = tl.max(high, 0)
    parts = tl.where(high == float("-inf"), 0.0, total * tl.exp(high - top))
    tl.store(out + tl.program_id(0), tl.log(tl.sum(parts, 0)) + top)


@triton.jit
def _store_lanes(
    value, at, inside, group, tensor, out, state, coefficients, out_stride,
    LANES: tl.constexpr, ONE_LINE: tl.constexpr, SIGNS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[lane] = value + coefficient[lane] * z, for the elements `at` of the groups of one tensor."""
    key0, key1 = tl.load(state).to(tl.uint32), tl.load(state + 1).to(tl.uint32)
    step = tl.load(state + 2).to(tl.uint32)
    # MeZO's lanes are two ends of one line, so one draw serves both.
    z = _noise(group, tensor, step, tl.load(state + 3).to(tl.uint32), key0, key1, SIGNS, INTERPRETED)
    for lane in tl.static_range(LANES):
        if not ONE_LINE and lane > 0:
            query = tl.load(state + 3 + lane).to(tl.uint32)
            z = _noise(group, tensor, step, query, key0, key1, SIGNS, INTERPRETED)
        moved = value + _times(z, _coefficient(coefficients, lane, SIGNS), SIGNS, INTERPRETED)
        tl.store(out + lane * out_stride + at, moved.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _perturb(
    weight, out, key, state, coefficients, owed, count, first_group, out_stride,
    LANES: tl.constexpr, ONE_LINE: tl.constexpr, SIGNS: tl.constexpr, OWED: tl.constexpr, DECAYS: tl.constexpr,
    DROPPED: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[lane] = weight + coefficient[lane] * z, for a run of elements of one tensor."""
    local = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < count
    value = tl.load(weight + at, mask=inside).to(tl.float32)
    tensor = tl.load(key).to(tl.uint32)
    group = first_group + local
    if OWED:  # noqa: SIM102 (known when it is compiled)
        if tl.load(owed + 6) != 0:
            value = _updated(
                value, group, tensor, owed, DECAYS, SIGNS, DROPPED, weight.dtype.element_ty, INTERPRETED
            )
            tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)
    _store_lanes(
        value, at, inside, group, tensor, out, state, coefficients, out_stride,
        LANES, ONE_LINE, SIGNS, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _perturb_many(
    table, blocks, out, state, coefficients, owed,
    LANES: tl.constexpr, ONE_LINE: tl.constexpr, SIGNS: tl.constexpr, DTYPE: tl.constexpr, OWED: tl.constexpr,
    DROPPED: tl.constexpr, RAGGED: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The same for many tensors in one launch.

    `table` has seven words for a tensor: address, elements, index, where in `out`, how far from lane to lane, the
    group that it begins with, whether it decays. `blocks` and what is masked are as for `_update`.
    """
    line = table + tl.load(blocks + tl.program_id(0) * 2).to(tl.int64) * 7
    local = tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) + tl.arange(0, GROUPS)
    weight = tl.load(line).to(tl.pointer_type(DTYPE))
    count = tl.load(line + 1)
    tensor = tl.load(line + 2).to(tl.uint32)
    place = tl.load(line + 3)
    stride = tl.load(line + 4)
    if not RAGGED:
        weight = tl.multiple_of(weight, 16)
        place = tl.multiple_of(place, 16)
        stride = tl.multiple_of(stride, 8)
    at = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < count if RAGGED else (local < count // 8)[:, None]
    # The weight is not read again in this pass; its copies are, at once.
    value = tl.load(weight + at, mask=inside, eviction_policy="evict_first").to(tl.float32)
    group = tl.load(line + 5) + local
    if OWED:  # noqa: SIM102 (known when it is compiled)
        if tl.load(owed + 6) != 0:
            value = _updated(
                value, group, tensor, owed, tl.load(line + 6), SIGNS, DROPPED, DTYPE, INTERPRETED
            )
            tl.store(weight + at, value.to(DTYPE), mask=inside, eviction_policy="evict_first")
    _store_lanes(
        value, at, inside, group, tensor, out + place, state, coefficients, stride,
        LANES, ONE_LINE, SIGNS, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _perturb_rows(
    table, ids, out, key, state, coefficients, owed, tokens, width, out_stride,
    ONE_LINE: tl.constexpr, SIGNS: tl.constexpr, OWED: tl.constexpr, DECAYS: tl.constexpr,
    DROPPED: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[token] = table[id] + coefficient * z for the rows looked up; the second grid axis is the lane.

    `OWED`: the rows as they will be once the owed update is written; who sweeps the whole table writes it.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1)
    row = tl.load(ids + lane * tokens + token).to(tl.int64)
    local = tl.arange(0, GROUPS)
    at = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < width
    value = tl.load(table + row * width + at, mask=inside).to(tl.float32)
    tensor = tl.load(key).to(tl.uint32)
    key0, key1 = tl.load(state).to(tl.uint32), tl.load(state + 1).to(tl.uint32)
    step = tl.load(state + 2).to(tl.uint32)
    group = row * (width // 8) + local
    if OWED:  # noqa: SIM102 (known when it is compiled)
        if tl.load(owed + 6) != 0:
            value = _updated(
                value, group, tensor, owed, DECAYS, SIGNS, DROPPED, table.dtype.element_ty, INTERPRETED
            )
    query = tl.load(state + 3).to(tl.uint32) if ONE_LINE else tl.load(state + 3 + lane).to(tl.uint32)
    z = _noise(group, tensor, step, query, key0, key1, SIGNS, INTERPRETED)
    moved = value + _times(z, _coefficient(coefficients, lane, SIGNS), SIGNS, INTERPRETED)
    tl.store(out + lane * out_stride + token * width + at, moved.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rescale(
    weight, anchor, out, ratios, key, state, count, first_group, out_stride,
    LANES: tl.constexpr, DROPPED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """out[lane] = anchor + ratio[lane] * (weight - anchor), for a run of elements of one tensor."""
    local = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = local[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < count
    base = tl.load(anchor + at, mask=inside).to(tl.float32)
    distance = tl.load(weight + at, mask=inside).to(tl.float32) - base
    if DROPPED:
        tensor, step = tl.load(key).to(tl.uint32), tl.load(state + 2).to(tl.uint32)
        key0, key1 = tl.load(state).to(tl.uint32), tl.load(state + 1).to(tl.uint32)
        half = _halves(first_group + local, tensor, step, tl.load(state + 3).to(tl.uint32), key0, key1)
    for lane in tl.static_range(LANES):
        moved = distance * tl.load(ratios + lane) + base
        if DROPPED:
            moved = _rounded(moved, half, DROPPED)
        tl.store(out + lane * out_stride + at, moved.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _update(
    table, blocks, state, coefficients, shrink, gate,
    QUERIES: tl.constexpr, SIGNS: tl.constexpr, DTYPE: tl.constexpr, DROPPED: tl.constexpr,
    RAGGED: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """weight = shrink * weight - c0 * z0 - c1 * z1 …, for many tuned tensors in one launch.

    `table` has four words for a tensor: address, elements, index, whether it decays. `blocks` has two for a program:
    which tensor, and from which group on. Tensors of whole groups are masked by the group, which keeps accesses wide.
    With a gate that is shut nothing is done.
    """
    if GATED:  # noqa: SIM102 (known when it is compiled)
        if tl.load(gate) == 0:
            return
    tensor = tl.load(blocks + tl.program_id(0) * 2).to(tl.int64)
    start = tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64)
    weight = tl.load(table + tensor * 4).to(tl.pointer_type(DTYPE))
    weight = tl.multiple_of(weight, 16)
    count = tl.load(table + tensor * 4 + 1)
    index = tl.load(table + tensor * 4 + 2).to(tl.uint32)
    decays = tl.load(table + tensor * 4 + 3)
    group = start + tl.arange(0, GROUPS)
    at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = at < count if RAGGED else (group < count // 8)[:, None]
    value = tl.load(weight + at, mask=inside).to(tl.float32)
    value = tl.where(decays != 0, value * tl.load(shrink), value)
    key0, key1 = tl.load(state).to(tl.uint32), tl.load(state + 1).to(tl.uint32)
    step = tl.load(state + 2).to(tl.uint32)
    for i in tl.static_range(QUERIES):
        query = tl.load(state + 3 + i).to(tl.uint32)
        z = _noise(group, index, step, query, key0, key1, SIGNS, INTERPRETED)
        value = value - _times(z, _coefficient(coefficients, i, SIGNS), SIGNS, INTERPRETED)
    if DROPPED:
        value = _rounded(value, _halves(group, index, step, 0xFFFFFFFF, key0, key1), DROPPED)
    tl.store(weight + at, value.to(DTYPE), mask=inside)


@dataclass(frozen=True)
class Sweeping:
    """The owed update of one tensor, for a kernel that reads the tensor anyway."""

    words: Tensor
    """`Launch.owed`"""
    decays: bool
    dropped: int
    """Bits that are rounded by chance; 0: to the nearest."""


def _owed_flags(owed: Sweeping | None) -> dict[str, Any]:
    if owed is None:
        return {"OWED": False, "DECAYS": False, "DROPPED": 0}
    return {"OWED": True, "DECAYS": owed.decays, "DROPPED": owed.dropped}


def perturbed(
    weight: Tensor,
    key: Tensor,
    state: Tensor,
    coefficients: Tensor,
    one_line: bool,
    signs: bool,
    first: int = 0,
    out: Tensor | None = None,
    owed: Sweeping | None = None,
) -> Tensor:
    """[lanes, *weight.shape]; `weight` may be a run of rows that starts at element `first` of its tensor.

    `out`: where they go; a lane lies in one piece. `owed`: the weight is first brought up to date, in place.
    """
    lanes, count = coefficients.numel(), weight.numel()
    if out is None:
        out = torch.empty((lanes, *weight.shape), dtype=weight.dtype, device=weight.device)
    grid = (triton.cdiv(count, _GROUPS * GROUP),)
    _perturb[grid](
        weight, out, key, state, coefficients, state if owed is None else owed.words, count, first // GROUP,
        out.stride(0),
        LANES=lanes, ONE_LINE=one_line, SIGNS=signs, **_owed_flags(owed), GROUPS=_GROUPS, INTERPRETED=_INTERPRETED,
        num_warps=4, **_EXACT,
    )  # fmt: skip
    return out


def perturbed_rows(
    table: Tensor,
    ids: Tensor,
    key: Tensor,
    state: Tensor,
    coefficients: Tensor,
    one_line: bool,
    signs: bool,
    owed: Sweeping | None = None,
) -> Tensor:
    """[*ids.shape, width]: rows of each lane's table, the ids being lane after lane."""
    lanes, width = coefficients.numel(), table.shape[1]
    out = torch.empty((*ids.shape, width), dtype=table.dtype, device=table.device)
    tokens = ids.numel() // lanes
    _perturb_rows[(tokens, lanes)](
        table, ids, out, key, state, coefficients, state if owed is None else owed.words, tokens, width, tokens * width,
        ONE_LINE=one_line, SIGNS=signs, **_owed_flags(owed), GROUPS=triton.next_power_of_2(triton.cdiv(width, GROUP)),
        INTERPRETED=_INTERPRETED, num_warps=4, **_EXACT,
    )  # fmt: skip
    return out


def rescaled(
    weight: Tensor,
    anchor: Tensor,
    ratios: Tensor,
    key: Tensor,
    state: Tensor,
    stochastic: bool,
    first: int = 0,
) -> Tensor:
    """[lanes, *weight.shape]: the distance from the anchor rescaled by each lane's ratio."""
    lanes, count = ratios.numel(), weight.numel()
    out = torch.empty((lanes, *weight.shape), dtype=weight.dtype, device=weight.device)
    _rescale[(triton.cdiv(count, _GROUPS * GROUP),)](
        weight, anchor, out, ratios, key, state, count, first // GROUP, count,
        LANES=lanes, DROPPED=DROPPED_BITS[weight.dtype] if stochastic else 0, GROUPS=_GROUPS,
        num_warps=4, **_EXACT,
    )  # fmt: skip
    return out


def logsumexp(logits: Tensor) -> Tensor:
    """Over the last dimension, in fp32, without a wide copy of the logits."""
    rows = logits.contiguous()
    out = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
    _logsumexp[(out.numel(),)](rows, out, WIDTH=rows.shape[-1], BLOCK=4096, num_warps=8)
    return out


class UpdateAll:
    """The update of many tensors in one launch for each of their types."""

    def __init__(self, tensors: Sequence[tuple[Tensor, int, bool]], stochastic: bool) -> None:
        """Each with its index among the tuned and whether it decays. They must stay where they are."""
        self._parts: list[tuple[Any, int, bool, Tensor, Tensor]] = []
        self._device = tensors[0][0].device
        groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, int, bool]]] = {}
        for each in tensors:
            wide = each[0].numel() % GROUP == 0 and each[0].data_ptr() % 16 == 0
            groups.setdefault((each[0].dtype, not wide), []).append(each)
        for (dtype, ragged), some in groups.items():
            dropped = DROPPED_BITS[dtype] if stochastic else 0
            table = [[t.data_ptr(), t.numel(), index, int(decays)] for t, index, decays in some]
            words = torch.tensor(table, dtype=torch.int64, device=self._device)
            blocks = _blocks([t for t, _, _ in some], self._device)
            self._parts.append((_KINDS[dtype], dropped, ragged, words, blocks))

    def launch(self, queries: int) -> tuple[Launch, Tensor]:
        """What a call reads: the directions, and the factor of weight decay."""
        return Launch(queries, self._device), torch.ones(1, device=self._device)

    def __call__(self, launch: Launch, shrink: Tensor, *, signs: bool) -> None:
        self._run(launch.state, launch.coefficients, shrink, shrink, signs, gated=False)

    def owed(self, launch: Launch, *, signs: bool) -> None:
        """The update that `launch` says is owed, if one is."""
        words = launch.owed
        numbers = words[4:6].view(torch.float32)
        self._run(words, numbers[:1], numbers[1:], words[6:], signs, gated=True)

    def _run(
        self, state: Tensor, coefficients: Tensor, shrink: Tensor, gate: Tensor, signs: bool, *, gated: bool
    ) -> None:
        for kind, dropped, ragged, table, blocks in self._parts:
            _update[(blocks.shape[0],)](
                table, blocks, state, coefficients, shrink, gate,
                QUERIES=coefficients.numel(), SIGNS=signs, DTYPE=kind, DROPPED=dropped, RAGGED=ragged,
                GATED=gated, GROUPS=_GROUPS, INTERPRETED=_INTERPRETED, num_warps=4, **_EXACT,
            )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A tensor, or a run of its rows, of which `Perturbed` makes copies."""

    rows: Tensor
    index: int
    decays: bool
    place: int
    """Where in the output, in elements."""
    stride: int
    """From one lane to the next, in elements."""
    first: int = 0
    """The element of the tensor at which the rows begin."""

    @property
    def wide(self) -> bool:
        """Whether it is whole groups, each of which can be read and written at once."""
        aligned = self.rows.data_ptr() % 16 == 0 and self.place % 16 == 0
        return aligned and self.rows.numel() % GROUP == 0 and self.stride % GROUP == 0


class Perturbed:
    """The perturbed copies of many tensors of one type, made in one launch."""

    def __init__(self, parts: Sequence[Part], out: Tensor, *, carry: bool, stochastic: bool) -> None:
        """They must stay where they are. `carry`: they are brought up to date before, where an update is owed."""
        device = out.device
        self._out, self._carry = out, carry
        self._wide = all(part.wide for part in parts)
        self._dropped = DROPPED_BITS[out.dtype] if stochastic else 0
        large = self._wide and any(part.rows.numel() > _GROUPS * GROUP for part in parts)
        self._groups = _AHEAD_GROUPS if large else _SMALL_GROUPS
        table = [
            [p.rows.data_ptr(), p.rows.numel(), p.index, p.place, p.stride, p.first // GROUP, int(p.decays)]
            for p in parts
        ]
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._blocks = _blocks([part.rows for part in parts], device, self._groups)

    def __call__(self, launch: Launch, one_line: bool, signs: bool) -> None:
        _perturb_many[(self._blocks.shape[0],)](
            self._table, self._blocks, self._out, launch.state, launch.coefficients, launch.owed,
            LANES=launch.coefficients.numel(), ONE_LINE=one_line, SIGNS=signs, DTYPE=_KINDS[self._out.dtype],
            OWED=self._carry, DROPPED=self._dropped, RAGGED=not self._wide, GROUPS=self._groups,
            INTERPRETED=_INTERPRETED, num_warps=4, **_EXACT,
        )  # fmt: skip


class PerturbedSmall:
    """The copies of many small tensors of one type, in memory of their own, to be read where `views` say."""

    def __init__(
        self, tensors: Sequence[tuple[Tensor, int, bool]], lanes: int, *, carry: bool, stochastic: bool
    ) -> None:
        """Each with its index among the tuned and whether it decays."""
        first = tensors[0][0]
        sizes = [triton.cdiv(t.numel(), 16) * 16 for t, _, _ in tensors]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        out = torch.empty(lanes, sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [out[:, at : at + t.numel()] for at, (t, _, _) in zip(offsets, tensors, strict=True)]
        """[lanes, elements] of each tensor."""
        parts = [
            Part(t, index, decays, at, out.stride(0))
            for (t, index, decays), at in zip(tensors, offsets, strict=True)
        ]
        self._made = Perturbed(parts, out, carry=carry, stochastic=stochastic)

    def __call__(self, launch: Launch, one_line: bool, signs: bool) -> None:
        self._made(launch, one_line, signs)


def _blocks(tensors: Sequence[Tensor], device: torch.device, groups: int = _GROUPS) -> Tensor:
    """For each program: which tensor, and from which group on."""
    return torch.tensor(
        [
            (which, start)
            for which, tensor in enumerate(tensors)
            for start in range(0, triton.cdiv(tensor.numel(), GROUP), groups)
        ],
        dtype=torch.int32,
        device=device,
    )
