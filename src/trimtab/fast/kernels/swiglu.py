"""SwiGLU with the adapters of its three layers, one pass over the wide activations each way.

Forward: `silu(g + tg @ bg.T) * (u + tu @ bu.T)`, where g and u are the base products and tg, tu what the adapters made
of the input. Backward: the gradients of g and u, and those of the three small matrices that meet the wide side. Sums
over rows are made in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 64, 128
_BACK_ROWS, _BACK_COLUMNS = 32, 128
_PARTS = 4
"""Programs that share the rows of one block of columns in the backward pass."""


@triton.jit
def _low_rank(t, t_stride, row, row_ok, b, b_stride, column, column_ok, rank, RANK: tl.constexpr):
    """A tile of `t @ b.T`, and the two operands."""
    k = tl.arange(0, RANK)
    left = tl.load(
        t + row[:, None] * t_stride + k[None, :], mask=row_ok[:, None] & (k[None, :] < rank), other=0.0
    )
    right = tl.load(
        b + column[:, None] * b_stride + k[None, :], mask=column_ok[:, None] & (k[None, :] < rank), other=0.0
    )
    return tl.dot(left, tl.trans(right)), left, right


@triton.jit
def _forward(
    g, u, stride, tg, tu, t_stride, bg, bu, out, rows, columns, rank,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_ok, column_ok = row < rows, column < columns
    wide = row.to(tl.int64)
    here = row_ok[:, None] & column_ok[None, :]
    at = wide[:, None] * stride + column[None, :]
    gate, _, _ = _low_rank(tg, t_stride, row, row_ok, bg, rank, column, column_ok, rank, RANK)
    gate += tl.load(g + at, mask=here, other=0.0).to(tl.float32)
    up, _, _ = _low_rank(tu, t_stride, row, row_ok, bu, rank, column, column_ok, rank, RANK)
    up += tl.load(u + at, mask=here, other=0.0).to(tl.float32)
    made = gate * tl.sigmoid(gate) * up
    tl.store(out + wide[:, None] * columns + column[None, :], made.to(out.dtype.element_ty), mask=here)


@triton.jit
def _backward(
    grad, td, td_stride, ad, g, u, stride, tg, tu, t_stride, bg, bu,
    grad_g, grad_u, grad_stride, grad_ad, grad_bg, grad_bu, rows, columns, rank, per_part,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    k = tl.arange(0, RANK)
    narrow_ok = column_ok[:, None] & (k[None, :] < rank)
    at_b = column[:, None] * rank + k[None, :]
    gate_up = tl.load(bg + at_b, mask=narrow_ok, other=0.0)
    up_up = tl.load(bu + at_b, mask=narrow_ok, other=0.0)
    # The down layer's first matrix lies as [rank, columns].
    at_ad = k[:, None] * columns + column[None, :]
    ad_ok = (k[:, None] < rank) & column_ok[None, :]
    down = tl.load(ad + at_ad, mask=ad_ok, other=0.0)
    sum_ad = tl.zeros((RANK, COLUMNS), tl.float32)
    sum_bg = tl.zeros((RANK, COLUMNS), tl.float32)
    sum_bu = tl.zeros((RANK, COLUMNS), tl.float32)
    first = tl.program_id(1) * per_part
    for index in range(0, per_part // ROWS):
        row = first + index * ROWS + tl.arange(0, ROWS)
        row_ok = row < rows
        wide = row.to(tl.int64)
        here = row_ok[:, None] & column_ok[None, :]
        at = wide[:, None] * stride + column[None, :]
        thin_ok = row_ok[:, None] & (k[None, :] < rank)
        gate_in = tl.load(tg + row[:, None] * t_stride + k[None, :], mask=thin_ok, other=0.0)
        up_in = tl.load(tu + row[:, None] * t_stride + k[None, :], mask=thin_ok, other=0.0)
        down_in = tl.load(td + row[:, None] * td_stride + k[None, :], mask=thin_ok, other=0.0)
        gate = tl.dot(gate_in, tl.trans(gate_up)) + tl.load(g + at, mask=here, other=0.0).to(tl.float32)
        up = tl.dot(up_in, tl.trans(up_up)) + tl.load(u + at, mask=here, other=0.0).to(tl.float32)
        at_grad = wide[:, None] * columns + column[None, :]
        out = tl.dot(down_in, down) + tl.load(grad + at_grad, mask=here, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        made = (silu * up).to(g.dtype.element_ty)
        to_up = (out * silu).to(g.dtype.element_ty)
        to_gate = (out * up * (sigmoid + silu * (1.0 - sigmoid))).to(g.dtype.element_ty)
        at_out = wide[:, None] * grad_stride + column[None, :]
        tl.store(grad_g + at_out, to_gate, mask=here)
        tl.store(grad_u + at_out, to_up, mask=here)
        sum_ad += tl.dot(tl.trans(down_in), made)
        sum_bg += tl.dot(tl.trans(gate_in), to_gate)
        sum_bu += tl.dot(tl.trans(up_in), to_up)
    part = tl.program_id(1).to(tl.int64) * rank * columns
    tl.store(grad_ad + part + at_ad, sum_ad, mask=ad_ok)
    tl.store(grad_bg + part + at_ad, sum_bg, mask=ad_ok)
    tl.store(grad_bu + part + at_ad, sum_bu, mask=ad_ok)


def _rank(rank: int) -> int:
    """What a product of tiles can be made of: a power of two, 16 at least."""
    return int(max(16, triton.next_power_of_2(rank)))


@torch.library.custom_op("trimtab::swiglu", mutates_args=())
def swiglu(
    g: torch.Tensor, u: torch.Tensor, tg: torch.Tensor, tu: torch.Tensor, bg: torch.Tensor, bu: torch.Tensor
) -> torch.Tensor:
    """g, u: [rows, columns] of one stride; tg, tu: [rows, rank] of one stride; bg, bu: [columns, rank], scaled."""
    rows, columns = g.shape
    out = torch.empty(rows, columns, dtype=g.dtype, device=g.device)
    grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _ROWS))
    _forward[grid](
        g, u, g.stride(0), tg, tu, tg.stride(0), bg, bu, out, rows, columns, bg.shape[1],
        RANK=_rank(bg.shape[1]), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return out


@swiglu.register_fake
def _(g, u, tg, tu, bg, bu):
    return g.new_empty(g.shape[0], g.shape[1])


@torch.library.custom_op("trimtab::swiglu_backward", mutates_args=())
def swiglu_backward(
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
    added here.
    """
    rows, columns = g.shape
    rank = bg.shape[1]
    wide = torch.empty(rows, 2 * columns, dtype=g.dtype, device=g.device)
    sums = torch.empty(3, _PARTS, rank, columns, dtype=torch.float32, device=g.device)
    per_part = triton.cdiv(triton.cdiv(rows, _PARTS), _BACK_ROWS) * _BACK_ROWS
    grid = (triton.cdiv(columns, _BACK_COLUMNS), _PARTS)
    _backward[grid](
        grad, td, td.stride(0), ad, g, u, g.stride(0), tg, tu, tg.stride(0), bg, bu,
        wide, wide[:, columns:], 2 * columns, sums[0], sums[1], sums[2], rows, columns, rank, per_part,
        RANK=_rank(rank), ROWS=_BACK_ROWS, COLUMNS=_BACK_COLUMNS, num_warps=4, num_stages=3,
    )  # fmt: skip
    return wide, sums.sum(1)


@swiglu_backward.register_fake
def _(grad, td, ad, g, u, tg, tu, bg, bu):
    sums = g.new_empty(3, bg.shape[1], g.shape[1], dtype=torch.float32)
    return g.new_empty(g.shape[0], 2 * g.shape[1]), sums
