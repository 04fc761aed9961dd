"""Norms of many tensors at once, on their devices: not finite where one of a tensor's values is not. Reads nothing back
unless it is asked to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def local(tensor: Any) -> torch.Tensor:
    """Of a sharded tensor this process's own part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@dataclass(frozen=True)
class Norms:
    """The norms of named tensors, one tensor of norms for each device and type."""

    groups: list[tuple[list[str], torch.Tensor]]

    @classmethod
    def of(cls, named: Sequence[tuple[str, torch.Tensor]]) -> Norms:
        sorted_out: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = defaultdict(list)
        for name, tensor in named:
            own = local(tensor)
            if own.numel() and own.dtype in _CHECKED and own.device.type != "meta":
                sorted_out[own.device, own.dtype].append((name, own))
        groups = []
        for (_, dtype), members in sorted_out.items():
            # In half precision the norm itself would overflow at 65504.
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
            norms = torch._foreach_norm([tensor for _, tensor in members], 2.0, dtype=wide)
            groups.append(([name for name, _ in members], torch.stack(norms)))
        return cls(groups)

    @property
    def home(self) -> torch.device | None:
        """The first of the devices."""
        return self.groups[0][1].device if self.groups else None

    def faults(self) -> list[torch.Tensor]:
        """For each group, on its device, whether something in it is not finite."""
        return [norms.isfinite().logical_not().any() for _, norms in self.groups]

    def nonfinite_names(self) -> list[str]:
        return [
            name
            for names, norms in self.groups
            for name, good in zip(names, norms.isfinite().tolist(), strict=True)
            if not good
        ]

    def total(self) -> float:
        """The norm of all of them together."""
        return math.hypot(*(value for _, norms in self.groups for value in norms.double().tolist()))
