"""Triton kernels for a real GPU: noise made in registers, from the counter, where it is used; the bits of `sweep.py`.

A group is eight elements of a tensor, which share one call of the generator.
"""

from __future__ import annotations

import os
from typing import Any

import triton
import triton.language as tl

GROUP = 8
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# No fused multiply-add: a product is rounded on its own, as on the CPU.
EXACT: dict[str, Any] = {} if INTERPRETED else {"enable_fp_fusion": False}


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
def noise_of(group, tensor, step, query, key0, key1, SIGNS: tl.constexpr, INTERPRETED: tl.constexpr):
    """What z of eight elements for each group is made of, as `_times` takes it: [groups, 8] in fp32."""
    half = _halves(group, tensor, step, query, key0, key1)
    if SIGNS:
        return 1.0 - 2.0 * (half & 1).to(tl.float32)
    else:
        return _ones(half, INTERPRETED).to(tl.float32)


@triton.jit
def times(noise, coefficient, SIGNS: tl.constexpr, INTERPRETED: tl.constexpr):
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
def coefficient_of(coefficients, lane, SIGNS: tl.constexpr):
    """What one unit of `_noise` is worth."""
    if SIGNS:
        return tl.load(coefficients + lane)
    else:
        return tl.load(coefficients + lane) * 0.5


@triton.jit
def brought_up_to_date(
    value, group, tensor, owed, decays,
    SIGNS: tl.constexpr, DROPPED: tl.constexpr, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The value once the owed update is written, in fp32: what `_update` would write, bit for bit."""
    key0, key1 = tl.load(owed).to(tl.uint32), tl.load(owed + 1).to(tl.uint32)
    step = tl.load(owed + 2).to(tl.uint32)
    numbers = (owed + 4).to(tl.pointer_type(tl.float32))
    if decays != 0:
        value = value * tl.load(numbers + 1)
    z = noise_of(group, tensor, step, tl.load(owed + 3).to(tl.uint32), key0, key1, SIGNS, INTERPRETED)
    value = value - times(z, coefficient_of(numbers, 0, SIGNS), SIGNS, INTERPRETED)
    if DROPPED:
        value = _rounded(value, _halves(group, tensor, step, 0xFFFFFFFF, key0, key1), DROPPED)
    if DROPPED == 16:
        return value  # bf16 holds every such number, fp16 not the small ones
    else:
        return value.to(DTYPE).to(tl.float32)


@triton.jit
def log_sum_exp(logits, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
    z = noise_of(group, tensor, step, tl.load(state + 3).to(tl.uint32), key0, key1, SIGNS, INTERPRETED)
    for lane in tl.static_range(LANES):
        if not ONE_LINE and lane > 0:
            query = tl.load(state + 3 + lane).to(tl.uint32)
            z = noise_of(group, tensor, step, query, key0, key1, SIGNS, INTERPRETED)
        moved = value + times(z, coefficient_of(coefficients, lane, SIGNS), SIGNS, INTERPRETED)
        tl.store(out + lane * out_stride + at, moved.to(out.dtype.element_ty), mask=inside)


@triton.jit
def perturb(
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
            value = brought_up_to_date(
                value, group, tensor, owed, DECAYS, SIGNS, DROPPED, weight.dtype.element_ty, INTERPRETED
            )
            tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)
    _store_lanes(
        value, at, inside, group, tensor, out, state, coefficients, out_stride,
        LANES, ONE_LINE, SIGNS, INTERPRETED,
    )  # fmt: skip


@triton.jit
def perturb_many(
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
            value = brought_up_to_date(
                value, group, tensor, owed, tl.load(line + 6), SIGNS, DROPPED, DTYPE, INTERPRETED
            )
            tl.store(weight + at, value.to(DTYPE), mask=inside, eviction_policy="evict_first")
    _store_lanes(
        value, at, inside, group, tensor, out + place, state, coefficients, stride,
        LANES, ONE_LINE, SIGNS, INTERPRETED,
    )  # fmt: skip


@triton.jit
def perturb_rows(
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
            value = brought_up_to_date(
                value, group, tensor, owed, DECAYS, SIGNS, DROPPED, table.dtype.element_ty, INTERPRETED
            )
    query = tl.load(state + 3).to(tl.uint32) if ONE_LINE else tl.load(state + 3 + lane).to(tl.uint32)
    z = noise_of(group, tensor, step, query, key0, key1, SIGNS, INTERPRETED)
    moved = value + times(z, coefficient_of(coefficients, lane, SIGNS), SIGNS, INTERPRETED)
    tl.store(out + lane * out_stride + token * width + at, moved.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rescale(
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
def update(
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
        z = noise_of(group, index, step, query, key0, key1, SIGNS, INTERPRETED)
        value = value - times(z, coefficient_of(coefficients, i, SIGNS), SIGNS, INTERPRETED)
    if DROPPED:
        value = _rounded(value, _halves(group, index, step, 0xFFFFFFFF, key0, key1), DROPPED)
    tl.store(weight + at, value.to(DTYPE), mask=inside)
