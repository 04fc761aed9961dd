"""Looks at the machine: devices, memory, precision support. It only looks; it never chooses.

Where the answer can be had without importing torch (a torch build without CUDA), it is: a wrong request should
fail in a second, not after a long import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.hardware.cgroup import memory_limit
from trimtab.hardware.launcher import Launcher, detect_launcher
from trimtab.hardware.nvml import driver_memory
from trimtab.hardware.packages import installed_version


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU as this process sees it."""

    name: str
    """`cuda:0`, `mps`."""
    model: str
    total_bytes: int
    free_bytes: int
    bf16: bool
    """Whether bf16 runs natively."""
    capability: str = ""
    """CUDA compute capability, such as `9.0`."""

    @property
    def kind(self) -> str:
        return self.name.split(":")[0]


@dataclass(frozen=True, kw_only=True)
class Cpu:
    model: str
    cores: int
    """Physical cores that this process may use."""
    total_bytes: int
    """Main memory, or the limit that a container or a batch system set, where that is less."""
    free_bytes: int
    bf16: bool
    """Whether the processor multiplies bf16 natively (AVX512-BF16, AMX, Arm BF16); emulated it is many times slower."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What is there. Built by `probe()`, or by hand in tests and rehearsals."""

    cpu: Cpu
    accelerators: tuple[Accelerator, ...] = ()
    launcher: Launcher = field(default_factory=lambda: Launcher(name="none"))
    torch_version: str = ""
    cuda_build: str | None = None
    """CUDA version that torch was built for; None for a build without CUDA."""
    triton: str | None = None
    """Version of triton; None where it is not installed."""
    virtual: bool = False
    """Whether the GPUs are those of a rehearsal."""
    shapes: bool = False
    """Whether that rehearsal is of shapes only: nothing is computed."""

    @property
    def gpus(self) -> tuple[Accelerator, ...]:
        return tuple(a for a in self.accelerators if a.kind == "cuda")

    @property
    def mps(self) -> Accelerator | None:
        return next((a for a in self.accelerators if a.kind == "mps"), None)

    def get(self, name: str) -> Accelerator | None:
        return next((a for a in self.accelerators if a.name == name), None)


def probe(
    launcher: Launcher | None = None,
    cpu: Cpu | None = None,
    accelerators: tuple[Accelerator, ...] | None = None,
) -> Hardware:
    """Look at this machine and at who started this process; what is already known can be given."""
    launcher = launcher or detect_launcher()
    cpu = cpu or probe_cpu()
    # In a rehearsal the virtual GPUs come with torch, whatever its build.
    if "torch" not in sys.modules and not os.environ.get("TRIMTAB_VIRTUAL"):
        version, cuda, other = _torch_build()
        # A Linux build of torch without CUDA or ROCm has no accelerator to ask about.
        if version and cuda is None and not other and platform.system() == "Linux":
            accelerators = accelerators or ()
        if version and not other and accelerators is not None:
            return Hardware(
                cpu=cpu,
                accelerators=accelerators,
                launcher=launcher,
                torch_version=version,
                cuda_build=cuda,
                triton=installed_version("triton"),
            )
    import torch

    return Hardware(
        cpu=cpu,
        accelerators=(*_cuda_devices(torch), *_mps_device(torch)) if accelerators is None else accelerators,
        launcher=launcher,
        torch_version=str(torch.__version__),
        cuda_build=torch.version.cuda or getattr(torch.version, "hip", None),
        triton=installed_version("triton"),
        virtual=(virtual := _are_virtual(torch)),
        shapes=virtual and _shapes_only(),
    )


def _torch_build() -> tuple[str | None, str | None, bool]:
    """(version, CUDA version, other accelerator build) read from torch's version file without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None, False
    file = Path(spec.origin).parent / "version.py"
    if not file.is_file():
        return None, None, True
    text = file.read_text(encoding="utf-8")

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}(?::[^=]*)? = '([^']*)'", text, re.MULTILINE)
        return found.group(1) if found else None

    return value("__version__"), value("cuda"), any(value(v) for v in ("hip", "rocm", "xpu"))


def _cuda_devices(torch: Any) -> Iterator[Accelerator]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield Accelerator(
            name=f"cuda:{index}",
            model=properties.name,
            total_bytes=properties.total_memory,
            free_bytes=_free_bytes(torch, index, properties),
            # Turing and older emulate bf16; is_bf16_supported() counts that emulation as support.
            bf16=properties.major >= 8 or getattr(torch.version, "hip", None) is not None,
            capability=f"{properties.major}.{properties.minor}",
        )


def _are_virtual(torch: Any) -> bool:
    """Whether the GPUs are those of virtual/, which describes them by a class of its own."""
    there = torch.cuda.is_available() and torch.cuda.device_count()
    return bool(there) and type(torch.cuda.get_device_properties(0)).__module__.startswith("trimtab.")


def _shapes_only() -> bool:
    """Whether the machine of virtual/ that is in force has shapes only, as it tells its child processes."""
    told = os.environ.get("TRIMTAB_VIRTUAL")
    return bool(told) and bool(json.loads(told or "{}").get("shapes"))


def _free_bytes(torch: Any, index: int, properties: Any) -> int:
    total = int(properties.total_memory)
    # A slice of a GPU (MIG) has less memory than the GPU that the driver answers for.
    known = driver_memory(f"GPU-{properties.uuid}")
    if known is not None and abs(known.total - total) < total // 16:
        return min(known.free, total)
    return int(torch.cuda.mem_get_info(index)[0])


def _mps_device(torch: Any) -> Iterator[Accelerator]:
    if not torch.backends.mps.is_available():
        return
    total = int(torch.mps.recommended_max_memory())
    used = int(torch.mps.driver_allocated_memory())
    # Metal has bf16 from macOS 14 on.
    release = platform.mac_ver()[0].split(".")[0]
    yield Accelerator(
        name="mps",
        model=f"Apple {platform.machine()}",
        total_bytes=total,
        free_bytes=total - used,
        bf16=release.isdigit() and int(release) >= 14,
    )


def probe_cpu() -> Cpu:
    import psutil

    memory, limit = psutil.virtual_memory(), memory_limit()
    model, flags = _cpu_description()
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return Cpu(
        model=model,
        cores=min(cores, allowed),
        total_bytes=min(memory.total, limit.limit_bytes) if limit else memory.total,
        free_bytes=min(memory.available, limit.free_bytes) if limit else memory.available,
        bf16=bool(flags & {"avx512_bf16", "amx_bf16", "bf16", "hw.optional.arm.FEAT_BF16"}),
    )


@cache
def _cpu_description() -> tuple[str, frozenset[str]]:
    """The processor's name and the feature flags that matter here."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
        name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
        return (
            name.group(1).strip() if name else platform.machine(),
            frozenset(flags.group(1).split()) if flags else frozenset(),
        )
    if platform.system() == "Darwin":
        feature = "hw.optional.arm.FEAT_BF16"
        answer = subprocess.run(["sysctl", "-n", feature], capture_output=True, text=True, check=False)
        return platform.processor(), frozenset({feature} if answer.stdout.strip() == "1" else ())
    return platform.processor() or platform.machine(), frozenset()
