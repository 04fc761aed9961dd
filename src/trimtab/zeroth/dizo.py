"""DiZO's projection round: how far each chosen tensor should stand from where it started. Numbers only.

The paper rescales a tensor to theta0 + (gamma / ||theta - theta0||) * (theta - theta0), with gamma found by a search
with losses alone and kept within (1 - tau, 1 + tau) times the norm. The ratio alpha = gamma / norm is all that the
weights see. Here gamma's noise is drawn in units of the norm, so the norm cancels out of every line of the search: it
is done for alpha, from 1, and no norm is computed. The authors' program draws the noise in units of the weights: a
tensor that has moved by much less than eps / tau then has nearly all draws cut to the clip, and hardly any step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.zeroth.noise import Stream, scalars
from trimtab.zeroth.settings import ZerothSettings
from trimtab.zeroth.sweep import fp32


class Round:
    """One search: ask for `lanes`, measure their two losses, give them to `observe`; `iterations` times over."""

    def __init__(self, settings: ZerothSettings, step: int, tensors: Sequence[int]) -> None:
        self._settings, self.step, self._tensors = settings, step, list(tensors)
        self.seed = settings.seed
        self._ratios = [1.0] * len(self._tensors)
        self.iteration = 0

    @property
    def ratios(self) -> dict[int, float]:
        """alpha of each tensor, as found so far."""
        return {tensor: fp32(ratio) for tensor, ratio in zip(self._tensors, self._ratios, strict=True)}

    def lanes(self) -> tuple[Mapping[int, float], Mapping[int, float]]:
        """The ratios on either side: alpha + eps * z and alpha - eps * z, with one number z for each tensor."""
        eps = self._settings.projection_eps
        drawn = list(zip(self._tensors, self._ratios, self._noise(), strict=True))
        return (
            {tensor: fp32(ratio + eps * z) for tensor, ratio, z in drawn},
            {tensor: fp32(ratio - eps * z) for tensor, ratio, z in drawn},
        )

    def observe(self, losses: Sequence[float]) -> None:
        """Move every ratio against the slope, within the clip."""
        s = self._settings
        slope = (losses[0] - losses[1]) / (2 * s.projection_eps)
        low, high = 1 - s.projection_clip, 1 + s.projection_clip
        self._ratios = [
            min(max(ratio - s.projection_step * slope * z, low), high)
            for ratio, z in zip(self._ratios, self._noise(), strict=True)
        ]
        self.iteration += 1

    def _noise(self) -> list[float]:
        bound = self._settings.projection_clip / self._settings.projection_eps
        stream = Stream(self.seed, self.step, 0, 1 + self.iteration)
        return [min(max(z, -bound), bound) for z in scalars(stream, self._tensors)]
