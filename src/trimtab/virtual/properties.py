"""What `torch.cuda.get_device_properties` says of a virtual GPU: the figures of its model. Nothing is measured."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING

from trimtab.gpu_models import KIB, MIB, nearest

if TYPE_CHECKING:
    from trimtab.virtual.state import VirtualDevice


class DeviceProperties(SimpleNamespace):
    """The fields of torch's `_CudaDeviceProperties`, to be read only."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"can't set attribute {name!r}: the properties of a device are read only")

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.uuid)

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id=0, pci_domain_id=0, "
            f"L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def properties_of(device: VirtualDevice) -> DeviceProperties:
    major, minor = device.capability
    model = nearest(device.name, f"{major}.{minor}")
    design = model.architecture
    return DeviceProperties(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=device.total_bytes,
        multi_processor_count=model.multiprocessors,
        L2_cache_size=int(model.cache_mib * MIB),
        uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"trimtab-virtual-gpu-{device.index}"),
        pci_bus_id=device.index + 1,
        **dict.fromkeys(("pci_domain_id", "pci_device_id", "is_integrated", "is_multi_gpu_board"), 0),
        max_threads_per_multi_processor=design.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=design.default_block_kib * KIB,
        shared_memory_per_block_optin=design.block_kib * KIB,
        shared_memory_per_multiprocessor=design.shared_kib * KIB,
        warp_size=design.warp,
        gcnArchName=design.gcn or device.name,
        clock_rate=model.clock_mhz * 1000,
        memory_clock_rate=model.memory_mhz * 1000,
        memory_bus_width=model.bus_bits,
    )
