"""The Triton kernels of `kernel_code.py`, launched: the work of `sweep.py` on a real GPU, without a noise tensor.

What changes from step to step (seed, step, queries, coefficients) is read from device memory, so that a launch can be
part of a CUDA graph. Imported only where a tensor is on a real GPU and Triton is installed; nothing here decides what
is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.zeroth.kernel_code import (
    EXACT,
    GROUP,
    INTERPRETED,
    log_sum_exp,
    perturb,
    perturb_many,
    perturb_rows,
    rescale,
    update,
)
from trimtab.zeroth.sweep import DROPPED_BITS

# Groups of eight elements for each program: 4,096 elements keep 128 threads busy with 16-byte accesses. Beside
# products, smaller programs make room for them sooner.
_GROUPS = 512
_AHEAD_GROUPS = 256
_SMALL_GROUPS = 64
_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


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


@dataclass(frozen=True)
class Sweeping:
    """The owed update of one tensor, for a kernel that reads the tensor anyway."""

    words: Tensor
    """`Launch.owed`"""
    decays: bool
    dropped: int
    """Bits that are rounded by chance; 0: to the nearest."""


def owed_flags(owed: Sweeping | None) -> dict[str, Any]:
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
    perturb[grid](
        weight, out, key, state, coefficients, state if owed is None else owed.words, count, first // GROUP,
        out.stride(0),
        LANES=lanes, ONE_LINE=one_line, SIGNS=signs, **owed_flags(owed), GROUPS=_GROUPS, INTERPRETED=INTERPRETED,
        num_warps=4, **EXACT,
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
    perturb_rows[(tokens, lanes)](
        table, ids, out, key, state, coefficients, state if owed is None else owed.words, tokens, width, tokens * width,
        ONE_LINE=one_line, SIGNS=signs, **owed_flags(owed), GROUPS=triton.next_power_of_2(triton.cdiv(width, GROUP)),
        INTERPRETED=INTERPRETED, num_warps=4, **EXACT,
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
    rescale[(triton.cdiv(count, _GROUPS * GROUP),)](
        weight, anchor, out, ratios, key, state, count, first // GROUP, count,
        LANES=lanes, DROPPED=DROPPED_BITS[weight.dtype] if stochastic else 0, GROUPS=_GROUPS,
        num_warps=4, **EXACT,
    )  # fmt: skip
    return out


def logsumexp(logits: Tensor) -> Tensor:
    """Over the last dimension, in fp32, without a wide copy of the logits."""
    rows = logits.contiguous()
    out = torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device)
    log_sum_exp[(out.numel(),)](rows, out, WIDTH=rows.shape[-1], BLOCK=4096, num_warps=8)
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
            update[(blocks.shape[0],)](
                table, blocks, state, coefficients, shrink, gate,
                QUERIES=coefficients.numel(), SIGNS=signs, DTYPE=kind, DROPPED=dropped, RAGGED=ragged,
                GATED=gated, GROUPS=_GROUPS, INTERPRETED=INTERPRETED, num_warps=4, **EXACT,
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
        perturb_many[(self._blocks.shape[0],)](
            self._table, self._blocks, self._out, launch.state, launch.coefficients, launch.owed,
            LANES=launch.coefficients.numel(), ONE_LINE=one_line, SIGNS=signs, DTYPE=_KINDS[self._out.dtype],
            OWED=self._carry, DROPPED=self._dropped, RAGGED=not self._wide, GROUPS=self._groups,
            INTERPRETED=INTERPRETED, num_warps=4, **EXACT,
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
