"""SwiGLU and its gradient, one pass over the wide activations each way.

Forward: `silu(g) * u`. Backward: the gradients of g and u, and those of the three small matrices of the adapters that
meet the wide side, summed over the rows while these are there. What gate and up get from their adapters is added here,
both ways, where their base products are read: it is never written. Sums are made in a fixed order: the same inputs give
the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORWARD = (32, 64, 4, 64, 4)
BACKWARD = (64, 64, 4, 16, 3)
"""Rows and columns of a tile, warps, how many programs share the rows of a block of columns, and how many tiles are
under way to a program at once. Small tiles: what hides the waiting for memory is how many run at once."""


@triton.jit
def _forward(
    g, u, stride, tg, tu, t_stride, bg, bu, out, rows, columns, rank, per_part,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    k = tl.arange(0, RANK)
    at_b = column[None, :] * rank + k[:, None]
    b_ok = (k[:, None] < rank) & column_ok[None, :]
    gate_out = tl.load(bg + at_b, mask=b_ok, other=0.0)
    up_out = tl.load(bu + at_b, mask=b_ok, other=0.0)
    first = tl.program_id(1) * per_part
    row = tl.arange(0, ROWS)
    for index in tl.range(0, per_part // ROWS, num_stages=STAGES):
        # Offsets within a tile stay in 32 bits; only where the tile begins needs more.
        start = first + index * ROWS
        far = start.to(tl.int64)
        row_ok = row < rows - start
        here = row_ok[:, None] & column_ok[None, :]
        thin_ok = row_ok[:, None] & (k[None, :] < rank)
        at = row[:, None] * stride + column[None, :]
        gate = tl.load(g + far * stride + at, mask=here, other=0.0).to(tl.float32)
        up = tl.load(u + far * stride + at, mask=here, other=0.0).to(tl.float32)
        at_thin = start * t_stride + row[:, None] * t_stride + k[None, :]
        gate_in = tl.load(tg + at_thin, mask=thin_ok, other=0.0)
        up_in = tl.load(tu + at_thin, mask=thin_ok, other=0.0)
        gate += tl.dot(gate_in, gate_out)
        up += tl.dot(up_in, up_out)
        made = gate * tl.sigmoid(gate) * up
        at_out = row[:, None] * columns + column[None, :]
        tl.store(out + far * columns + at_out, made.to(out.dtype.element_ty), mask=here)


@triton.jit
def _backward(
    grad, td, td_stride, ad, g, u, stride, tg, tu, t_stride, bg, bu,
    grad_g, grad_u, grad_stride, grad_ad, grad_bg, grad_bu, rows, columns, rank, per_part,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    k = tl.arange(0, RANK)
    # The down layer's first matrix lies as [rank, columns].
    at_ad = k[:, None] * columns + column[None, :]
    ad_ok = (k[:, None] < rank) & column_ok[None, :]
    down = tl.load(ad + at_ad, mask=ad_ok, other=0.0)
    # Those of gate and up lie as [columns, rank].
    at_b = column[None, :] * rank + k[:, None]
    gate_out = tl.load(bg + at_b, mask=ad_ok, other=0.0)
    up_out = tl.load(bu + at_b, mask=ad_ok, other=0.0)
    sum_ad = tl.zeros((RANK, COLUMNS), tl.float32)
    sum_bg = tl.zeros((RANK, COLUMNS), tl.float32)
    sum_bu = tl.zeros((RANK, COLUMNS), tl.float32)
    first = tl.program_id(1) * per_part
    row = tl.arange(0, ROWS)
    for index in tl.range(0, per_part // ROWS, num_stages=STAGES):
        # Offsets within a tile stay in 32 bits; only where the tile begins needs more.
        start = first + index * ROWS
        far = start.to(tl.int64)
        row_ok = row < rows - start
        here = row_ok[:, None] & column_ok[None, :]
        thin_ok = row_ok[:, None] & (k[None, :] < rank)
        at = row[:, None] * stride + column[None, :]
        gate = tl.load(g + far * stride + at, mask=here, other=0.0).to(tl.float32)
        up = tl.load(u + far * stride + at, mask=here, other=0.0).to(tl.float32)
        at_grad = row[:, None] * columns + column[None, :]
        out = tl.load(grad + far * columns + at_grad, mask=here, other=0.0).to(tl.float32)
        down_in = tl.load(
            td + start * td_stride + row[:, None] * td_stride + k[None, :], mask=thin_ok, other=0.0
        )
        at_thin = start * t_stride + row[:, None] * t_stride + k[None, :]
        gate_in = tl.load(tg + at_thin, mask=thin_ok, other=0.0)
        up_in = tl.load(tu + at_thin, mask=thin_ok, other=0.0)
        out += tl.dot(down_in, down)
        gate += tl.dot(gate_in, gate_out)
        up += tl.dot(up_in, up_out)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        at_out = row[:, None] * grad_stride + column[None, :]
        made = (silu * up).to(g.dtype.element_ty)
        sum_ad += tl.dot(tl.trans(down_in), made)
        to_up = (out * silu).to(g.dtype.element_ty)
        tl.store(grad_u + far * grad_stride + at_out, to_up, mask=here)
        sum_bu += tl.dot(tl.trans(up_in), to_up)
        to_gate = (out * up * (sigmoid + silu * (1.0 - sigmoid))).to(g.dtype.element_ty)
        tl.store(grad_g + far * grad_stride + at_out, to_gate, mask=here)
        sum_bg += tl.dot(tl.trans(gate_in), to_gate)
    part = tl.program_id(1).to(tl.int64) * rank * columns
    tl.store(grad_ad + part + at_ad, sum_ad, mask=ad_ok)
    tl.store(grad_bg + part + at_ad, sum_bg, mask=ad_ok)
    tl.store(grad_bu + part + at_ad, sum_bu, mask=ad_ok)


def _rank(rank: int) -> int:
    """What a product of tiles can be made of: a power of two, 16 at least."""
    return int(max(16, triton.next_power_of_2(rank)))


def _swiglu(
    g: torch.Tensor,
    u: torch.Tensor,
    tg: torch.Tensor,
    tu: torch.Tensor,
    bg: torch.Tensor,
    bu: torch.Tensor,
) -> torch.Tensor:
    """`silu(g + tg @ bg.T) * (u + tu @ bu.T)`; g and u, [rows, columns], have one stride, and so have tg and tu."""
    rows, columns = g.shape
    rank = bg.shape[1]
    out = torch.empty(rows, columns, dtype=g.dtype, device=g.device)
    height, width, warps, parts, stages = FORWARD
    per_part = triton.cdiv(triton.cdiv(rows, parts), height) * height
    _forward[(triton.cdiv(columns, width), parts)](
        g, u, g.stride(0), tg, tu, tg.stride(0), bg.contiguous(), bu.contiguous(),
        out, rows, columns, rank, per_part,
        RANK=_rank(rank), ROWS=height, COLUMNS=width, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out


def _swiglu_shaped(g, u, tg, tu, bg, bu):
    return g.new_empty(g.shape[0], g.shape[1])


def _swiglu_backward(
    grad: torch.Tensor,
    td: torch.Tensor,
    ad: torch.Tensor,
    g: torch.Tensor,
    u: torch.Tensor,
    tg: torch.Tensor,
    tu: torch.Tensor,
    bg: torch.Tensor,
    bu: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of [g | u] side by side, and of (ad, bg.T, bu.T) in fp32, one behind the other.

    `grad` is the gradient that came through the down layer's base product; that through its adapter, `td @ ad`, is
    added here. The others are those of the forward pass.
    """
    rows, columns = g.shape
    rank = ad.shape[0]
    height, width, warps, parts, stages = BACKWARD
    # The sums grow with the rank: fewer columns then, so that they stay in registers.
    width = max(16, width * 16 // _rank(rank))
    wide = torch.empty(rows, 2 * columns, dtype=g.dtype, device=g.device)
    sums = torch.empty(3, parts, rank, columns, dtype=torch.float32, device=g.device)
    per_part = triton.cdiv(triton.cdiv(rows, parts), height) * height
    _backward[(triton.cdiv(columns, width), parts)](
        grad, td, td.stride(0), ad, g, u, g.stride(0), tg, tu, tg.stride(0), bg.contiguous(), bu.contiguous(),
        wide, wide[:, columns:], 2 * columns, sums[0], sums[1], sums[2], rows, columns, rank, per_part,
        RANK=_rank(rank), ROWS=height, COLUMNS=width, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return wide, sums.sum(1)


def _swiglu_backward_shaped(grad, td, ad, g, u, tg, tu, bg, bu):
    sums = g.new_empty(3, ad.shape[0], g.shape[1], dtype=torch.float32)
    return g.new_empty(g.shape[0], 2 * g.shape[1]), sums


# Defined by hand: what `custom_op` puts around an operation takes longer than launching it.
_LIBRARY = torch.library.Library("trimtab", "FRAGMENT")
_LIBRARY.define("swiglu(Tensor g, Tensor u, Tensor tg, Tensor tu, Tensor bg, Tensor bu) -> Tensor")
_LIBRARY.impl("swiglu", _swiglu, "CompositeExplicitAutograd")
torch.library.register_fake("trimtab::swiglu", _swiglu_shaped, lib=_LIBRARY)
_LIBRARY.define(
    "swiglu_backward(Tensor grad, Tensor td, Tensor ad, Tensor g, Tensor u, Tensor tg, Tensor tu, Tensor bg, "
    "Tensor bu) -> (Tensor, Tensor)"
)
_LIBRARY.impl("swiglu_backward", _swiglu_backward, "CompositeExplicitAutograd")
torch.library.register_fake("trimtab::swiglu_backward", _swiglu_backward_shaped, lib=_LIBRARY)
swiglu = torch.ops.trimtab.swiglu.default
swiglu_backward = torch.ops.trimtab.swiglu_backward.default
