"""A product of few rows with the weights of every lane, perturbed where the product reads them.

With few rows (a model's head over the scored positions) a product takes the time that its weight takes to be read. Here
the weight is read once for all lanes, moved in registers by the noise of `kernel_code.py` and never written, but for an
update that is owed. With many rows each part of the weight would be made many times over: `ahead.py` is for these.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.zeroth.kernel_code import (
    EXACT,
    GROUP,
    INTERPRETED,
    brought_up_to_date,
    coefficient_of,
    noise_of,
    times,
)
from trimtab.zeroth.kernels import Sweeping, owed_flags

MOST_ROWS = 64
"""Rows of a lane up to which this is the faster way."""
MOST_LANES = 4
LEAST_HEIGHT = 1 << 14
"""Rows of the weight from which on there is a part of it for every processor of a large GPU."""
_HEIGHT, _DEPTH, _WARPS = 32, 64, 2
"""Small tiles: the noise takes most of the time, and many programs hide the waiting for memory."""


def suits(rows: int, lanes: int, height: int, width: int) -> bool:
    """Whether a product of so many rows a lane with a weight of this shape goes this way."""
    few, tall = rows <= MOST_ROWS and lanes <= MOST_LANES, height >= LEAST_HEIGHT
    return few and tall and width % GROUP == 0


@triton.jit
def _product(
    x, weight, out, key, state, coefficients, owed, rows, height,
    LANES: tl.constexpr, ONE_LINE: tl.constexpr, SIGNS: tl.constexpr, OWED: tl.constexpr, DECAYS: tl.constexpr,
    DROPPED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """out[lane, row] = x[lane, row] · (weight + coefficient[lane] * z), for HEIGHT rows of the weight."""
    PER_ROW: tl.constexpr = DEPTH // 8
    kind = weight.dtype.element_ty
    places = tl.arange(0, HEIGHT * PER_ROW)
    line = tl.program_id(0).to(tl.int64) * HEIGHT + places // PER_ROW
    column = places % PER_ROW
    tensor = tl.load(key).to(tl.uint32)
    key0, key1 = tl.load(state).to(tl.uint32), tl.load(state + 1).to(tl.uint32)
    step = tl.load(state + 2).to(tl.uint32)
    query = tl.load(state + 3).to(tl.uint32)
    is_owed = False
    if OWED:
        is_owed = tl.load(owed + 6) != 0
    row = tl.arange(0, ROWS)
    # A sum for each lane; what is not used costs nothing.
    first = tl.zeros((HEIGHT, ROWS), tl.float32)
    second = tl.zeros((HEIGHT, ROWS), tl.float32)
    third = tl.zeros((HEIGHT, ROWS), tl.float32)
    fourth = tl.zeros((HEIGHT, ROWS), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        group = line * (WIDTH // 8) + start // 8 + column
        at = group[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = ((line < height) & (start // 8 + column < WIDTH // 8))[:, None]
        value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        if OWED:  # noqa: SIM102 (known when it is compiled)
            if is_owed:
                value = brought_up_to_date(
                    value, group, tensor, owed, DECAYS, SIGNS, DROPPED, kind, INTERPRETED
                )
                tl.store(weight + at, value.to(kind), mask=inside)
        z = noise_of(group, tensor, step, query, key0, key1, SIGNS, INTERPRETED)
        depth = start + tl.arange(0, DEPTH)
        for lane in tl.static_range(LANES):
            if not ONE_LINE and lane > 0:
                other = tl.load(state + 3 + lane).to(tl.uint32)
                z = noise_of(group, tensor, step, other, key0, key1, SIGNS, INTERPRETED)
            moved = value + times(z, coefficient_of(coefficients, lane, SIGNS), SIGNS, INTERPRETED)
            moved = tl.reshape(moved.to(kind), (HEIGHT, DEPTH))
            source = x + (lane * rows + row)[None, :].to(tl.int64) * WIDTH + depth[:, None]
            held = (row < rows)[None, :] & (depth < WIDTH)[:, None]
            part = tl.load(source, mask=held, other=0.0)
            if INTERPRETED:  # where bf16 would be multiplied by its bits
                moved, part = moved.to(tl.float32), part.to(tl.float32)
            if lane == 0:
                first = tl.dot(moved, part, first, input_precision="ieee")
            elif lane == 1:
                second = tl.dot(moved, part, second, input_precision="ieee")
            elif lane == 2:
                third = tl.dot(moved, part, third, input_precision="ieee")
            else:
                fourth = tl.dot(moved, part, fourth, input_precision="ieee")
    over = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    kept = (over < height)[:, None] & (row < rows)[None, :]
    for lane in tl.static_range(LANES):
        target = out + (lane * rows + row)[None, :].to(tl.int64) * height + over[:, None]
        if lane == 0:
            total = first
        elif lane == 1:
            total = second
        elif lane == 2:
            total = third
        else:
            total = fourth
        tl.store(target, total.to(out.dtype.element_ty), mask=kept)


def thin_product(
    x: Tensor,
    weight: Tensor,
    key: Tensor,
    state: Tensor,
    coefficients: Tensor,
    one_line: bool,
    signs: bool,
    owed: Sweeping | None = None,
) -> Tensor:
    """[lanes, rows, height] of x [lanes, rows, width]; with `owed` the weight is brought up to date, in place."""
    lanes, rows, width = x.shape
    height = weight.shape[0]
    out = torch.empty((lanes, rows, height), dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(height, _HEIGHT),)](
        x.contiguous(), weight, out, key, state, coefficients, state if owed is None else owed.words,
        rows, height,
        LANES=lanes, ONE_LINE=one_line, SIGNS=signs, **owed_flags(owed),
        WIDTH=width, ROWS=max(16, triton.next_power_of_2(rows)), HEIGHT=_HEIGHT, DEPTH=_DEPTH, INTERPRETED=INTERPRETED,
        num_warps=_WARPS, **EXACT,
    )  # fmt: skip
    return out
