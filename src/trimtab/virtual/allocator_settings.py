"""The settings of CUDA's caching allocator, in the words of PYTORCH_ALLOC_CONF. Reads text; allocates nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_INTERVALS = 16
"""Rounding is set for each power of two from 1 MiB to 64 GiB."""
_ENTRY = re.compile(r"([a-z0-9_]+):(\[[^\]]*\]|[^,]*)", re.IGNORECASE)
_LEAST_SPLIT = 20


@dataclass(frozen=True)
class Settings:
    """How blocks are rounded, split and kept."""

    expandable: bool = False
    max_split: int = UNLIMITED
    """Blocks of this size and more are not split."""
    max_rounding: int = 20 * MIB
    """How much larger than the request a block may be that is not split."""
    large_segment: int = 20 * MIB
    collect_above: float = 0.0
    """The share of the allowed memory above which unused segments are given back; 0 for never."""
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    fraction: float | None = None
    """The share of the device that this process may take, where the variable says so."""
    text: str = field(default="", compare=False)

    @property
    def plain(self) -> bool:
        """Whether every request is rounded to 512 bytes and may be met by any block that is large enough."""
        return not self.expandable and self.max_split == UNLIMITED and not any(self.divisions)

    def rounded(self, nbytes: int) -> int:
        """What is taken for a request."""
        if nbytes < 512:
            return 512
        index = min(max(nbytes.bit_length() - 21, 0), _INTERVALS - 1)
        divisions = self.divisions[index]
        if divisions <= 1 or nbytes <= 512 * divisions or not nbytes & (nbytes - 1):
            return (nbytes + 511) & -512
        step = (1 << (nbytes.bit_length() - 1)) >> (divisions.bit_length() - 1)
        return -(-nbytes // step) * step


def from_environment() -> Settings:
    """What the environment says; the newer variable counts where both are set."""
    return parsed(next((text for name in VARIABLES if (text := os.environ.get(name))), ""))


def parsed(text: str, before: Settings | None = None) -> Settings:
    """Settings from text; what it does not name stays as it was."""
    known = vars(before or Settings()) | {"text": text}
    for match in _ENTRY.finditer("".join(text.split())):
        name, value = match.group(1), match.group(2)
        if name == "expandable_segments":
            known["expandable"] = _truth(name, value)
        elif name == "max_split_size_mb":
            known["max_split"] = max(_number(name, value), _LEAST_SPLIT + 1) * MIB
        elif name == "max_non_split_rounding_mb":
            known["max_rounding"] = max(_number(name, value), _LEAST_SPLIT + 1) * MIB
        elif name == "large_segment_size_mb":
            known["large_segment"] = max(_number(name, value), _LEAST_SPLIT) * MIB
        elif name == "garbage_collection_threshold":
            known["collect_above"] = _share(name, value)
        elif name == "per_process_memory_fraction":
            known["fraction"] = _share(name, value)
        elif name == "roundup_power2_divisions":
            known["divisions"] = tuple(_divisions(name, value))
        elif name not in _OTHERS and not name.startswith(("pinned_", "release_lock")):
            raise ValueError(f"Unrecognized key '{name}' in Accelerator allocator config.")
    return Settings(**known)


_OTHERS = ("backend", "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom")
"""What has no bearing on how much is taken."""


def _truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"Expected 'True' or 'False' for {name}, but got '{value}'.")
    return value == "True"


def _number(name: str, value: str) -> int:
    if not value.isdigit():
        raise ValueError(f"{name} takes a number of MiB, but got '{value}'.")
    return int(value)


def _share(name: str, value: str) -> float:
    share = float(value)
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{name} is invalid, set it in (0.0, 1.0): got {value}.")
    return share


def _divisions(name: str, value: str) -> Iterator[int]:
    if not value.startswith("["):
        yield from [_power(name, value)] * _INTERVALS
        return
    found = [0] * _INTERVALS
    last = 0
    for number, pair in enumerate(value.strip("[]").split(",")):
        size, _, divisions = pair.partition(":")
        if size == ">":
            found[last:] = [_power(name, divisions)] * (_INTERVALS - last)
            break
        index = min(_power(name, size).bit_length() - 1, _INTERVALS - 1)
        found[0 if number == 0 else index : index + 1] = [_power(name, divisions)] * (
            index + 1 if number == 0 else 1
        )
        last = index + 1
    yield from found


def _power(name: str, value: str) -> int:
    number = _number(name, value)
    if number & (number - 1):
        raise ValueError(f"{name} takes powers of two, but got '{value}'.")
    return number
