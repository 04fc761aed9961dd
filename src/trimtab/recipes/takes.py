"""What a recipe that speaks gives to be judged: rows as the model says them, beside what they are held against.

Judges nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from trimtab.data.clips import Clip

    Samples = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Take:
    """One row, spoken."""

    text: str
    where: str
    trained: bool
    """Whether the run was trained on it, or held it out."""
    speaker: str | None
    spoken: Samples
    coded: Samples | None
    """The true clip after the codec's round trip: as good as a model with this codec can be."""
    rate: int
    """Samples a second of both."""
    ended: bool
    """Whether it stopped by itself."""
    true: Clip | None
    reference: Clip | None


@dataclass(frozen=True)
class Takes:
    """The rows that were spoken, and the voices of the data."""

    rows: Sequence[Take]
    voices: Mapping[str, Sequence[Clip]]
    """Clips of each speaker that the data names; empty where it names none."""
