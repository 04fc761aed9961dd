"""Tensor.to and Tensor.cuda towards a virtual GPU: the device is named as C++ knows it. No value is copied here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.virtual.processes import virtual_device


def moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Tensor.to, whose device may be the first positional argument."""
    if len(args) > 1:
        target = virtual_device(args[1])
        if target is not None:
            args = (args[0], target, *args[2:])
    elif kwargs:
        target = virtual_device(kwargs.get("device"))
        if target is not None:
            kwargs = {**kwargs, "device": target}
    result: Tensor = torch.Tensor.to(*args, **kwargs)
    return result


def moved_to_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Tensor.cuda(device=None, …): None is the current device."""
    device = args[1] if len(args) > 1 else kwargs.get("device")
    if device is not None and device.__class__ is not int and torch.device(device).type != "cuda":
        raise RuntimeError(f"Invalid device, must be cuda device, got {device}")
    target = virtual_device("cuda" if device is None else device)
    if target is None:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return torch.Tensor.to(args[0], target)


def means_cpu(device: Any) -> bool:
    """Whether an argument of `to` is the CPU."""
    kind = device.type if device.__class__ is torch.device else device if device.__class__ is str else None
    return kind is not None and kind.startswith("cpu")
