"""A processor that says it has AMX and does not say how large its tiles are: what multiplies bf16 is kept off them.

Some virtual machines hand on the one answer and not the other. oneDNN, by which torch multiplies on the CPU, then
configures tiles without rows, and the first bf16 product of a process ends it (SIGILL). oneDNN reads its limit from the
environment when it is first used, so it is set where Trimtab is imported, for this process and those that it starts; a
limit that is set already stands. Never imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping

LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
BELOW_TILES = "AVX512_CORE_FP16"
"""The most that oneDNN knows of without AMX."""
_CODE = bytes.fromhex("53 8b07 8b4f04 0fa2 8907 895f04 894f08 89570c 5b c3")
"""void (unsigned *r): the instruction CPUID with r[0] and r[1], its four answers into r."""
_FEATURES, _TILES, _AMX_TILE = 7, 0x1D, 1 << 24
_FIRST = 8192
"""Characters of Linux's list of processors in which the first one's flags stand."""
Cpuid = Callable[[int, int], tuple[int, int, int, int]]


def keep_off_hidden_tiles(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set oneDNN's limit where tiles are announced and hidden; whether it was set here."""
    if any(name in environment for name in LIMITS):
        return False
    asks = cpuid()
    if asks is None or not tiles_are_hidden(asks):
        return False
    environment[LIMITS[0]] = BELOW_TILES
    return True


def tiles_are_hidden(asks: Cpuid) -> bool:
    """Whether the processor announces tiles, and tells no size of them."""
    last = asks(0, 0)[0]
    if last < _FEATURES or not asks(_FEATURES, 0)[3] & _AMX_TILE:
        return False
    # Beyond the last leaf a processor answers with anything.
    return last < _TILES or not asks(_TILES, 1)[2]


def cpuid() -> Cpuid | None:
    """The instruction itself; None where no tiles are announced, or nobody may run what is written to memory."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            announced = "amx_tile" in file.read(_FIRST)
    except OSError:
        return None
    if not announced:
        return None
    import ctypes
    import mmap

    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_CODE)
    first = ctypes.c_char.from_buffer(page)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(first))

    def asks(leaf: int, part: int, _page: ctypes.c_char = first) -> tuple[int, int, int, int]:
        # The page is there as long as this function, which holds it by its default.
        told = (ctypes.c_uint32 * 4)(leaf, part)
        call(ctypes.addressof(told))
        return told[0], told[1], told[2], told[3]

    return asks
