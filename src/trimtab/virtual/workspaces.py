"""Memory that CUDA's libraries take once and keep: cuBLAS has a workspace for each thread and stream that multiplies.

Autograd runs a backward pass in a thread of its own, with a workspace of its own. What lives inside one operation only
is in temporaries.py.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from trimtab.virtual import streams
from trimtab.virtual.memory import Block
from trimtab.virtual.state import VirtualDevice

_SETTING = re.compile(r":([0-9]+):([0-9]+)")


def cublas_bytes(capability: tuple[int, int]) -> int:
    """What torch gives a handle of cuBLAS: CUBLAS_WORKSPACE_CONFIG, else 32 MiB on Hopper and 8.1 MiB elsewhere."""
    asked = _SETTING.findall(os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return sum(int(kib) * 1024 * int(number) for kib, number in asked)
    return 4096 * 8 * 1024 if capability == (9, 0) else (4096 * 2 + 16 * 8) * 1024


def lt_bytes(capability: tuple[int, int]) -> int:
    """What torch gives cuBLASLt, which adds a bias to a product: CUBLASLT_WORKSPACE_SIZE in KiB, else 1 MiB."""
    asked = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return min(int(asked) * 1024 if asked.isdigit() else 1024 * 1024, cublas_bytes(capability))


def in_backward() -> bool:
    """Whether autograd runs this, in the thread that it has for a GPU."""
    return torch._C._current_graph_task_id() != -1


def multiplied(device: VirtualDevice, biased: bool = False) -> None:
    """cuBLAS is used on a device: its workspace is there from now on, and that of cuBLASLt where a bias is added."""
    key = in_backward(), streams.current_id(device.index)
    if key not in device.workspaces:
        _take(device, key, cublas_bytes(device.capability))
    if biased and (*key, "lt") not in device.workspaces:
        _take(device, (*key, "lt"), lt_bytes(device.capability))


def _take(device: VirtualDevice, key: tuple[Any, ...], nbytes: int) -> None:
    # A library keeps it, whoever asked first: it is counted here also while a compiled piece is counted aside.
    aside, device.aside = device.aside, None
    try:
        block = device.workspaces[key] = Block(device, nbytes)
    finally:
        device.aside = aside
    device.ledger.tell(block, "workspace")
