"""Weights in NF4 unpacked in one launch: codes, scales and the scales of scales are read, and the numbers written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.models.nf4 import BLOCK, GROUP, Packed, scale_values_on, values_on

_BLOCKS = 64
"""Blocks that one program unpacks."""


@triton.jit
def _unpack(
    codes, scales, groups, values, scale_values, out, blocks, mean_at,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    ok = block < blocks
    scale = tl.load(scale_values + tl.load(scales + block, mask=ok, other=0).to(tl.int32))
    scale = scale * tl.load(groups + block // GROUP, mask=ok, other=0.0) + tl.load(groups + mean_at)
    wide = block.to(tl.int64)
    byte = wide[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    code = tl.load(codes + byte, mask=ok[:, None], other=0).to(tl.int32)
    first = (tl.load(values + (code >> 4)) * scale[:, None]).to(out.dtype.element_ty)
    second = (tl.load(values + (code & 15)) * scale[:, None]).to(out.dtype.element_ty)
    at = wide[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at, tl.interleave(first, second), mask=ok[:, None])


def unpack(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The matrix, as `trimtab.models.nf4.unpack` makes it."""
    codes, scales, groups = packed
    out = torch.empty(codes.shape[0], codes.shape[1] * 2, dtype=dtype, device=codes.device)
    numbers = groups.view(torch.float32)
    blocks = scales.numel()
    tables = values_on(codes.device), scale_values_on(codes.device)
    with torch.cuda.device_of(codes):
        _unpack[(triton.cdiv(blocks, _BLOCKS),)](
            codes, scales, numbers, *tables, out, blocks, numbers.numel() - 1,
            BLOCK=BLOCK, GROUP=GROUP, BLOCKS=_BLOCKS, num_warps=4,
        )  # fmt: skip
    return out
