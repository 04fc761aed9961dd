"""Asks whether an NVIDIA driver and its GPUs are in this machine, without torch. It never opens a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NvidiaDriver:
    """The driver as the machine shows it, whether or not torch can use it."""

    version: str | None = None
    gpus: tuple[str, ...] = ()
    """Models of all GPUs in the machine, also those that CUDA_VISIBLE_DEVICES hides."""
    error: str = ""
    """What nvidia-smi said when it failed."""

    @property
    def present(self) -> bool:
        return self.version is not None or bool(self.gpus)


def find_driver(kernel_file: Path = Path("/proc/driver/nvidia/version")) -> NvidiaDriver:
    """Look for the driver, by the kernel's word and by nvidia-smi's."""
    version = None
    if kernel_file.is_file():
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", kernel_file.read_text(encoding="utf-8"))
        version = found[1] if found else "unknown"
    program = shutil.which("nvidia-smi")
    if program is None:
        return NvidiaDriver(version=version)
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return NvidiaDriver(version=version, error="nvidia-smi did not answer within 20 seconds")
    except OSError as error:
        return NvidiaDriver(version=version, error=f"nvidia-smi cannot be started: {error}")
    gpus = tuple(re.findall(r"^GPU \d+: (.+?) \(UUID", answer.stdout, re.MULTILINE))
    complaint = (answer.stdout + answer.stderr).strip() if answer.returncode else ""
    return NvidiaDriver(version=version, gpus=gpus, error=complaint)
