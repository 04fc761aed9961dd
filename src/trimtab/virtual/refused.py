"""Operations whose C++ code looks at devices itself (stft, recurrent layers): what it refuses is a fault like others.

Comes in only when such an error was raised; decides nothing about operations that rules.py knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import faults

_SAID = re.compile(r"(same|different) devices?\b", re.IGNORECASE)
Go = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def is_about_devices(error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an error is C++'s own word on tensors that lie apart."""
    if hasattr(error, "fault") or not _SAID.search(str(error)):
        return False
    return len({t.device for _, t in _tensors(args, kwargs)}) > 1


def repaired(error: Exception, go: Go, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Report the fault; where the machine repairs, go on with all operands on one device."""
    found = _tensors(args, kwargs)
    name = getattr(func, "__name__", str(func))
    faults.report("device-mismatch", str(error), f"torch.{name}", found, RuntimeError)
    placed = [t for _, t in found if t.device.type == "cuda"]
    target = next((t.device for t in placed if isinstance(t, nn.Parameter)), placed[0].device)
    moved = tuple(_moved(value, target) for value in args)
    return go(func, moved, {k: _moved(v, target) for k, v in kwargs.items()})


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for name, value in (*((f"argument {i}", v) for i, v in enumerate(args)), *kwargs.items()):
        many = value if isinstance(value, (list, tuple)) else (value,)
        found += [(name, item) for item in many if isinstance(item, Tensor)]
    return found


def _moved(value: Any, target: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(target)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, target) for item in value)
    return value
