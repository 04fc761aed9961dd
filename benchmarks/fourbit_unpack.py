"""Unpacking NF4 weights of an 8B model on a GPU: this project's kernel beside plain torch and bitsandbytes.

    python benchmarks/fourbit_unpack.py

Prints the median time of one matrix, and how much memory traffic that is a second (codes and scales read, bf16
written). bitsandbytes is left out where it is not installed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

from trimtab.models import nf4

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))


def milliseconds(work: Callable[[], object], times: int = 30) -> float:
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found[5:])


def main() -> int:
    from trimtab.fast.kernels.nf4 import unpack

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
        packed = nf4.pack(weight)
        ways: dict[str, Callable[[], object]] = {
            "kernel": lambda p=packed: unpack(p, torch.bfloat16),
            "torch": lambda p=packed: nf4.unpack(p, torch.bfloat16),
        }
        if find_spec("bitsandbytes") is not None:
            from bitsandbytes import functional

            codes, state = functional.quantize_4bit(
                weight, blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            ways["bitsandbytes"] = lambda c=codes, s=state: functional.dequantize_4bit(c, s)
            theirs = functional.dequantize_4bit(codes, state)
            off = (unpack(packed, torch.bfloat16) - theirs).float().abs().max().item()
            print(f"{rows} x {columns}: largest difference from bitsandbytes {off:.2e}")
        moved = rows * columns * (2 + 0.516)
        for name, work in ways.items():
            took = milliseconds(work)
            print(f"{rows} x {columns} {name}: {took:.3f} ms, {moved / took / 1e6:,.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
