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
from trimtab.virtual.tensor import HostTensor, VirtualParameter, VirtualTensor


def _shown(device: torch.device) -> torch.device:
    """The device that a program sees in the place of what C++ sees."""
    if device.type != "meta" or device.index is None:
        return device
    return torch.device("cpu") if device.index == HOST else torch.device("cuda", device.index)


def _grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    def _group_tensors_by_device_and_dtype(lists: list[list[Any]], with_indices: bool = False) -> Any:
        mixed = any(_on_the_host(tensor) for tensors in lists for tensor in tensors)
        groups = _by_places(original, lists, with_indices) if mixed else original(lists, with_indices)
        return {(_shown(device), dtype): group for (device, dtype), group in groups.items()}

    return _group_tensors_by_device_and_dtype


def _on_the_host(tensor: Any) -> bool:
    return isinstance(tensor, HostTensor)


def _by_places(original: Callable[..., Any], lists: list[list[Any]], with_indices: bool) -> Any:
    """The groups where tensors on the CPU that have no values stand beside others there that have: for C++ those are of
    two devices, for the program of one."""
    stand_ins = [
        [torch.empty(0, dtype=tensor.dtype) if _on_the_host(tensor) else tensor for tensor in tensors]
        for tensors in lists
    ]
    return {
        key: (
            [[tensors[at] for at in places] if tensors else [] for tensors in lists],
            places if with_indices else [],
        )
        for key, (_, places) in original(stand_ins, True).items()
    }


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
