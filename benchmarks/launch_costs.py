"""What the host needs to launch kernels: each one of an eager step, each one of compiled code, and each compiled graph.

    python benchmarks/launch_costs.py --json launch-costs.json      # on a GPU, under a minute

Kernels are so small that the GPU waits. Chains of two lengths are run there and back; what the longer one takes more is
divided by what it launches more (torch's profiler counts it), and the rest is the graph's own. `roofline.HOST` is read
off this.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZE, SHORT, LONG = 64, 4, 64
DEVICE = "cuda"


class Chain(nn.Module):
    """Products that no compiler fuses, each with something element-wise behind it where `between`."""

    def __init__(self, links: int, between: bool, trained: bool) -> None:
        super().__init__()
        self.between = between
        weights = [torch.eye(SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(links)]
        self.weights = nn.ParameterList(nn.Parameter(weight, requires_grad=trained) for weight in weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
            if self.between:
                x = torch.nn.functional.silu(x)
        return x


def taken(run: Callable[[], Any], times: int = 60) -> float:
    """Seconds of one run: the median of three rounds."""
    for _ in range(5):
        run()
    rounds = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - began) / times)
    return sorted(rounds)[1]


def launched(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def costs(compiled: bool, between: bool, trained: bool) -> dict[str, float]:
    """Of a chain there and back."""
    found = []
    for links in (SHORT, LONG):
        chain: Any = Chain(links, between, trained)
        if compiled:
            chain = torch.compile(chain)
        x = torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

        def run(chain: Any = chain, x: Tensor = x) -> None:
            chain(x).backward(x.detach())

        found.append((taken(run), launched(run)))
    (short, few), (long, many) = found
    each = (long - short) / (many - few)
    return {
        "launches": many,
        "seconds": long,
        "us_a_launch": 1e6 * each,
        "us_a_graph": 1e6 * (short - few * each),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    found = {
        f"{'compiled' if compiled else 'eager'}, {'silu between' if between else 'products alone'}, "
        f"weights {'trained' if trained else 'frozen'}": costs(compiled, between, trained)
        for compiled in (False, True)
        for between in (False, True)
        for trained in (False, True)
    }
    told = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "costs": found}
    print(json.dumps(told, indent=1))
    if wanted.json:
        wanted.json.write_text(json.dumps(told, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
