"""GPU models that need not be here: what torch would say of them, for virtual GPUs and for sizing.

It never looks at this machine. Memory is the total that torch reports, which is less than what the box says (a
driver keeps a share) and differs by about one part in a hundred between drivers; the lower of the usual figures
is taken. What is not known for sure is left out.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from trimtab.errors import RequestError
from trimtab.hardware.probe import Accelerator

MOST = 1024
"""More GPUs than this are taken for a slip of the pen."""


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """One GPU model."""

    key: str
    """What to call it on the command line: `H200`."""
    name: str
    """What torch calls it: `NVIDIA H200`."""
    memory_bytes: int
    capability: str
    """CUDA compute capability; for AMD the architecture's number as torch reports it."""
    multiprocessors: int
    bf16: bool
    """Whether bf16 runs natively."""
    aliases: tuple[str, ...] = ()


def _gpu(key: str, name: str, gib: float, capability: str, multiprocessors: int, *aliases: str) -> GpuModel:
    return GpuModel(
        key=key,
        name=name,
        memory_bytes=int(gib * 1024) * 2**20,
        capability=capability,
        multiprocessors=multiprocessors,
        bf16=int(capability.split(".")[0]) >= 8,
        aliases=aliases,
    )


MODELS: tuple[GpuModel, ...] = (
    _gpu("T4", "Tesla T4", 14.56, "7.5", 40),
    _gpu("V100-16GB", "Tesla V100-SXM2-16GB", 15.77, "7.0", 80),
    _gpu("V100-32GB", "Tesla V100-SXM2-32GB", 31.73, "7.0", 80),
    _gpu("A10", "NVIDIA A10", 22.05, "8.6", 72),
    _gpu("A10G", "NVIDIA A10G", 22.05, "8.6", 80),
    _gpu("A40", "NVIDIA A40", 44.34, "8.6", 84),
    _gpu("A100-40GB", "NVIDIA A100-SXM4-40GB", 39.38, "8.0", 108),
    _gpu("A100-80GB", "NVIDIA A100-SXM4-80GB", 79.14, "8.0", 108),
    _gpu("L4", "NVIDIA L4", 22.03, "8.9", 58),
    _gpu("L40S", "NVIDIA L40S", 44.39, "8.9", 142),
    _gpu("RTX-3060", "NVIDIA GeForce RTX 3060", 11.65, "8.6", 28, "3060"),
    _gpu("RTX-3090", "NVIDIA GeForce RTX 3090", 23.56, "8.6", 82, "3090"),
    _gpu("RTX-4090", "NVIDIA GeForce RTX 4090", 23.52, "8.9", 128, "4090"),
    _gpu("RTX-5090", "NVIDIA GeForce RTX 5090", 31.36, "12.0", 170, "5090"),
    _gpu("RTX-A6000", "NVIDIA RTX A6000", 47.40, "8.6", 84, "A6000"),
    _gpu("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 47.37, "8.9", 142),
    _gpu("H100", "NVIDIA H100 80GB HBM3", 79.10, "9.0", 132, "H100-80GB", "H100-SXM"),
    _gpu("H100-PCIe", "NVIDIA H100 PCIe", 79.10, "9.0", 114),
    _gpu("H100-NVL", "NVIDIA H100 NVL", 93.00, "9.0", 132),
    _gpu("H200", "NVIDIA H200", 139.79, "9.0", 132, "H200-SXM", "H200-141GB"),
    _gpu("B200", "NVIDIA B200", 178.35, "10.0", 148),
    # torch sees each half of an MI250X as a GPU of its own.
    _gpu("MI250X", "AMD Instinct MI250X", 63.98, "9.0", 110),
    _gpu("MI300X", "AMD Instinct MI300X", 191.69, "9.4", 304),
)

DEFAULT = "H100"
"""What a bare count means: `2` is two of these."""


def find_gpu(name: str) -> GpuModel:
    """The model of a loosely written name: `h200`, `A100-40GB`, `rtx4090`, `NVIDIA H200`."""
    wanted = _plain(name)
    known = {_plain(text): model for model in MODELS for text in (model.key, model.name, *model.aliases)}
    if wanted in known:
        return known[wanted]
    begun = sorted({model.key for text, model in known.items() if wanted and text.startswith(wanted)})
    near = begun or sorted(
        {known[text].key for text in difflib.get_close_matches(wanted, known, n=4, cutoff=0.6)}
    )
    all_names = ", ".join(model.key for model in MODELS)
    raise RequestError.of(
        f"GPU model {name!r}: "
        + ("more than one has a name like this" if len(begun) > 1 else "not known here"),
        "its memory and abilities come from a catalogue, and nothing is guessed",
        f"use {' or '.join(near)}" if near else f"use one of {all_names}",
    )


def accelerators(spec: str) -> tuple[Accelerator, ...]:
    """GPUs as a request names them: `2xH200`, `H200`, or `2` (of the default model), all of their memory free."""
    text = spec.strip()
    found = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(\S.*)", text, re.IGNORECASE)
    count, name = (found[1], found[2]) if found else (None, "")
    # A bare number is a count, unless it is the number of a well-known card.
    if count is None and name.isdecimal() and (int(name) <= MOST or len(name) != 4):
        count, name = name, DEFAULT
    number = int(count) if count is not None else 1
    if not name or not 1 <= number <= MOST:
        raise RequestError.of(
            f"GPUs {spec!r}: not a number of GPUs",
            f"it is a count from 1 to {MOST}, a model, or both",
            "write 2, H200 or 2xH200",
        )
    model = find_gpu(name)
    return tuple(
        Accelerator(
            name=f"cuda:{index}",
            model=model.name,
            total_bytes=model.memory_bytes,
            free_bytes=model.memory_bytes,
            bf16=model.bf16,
            capability=model.capability,
        )
        for index in range(number)
    )


def _plain(name: str) -> str:
    """Letters and digits alone, without the maker's words."""
    words = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
