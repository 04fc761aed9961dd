"""Know: what is there. Devices, memory, precision support, the launcher. Never decides anything."""

from trimtab.gpu_models import GpuModel
from trimtab.hardware.catalogue import accelerators, find_gpu
from trimtab.hardware.launcher import Launcher, detect_launcher
from trimtab.hardware.probe import Accelerator, Cpu, Hardware, probe, probe_cpu

__all__ = [
    "Accelerator",
    "Cpu",
    "GpuModel",
    "Hardware",
    "Launcher",
    "accelerators",
    "detect_launcher",
    "find_gpu",
    "probe",
    "probe_cpu",
]
