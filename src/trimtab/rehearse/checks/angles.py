"""Sines of angles that 16 bits have rounded by more than half a radian: positions and times that cannot be told apart.

bfloat16 has steps of 2 from 256 on. Nothing raises, and the loss hardly shows it; models then ignore far positions.
Speaks of values that were seen, never of precisions alone.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from trimtab.diagnose import source
from trimtab.diagnose.finding import cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, place_born, watch_function
from trimtab.virtual.tensor import payload_of

_WAVES = (torch.sin, torch.cos, torch.Tensor.sin, torch.Tensor.cos)
_ROUNDED = 0.5
"""Radians."""


class Angles(BaseCheck):
    """Looks at the largest angle of each sine and cosine in 16 bits."""

    def install(self) -> None:
        for function in _WAVES:
            watch_function(function, self._taken)

    def _taken(self, caller: FrameType, args: tuple[Any, ...], result: Any) -> None:
        angle = args[0] if args else None
        if not isinstance(angle, torch.Tensor) or angle.dtype not in (torch.bfloat16, torch.float16):
            return
        values = payload_of(angle.detach())
        if values.is_meta or not values.numel():
            return
        largest = float(values.float().abs().max())
        error = largest * torch.finfo(angle.dtype).eps / 2
        frame = next(places.frames(), None)
        if not _ROUNDED < error < float("inf") or frame is None:
            return
        place = source.place(frame.f_code.co_filename, frame.f_lineno)
        born = place_born(angle) or place
        kind = str(angle.dtype).removeprefix("torch.")
        if torch.is_autocast_enabled("cuda"):
            fix = (
                "Compute the angles in float32, from float32 operands and outside of autocast: put `with "
                f'torch.autocast(device_type="cuda", enabled=False):` around line {born.line}; cast the sine only.'
            )
        else:
            fix = f"Keep the angles in float32 up to the sine: cast its result to {kind}, not what it is computed from."
        self.report(
            "rounded-away",
            f"Angles up to {largest:.0f} are in {kind}, which rounds them by up to {error:.1f} radians: their sines "
            "and cosines tell neighbouring positions apart no more.",
            place,
            cause_at(born, f"this makes the angles, in {kind}"),
            fix,
            "sin",
            once=f"{born.file}:{born.line}",
        )
