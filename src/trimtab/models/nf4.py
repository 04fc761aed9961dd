"""NF4: weights in four bits, as QLoRA (arXiv 2305.14314) publishes them. It turns tensors to and fro, and nothing else.

Each block of 64 weights has one scale, its largest magnitude, and sixteen values between -1 and 1, spaced as a normal
distribution is. The scales less their mean are themselves held in eight bits, in groups of 256 (double quantisation). A
weight then takes 4.127 bits. bitsandbytes holds the same with `bnb_4bit_quant_type="nf4"` and
`bnb_4bit_use_double_quant=True`; where a scale lies half-way between two codes, the two may choose differently.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from trimtab.virtual import turns

BLOCK = 64
"""Weights that share a scale."""
GROUP = 256
"""Scales that share a scale of their own."""
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The sixteen values, by their code."""
_AT_ONCE = 2**22
"""Weights that are turned at a time: what is needed in passing stays small beside a layer."""
_SMALLEST = 1e-38


class Packed(NamedTuple):
    """A matrix in NF4. None of its tensors is of floating point, so that casting a model leaves them as they are."""

    codes: torch.Tensor
    """uint8 [rows, columns / 2]: two codes a byte, the first in the upper half."""
    scales: torch.Tensor
    """uint8 [blocks]: the code of each block's scale."""
    groups: torch.Tensor
    """int32 [groups + 1]: the bits of fp32 numbers, the scale of each group of scales; last the mean of the scales."""


def packs(rows: int, columns: int) -> bool:
    """Whether a matrix of this size can be held so: a block lies within one row."""
    return rows > 0 and columns > 0 and columns % BLOCK == 0


def sizes(rows: int, columns: int) -> tuple[tuple[int, int], tuple[int], tuple[int]]:
    """The shapes of the three tensors that hold a matrix of this size."""
    blocks = rows * columns // BLOCK
    return (rows, columns // 2), (blocks,), (-(-blocks // GROUP) + 1,)


@torch.no_grad()
def pack(weight: torch.Tensor) -> Packed:
    """A matrix in NF4, on its own device."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    peaks = torch.empty(rows, columns // BLOCK, dtype=torch.float32, device=weight.device)
    between = _between(values_on(weight.device))
    for start, end in turns.of(_spans(rows, columns), weight):
        blocks = weight[start:end].float().view(end - start, -1, BLOCK)
        peak = blocks.abs().amax(-1)
        scaled = (blocks * (1.0 / peak.clamp(min=_SMALLEST)).unsqueeze(-1)).clamp(-1, 1)
        code = torch.bucketize(scaled, between, out_int32=True).to(torch.uint8).view(end - start, -1, 2)
        codes[start:end] = (code[..., 0] << 4) | code[..., 1]
        peaks[start:end] = peak
    scales, groups = _pack_scales(peaks.flatten())
    return Packed(codes, scales, groups)


@torch.no_grad()
def unpack(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The matrix again, in a number format; products are made in fp32 and rounded once."""
    codes, scales, groups = packed
    rows, columns = codes.shape[0], codes.shape[1] * 2
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    peaks = unpack_scales(scales, groups).view(rows, -1, 1)
    pairs = _pairs_on(codes.device)
    for start, end in turns.of(_spans(rows, columns), codes):
        values = torch.nn.functional.embedding(codes[start:end].int(), pairs)
        out[start:end] = (values.view(end - start, -1, BLOCK) * peaks[start:end]).view(end - start, columns)
    return out


def unpack_scales(scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Each block's scale, in fp32."""
    numbers = groups.view(torch.float32)
    each = numbers[:-1].repeat_interleave(GROUP)[: scales.numel()]
    return scale_values_on(scales.device)[scales.int()] * each + numbers[-1]


def _pack_scales(peaks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = peaks.mean()
    rest = peaks - mean
    padded = torch.nn.functional.pad(rest, (0, -rest.numel() % GROUP)).view(-1, GROUP)
    largest = padded.abs().amax(-1)
    scaled = (padded * (1.0 / largest.clamp(min=_SMALLEST)).unsqueeze(-1)).clamp(-1, 1)
    codes = torch.bucketize(scaled, _between(scale_values_on(peaks.device)), out_int32=True)
    groups = torch.cat([largest, mean.view(1)]).view(torch.int32)
    return codes.to(torch.uint8).flatten()[: peaks.numel()].contiguous(), groups


def _between(values: torch.Tensor) -> torch.Tensor:
    """Half-way from each value to the next: what lies under it takes the lower one."""
    return (values[:-1] + values[1:]) / 2


def _spans(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, _AT_ONCE // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


@cache
def scale_values() -> tuple[float, ...]:
    """The 256 values of a scale's code: of both signs, seven decades, the finer the nearer they are to 1."""
    found = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1.0, 2**decade + 1)
        middles = 10.0 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2)
        found += [*middles.tolist(), *(-middles).tolist()]
    return tuple(sorted(found))


@cache
def values_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(VALUES, device=device)


@cache
def scale_values_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(scale_values(), device=device)


@cache
def _pairs_on(device: torch.device) -> torch.Tensor:
    """Both values of a byte, by the byte."""
    values = torch.tensor(VALUES)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1).to(device)
