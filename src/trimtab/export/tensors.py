"""Number formats of GGUF tensors, and a writer that holds one tensor at a time.

It never decides names or metadata: `gguf_model.py` and `gguf_adapter.py` do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch

from trimtab.errors import RequestError, TrimtabError
from trimtab.files import whole_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("f32", "f16", "bf16", "q8_0")}
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
Q8_BLOCK = 32
F16_LARGEST = 65504.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor to write: its place in the file is fixed before its values are read."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def check_format(dtype: str) -> None:
    """Raise RequestError for a number format that GGUF export does not write."""
    if dtype not in FORMATS:
        raise RequestError.of(
            f"--dtype {dtype}: not a number format that GGUF export writes",
            "smaller formats (q4_K_M and the like) need llama.cpp's own quantiser",
            f"take one of {', '.join(FORMATS)}; `ollama create --quantize q4_K_M` shrinks an f16 file further",
        )


def new_writer(
    arch: str, kind: str, dtype: str, name: str, base_model: str, license_name: str | None = None
) -> gguf.GGUFWriter:
    """A writer that holds what every file of ours says of itself."""
    writer = gguf.GGUFWriter(None, arch)
    writer.add_type(kind)
    writer.add_name(name)
    if license_name:
        writer.add_license(license_name)
    if base_model:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base_model)
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def stored_format(shape: Sequence[int], dtype: str) -> gguf.GGMLQuantizationType:
    """The format of one tensor: vectors stay F32 as llama.cpp expects; q8_0 needs rows of whole blocks."""
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    if dtype == "q8_0" and shape[-1] % Q8_BLOCK:
        return gguf.GGMLQuantizationType.F16
    return FORMATS[dtype]


def encode(name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> NDArray[np.generic]:
    """The tensor's values in the format, as the bytes that go into the file."""
    values = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    if not np.isfinite(values).all():
        raise TrimtabError(
            f"tensor {name} holds NaN or infinite values\n"
            "  why: the training run diverged, or the weights are damaged; such a model answers nothing sensible\n"
            "  change: export an earlier checkpoint, or train again with a lower training.learning_rate"
        )
    if kind == gguf.GGMLQuantizationType.F32:
        return values
    if kind == gguf.GGMLQuantizationType.F16:
        largest = float(np.abs(values).max(initial=0.0))
        if largest > F16_LARGEST:
            raise RequestError.of(
                f"--dtype f16: tensor {name} holds {largest:.3g}",
                "f16 ends at 65504, the value would become infinite",
                "export with --dtype bf16 or f32",
            )
        return values.astype(np.float16)
    return gguf.quants.quantize(values, kind)


def write_gguf(
    target: Path, writer: gguf.GGUFWriter, entries: Sequence[Entry], dtype: str, *, progress: bool = False
) -> list[str]:
    """Write metadata and tensors to `target`, one tensor in memory at a time.

    Returns the names of the tensors that fell back from q8_0 to f16.
    """
    from rich.console import Console
    from rich.progress import track

    planned = [(entry, stored_format(entry.shape, dtype)) for entry in entries]
    for entry, kind in planned:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(entry.shape) // block * size
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), count, raw_dtype=kind)
    with whole_file(target) as scratch:
        try:
            writer.write_header_to_file(path=scratch)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry, kind in track(
                planned,
                description=f"writing {target.name}",
                console=Console(stderr=True),
                transient=True,
                disable=not (progress and sys.stderr.isatty()),
            ):
                tensor = entry.load()
                assert tuple(tensor.shape) == entry.shape, (entry.name, tuple(tensor.shape), entry.shape)
                writer.write_tensor_data(encode(entry.name, tensor, kind))
        finally:
            writer.close()
    fell_back = gguf.GGMLQuantizationType.F16 if dtype == "q8_0" else None
    return [entry.name for entry, kind in planned if kind == fell_back]
