"""Lists of tensors at once: optimizers and clipping take CUDA's kernels for lists, as they do on hardware.

torch asks for the very class of a tensor and for its device before it takes them. What the kernels compute is left to
the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils

from trimtab.virtual.state import HOST, Machine, Patch
from trimtab.virtual.tensor import VirtualParameter, VirtualTensor


def _shown(device: torch.device) -> torch.device:
    """The device that a program sees in the place of what C++ sees."""
    if device.type != "meta" or device.index is None:
        return device
    return torch.device("cpu") if device.index == HOST else torch.device("cuda", device.index)


def _grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    def _group_tensors_by_device_and_dtype(*args: Any, **kwargs: Any) -> Any:
        groups = original(*args, **kwargs)
        return {(_shown(device), dtype): group for (device, dtype), group in groups.items()}

    return _group_tensors_by_device_and_dtype


def patches(machine: Machine) -> list[Patch]:
    """What to set where."""
    return [
        (
            _foreach_utils,
            "_foreach_supported_types",
            [*_foreach_utils._foreach_supported_types, VirtualTensor],
        ),
        (
            optimizer,
            "_foreach_supported_types",
            [*optimizer._foreach_supported_types, VirtualTensor, VirtualParameter],
        ),
        (
            torch._C,
            "_group_tensors_by_device_and_dtype",
            _grouping(torch._C._group_tensors_by_device_and_dtype),
        ),
    ]
