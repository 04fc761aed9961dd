"""What torch.cuda asks of the driver's own library, answered for virtual GPUs: nothing of them is busy or warm.

Without `nvidia-ml-py` the questions fail in torch's words, as they would on a GPU. The library itself is not replaced:
a program that talks to it finds the machine's real driver, or none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import cuda
from torch.cuda import _utils

from trimtab.virtual.properties import properties_of
from trimtab.virtual.state import Machine, Patch, VirtualDevice
from trimtab.virtual.wording import words

_AT_REST = words("utilization memory_usage temperature power_draw")


def patches(machine: Machine) -> list[Patch]:
    def used(device: VirtualDevice) -> int:
        free, total = cuda.mem_get_info(device.index)
        return total - free

    def asked(figure: Callable[[VirtualDevice], int]) -> Callable[..., int]:
        def ask(device: Any = None) -> int:
            return figure(_of(machine, device))

        return ask

    def processes(device: Any = None) -> str:
        if not cuda._HAS_PYNVML:
            return native(device)
        found = _of(machine, device)
        return (
            f"GPU:{found.index}\nprocess {os.getpid():>10d} uses {used(found) / 2**20:>12.3f} MB GPU memory"
        )

    native = cuda.memory.list_gpu_processes
    return [
        *((cuda, name, asked(lambda device: 0)) for name in _AT_REST),
        (cuda, "clock_rate", asked(lambda device: properties_of(device).clock_rate // 1000)),
        (cuda, "device_memory_used", asked(used)),
        *((owner, "list_gpu_processes", processes) for owner in (cuda, cuda.memory)),
    ]


def _of(machine: Machine, device: Any) -> VirtualDevice:
    if not cuda._HAS_PYNVML:
        cuda._get_pynvml_handler(device)  # says so
    return machine.at(_utils._get_device_index(device, optional=True))
