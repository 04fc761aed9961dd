"""What `torch.cuda.get_device_properties` says of a virtual GPU. Figures of known models; never measured."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.virtual.state import VirtualDevice

# Name fragment -> multiprocessors, second-level cache in MiB. The first that fits counts.
_MODELS = (
    ("B200", 148, 126),
    ("H200", 132, 60),
    ("H100 PCIe", 114, 50),
    ("H100", 132, 50),
    ("A100", 108, 40),
    ("L40", 142, 96),
    ("L4", 58, 48),
    ("A10", 72, 6),
    ("4090", 128, 72),
    ("3090", 82, 6),
    ("V100", 80, 6),
    ("T4", 40, 4),
)


@dataclass(frozen=True)
class DeviceProperties:
    """The fields of torch's `_CudaDeviceProperties`."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    uuid: uuid.UUID
    pci_bus_id: int
    pci_domain_id: int = 0
    pci_device_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    warp_size: int = 32
    gcnArchName: str = ""
    clock_rate: int = 1980000
    memory_clock_rate: int = 2619000
    memory_bus_width: int = 5120

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id=0, pci_domain_id=0, "
            f"L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def properties_of(device: VirtualDevice) -> DeviceProperties:
    multiprocessors, cache = next(
        ((count, cache) for fragment, count, cache in _MODELS if fragment in device.name), (108, 40)
    )
    major, minor = device.capability
    return DeviceProperties(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.total_bytes,
        multi_processor_count=multiprocessors,
        L2_cache_size=cache << 20,
        uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"trimtab-virtual-gpu-{device.index}"),
        pci_bus_id=device.index + 1,
        gcnArchName=device.name,
    )
