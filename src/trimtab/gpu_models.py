"""The one table of GPU models: what torch says of each. It imports the standard library alone and looks at no machine.

Figures are those of the vendors' architecture whitepapers, programming guides and data sheets. Clocks are a reference
board's; boards differ. Memory is the total that torch reports, which is less than what the box says (a driver keeps a
share) and differs by about one part in a hundred between drivers; the lower of the usual figures is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Architecture:
    """What all GPUs of one design have in common."""

    capability: str
    """CUDA compute capability; for AMD the architecture's number as torch reports it."""
    threads: int
    """Most threads that one multiprocessor holds."""
    shared_kib: int
    """Shared memory of one multiprocessor."""
    block_kib: int
    """The most of it that one block can ask for."""
    context_mib: int
    """What a process with torch holds outside of torch's own count from the first kernels on: CUDA's context and the
    code of kernels. 768 was seen on an H200 in training (what the driver tells beyond what torch had reserved); the
    others follow from it by the threads that a GPU holds at once."""
    pcie_gb: int
    """10^9 bytes a second over PCI Express, each way."""
    lanes: int = 128
    """Products of fp32 numbers that one multiprocessor begins in each cycle."""
    warp: int = 32
    gcn: str = ""
    """AMD's name of the architecture."""

    @property
    def default_block_kib(self) -> int:
        """Shared memory of a block that does not ask for more."""
        return self.block_kib if self.gcn else 48


VOLTA = Architecture("7.0", 2048, 96, 96, 610, 16, lanes=64)
TURING = Architecture("7.5", 1024, 64, 64, 440, 16, lanes=64)
A100 = Architecture("8.0", 2048, 164, 163, 700, 32, lanes=64)
AMPERE = Architecture("8.6", 1536, 100, 99, 555, 32)
ADA = Architecture("8.9", 1536, 100, 99, 655, 32)
HOPPER = Architecture("9.0", 2048, 228, 227, 768, 64)
B200 = Architecture("10.0", 2048, 228, 227, 810, 64)
BLACKWELL = Architecture("12.0", 1536, 100, 99, 755, 64)
CDNA2 = Architecture("9.0", 2048, 64, 64, 700, 32, lanes=64, warp=64, gcn="gfx90a:sramecc+:xnack-")
CDNA3 = Architecture("9.4", 2048, 64, 64, 1250, 64, warp=64, gcn="gfx942:sramecc+:xnack-")


@dataclass(frozen=True)
class GpuModel:
    """One GPU model."""

    key: str
    """What to call it on the command line: `H200`."""
    name: str
    """What torch calls it: `NVIDIA H200`."""
    memory_gib: float
    architecture: Architecture
    multiprocessors: int
    cache_mib: float
    """Second-level cache; on an MI300X that of one of its eight dies, as torch reports it."""
    clock_mhz: int
    """The highest that is published."""
    memory_mhz: int
    """Data moves twice in each cycle of it."""
    bus_bits: int
    half_tflops: float
    """The highest rate of dense 16-bit products that are summed in fp32, 10^12 operations a second; bf16 where it has
    that, fp16 on older ones."""

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 1024) * MIB

    @property
    def capability(self) -> str:
        return self.architecture.capability

    @property
    def bandwidth(self) -> float:
        """Bytes a second to and from its memory, at most."""
        return 2e6 * self.memory_mhz * self.bus_bits / 8

    @property
    def single_tflops(self) -> float:
        """Products in fp32 that are not rounded to TF32, which torch does not do unless it is told to."""
        return 2e-6 * self.multiprocessors * self.architecture.lanes * self.clock_mhz

    @property
    def link(self) -> float:
        """Bytes a second that it sends to others of its kind in one machine, each way."""
        return 1e9 * LINKS_GB.get(self.key, self.architecture.pcie_gb)

    @property
    def bf16(self) -> bool:
        """Whether bf16 runs natively."""
        return int(self.capability.split(".")[0]) >= 8


# fmt: off
MODELS: tuple[GpuModel, ...] = (
    #        key             name                              GiB     design     SMs  cache  clock memory bits  16-bit
    GpuModel("T4",           "Tesla T4",                       14.56,  TURING,    40,  4,     1590, 5001,  256,  65),
    GpuModel("V100-16GB",    "Tesla V100-SXM2-16GB",           15.77,  VOLTA,     80,  6,     1530, 877,   4096, 125),
    GpuModel("V100-32GB",    "Tesla V100-SXM2-32GB",           31.73,  VOLTA,     80,  6,     1530, 877,   4096, 125),
    GpuModel("A10",          "NVIDIA A10",                     22.05,  AMPERE,    72,  6,     1695, 6251,  384,  125),
    GpuModel("A10G",         "NVIDIA A10G",                    22.05,  AMPERE,    80,  6,     1710, 6251,  384,  70),
    GpuModel("A40",          "NVIDIA A40",                     44.34,  AMPERE,    84,  6,     1740, 7251,  384,  149.7),
    GpuModel("A100-40GB",    "NVIDIA A100-SXM4-40GB",          39.38,  A100,      108, 40,    1410, 1215,  5120, 312),
    GpuModel("A100-80GB",    "NVIDIA A100-SXM4-80GB",          79.14,  A100,      108, 40,    1410, 1593,  5120, 312),
    GpuModel("A30",          "NVIDIA A30",                     23.50,  A100,      56,  24,    1440, 1215,  3072, 165),
    GpuModel("L4",           "NVIDIA L4",                      22.03,  ADA,       58,  48,    2040, 6251,  192,  121),
    GpuModel("L40S",         "NVIDIA L40S",                    44.39,  ADA,       142, 96,    2520, 9001,  384,  362),
    GpuModel("RTX-3060",     "NVIDIA GeForce RTX 3060",        11.65,  AMPERE,    28,  3,     1777, 7501,  192,  25.5),
    GpuModel("RTX-3080",     "NVIDIA GeForce RTX 3080",        9.77,   AMPERE,    68,  5,     1710, 9501,  320,  59.5),
    GpuModel("RTX-3090",     "NVIDIA GeForce RTX 3090",        23.56,  AMPERE,    82,  6,     1695, 9751,  384,  71),
    GpuModel("RTX-4070",     "NVIDIA GeForce RTX 4070",        11.60,  ADA,       46,  36,    2475, 10501, 192,  58.3),
    GpuModel("RTX-4080",     "NVIDIA GeForce RTX 4080",        15.69,  ADA,       76,  64,    2505, 11201, 256,  97.5),
    GpuModel("RTX-4090",     "NVIDIA GeForce RTX 4090",        23.52,  ADA,       128, 72,    2520, 10501, 384,  165.2),
    GpuModel("RTX-5090",     "NVIDIA GeForce RTX 5090",        31.36,  BLACKWELL, 170, 96,    2407, 14001, 512,  209.5),
    GpuModel("RTX-5080",     "NVIDIA GeForce RTX 5080",        15.47,  BLACKWELL, 84,  64,    2617, 15001, 256,  112.6),
    GpuModel("RTX-A6000",    "NVIDIA RTX A6000",               47.40,  AMPERE,    84,  6,     1800, 8001,  384,  154.8),
    GpuModel("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 47.37,  ADA,       142, 96,    2505, 10001, 384,  364.2),
    GpuModel("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell",  94.97,  BLACKWELL, 188, 128,   2617, 14001, 512,  503.8),
    GpuModel("H100",         "NVIDIA H100 80GB HBM3",          79.10,  HOPPER,    132, 50,    1980, 2619,  5120, 989.4),
    GpuModel("H100-PCIe",    "NVIDIA H100 PCIe",               79.10,  HOPPER,    114, 50,    1755, 1593,  5120, 756.5),
    GpuModel("H100-NVL",     "NVIDIA H100 NVL",                93.00,  HOPPER,    132, 60,    1785, 2619,  6016, 835.5),
    GpuModel("H200",         "NVIDIA H200",                    139.79, HOPPER,    132, 60,    1980, 3201,  6016, 989.4),
    GpuModel("B200",         "NVIDIA B200",                    178.35, B200,      148, 126.5, 1965, 3996,  7680, 2250),
    # torch sees each half of an MI250X as a GPU of its own.
    GpuModel("MI250X",       "AMD Instinct MI250X",            63.98,  CDNA2,     110, 8,     1700, 1600,  4096, 191.5),
    GpuModel("MI300X",       "AMD Instinct MI300X",            191.69, CDNA3,     304, 4,     2100, 2600,  8192, 1307),
)
# fmt: on

LINKS_GB: dict[str, float] = {
    **dict.fromkeys(("V100-16GB", "V100-32GB"), 150),
    **dict.fromkeys(("A100-40GB", "A100-80GB"), 300),
    **dict.fromkeys(("H100", "H200"), 450),
    "B200": 900,
    "MI250X": 50,
    "MI300X": 448,
}
"""10^9 bytes a second each way over NVLink or Infinity Fabric, where a server has them between all of its GPUs; of an
MI250X one link. Bridges that join two cards are not counted on."""

APPLE_GB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
"""Unified memory that Macs with Apple's own chips are sold with."""
APPLE_SHARE = 0.75
"""How much of it Metal recommends for the GPU at most, about; `torch.mps.recommended_max_memory` tells it."""

DEFAULT = "H100"
"""What a bare count of GPUs means: `2` is two of these."""


def peak_flops(name: str) -> float | None:
    """Operations a second at most, of the model that torch calls so; None where it is not known here."""
    return next((model.half_tflops * 1e12 for model in MODELS if model.name == name), None)


def nearest(name: str, capability: str) -> GpuModel:
    """The model that torch calls so; of an unknown name the first of its compute capability, or the default."""
    named = [model for model in MODELS if model.name == name]
    alike = [model for model in MODELS if model.capability == capability]
    return next(iter(named + alike), None) or next(model for model in MODELS if model.key == DEFAULT)
