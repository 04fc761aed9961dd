"""Where a zeroth-order step's time goes on a GPU, by the profiler, and the page of a run of `zeroth_speed.py`.

Never measures time by the clock, and never compares runs: the page holds the figures of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

# The first group that has a part of a kernel's name takes it.
GROUPS = {
    "weights made, updates written": ("_perturb", "_update"),
    "head, perturbed where it is read": ("_product",),
    "products": ("nvjet", "gemm", "cutlass", "cublas"),
    "attention": ("fmha", "flash", "attention", "sdpa"),
    "compiled element-wise work": ("triton_",),
}
PARTS = {
    "inference": "inference, eager",
    "reference MeZO": "reference MeZO step (re-seeded generator, four sweeps, eager)",
    "our step": "**our step**",
    "two forwards, in turn": "two bare forwards, captured, one after the other",
    "two forwards, stacked": "two bare forwards, captured, stacked in one",
}


def gpu_profile(work: Callable[[], object], runs: int = 5) -> dict[str, Any]:
    """Milliseconds of one run: kernels by group, those side by side both counted, and how long the GPU was busy."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
    groups: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in seen.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        group = next((g for g, parts in GROUPS.items() if any(p in event.name for p in parts)), "the rest")
        groups[group] += event.time_range.elapsed_us()
        launches[group] += 1
        spans.append((event.time_range.start, event.time_range.end))
    return {
        "busy_ms": _covered(spans) / 1000 / runs,
        "groups_ms": {group: us / 1000 / runs for group, us in groups.most_common()},
        "launches": {group: count // runs for group, count in launches.items()},
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of all spans together, what several cover counted once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def page(whole: dict[str, Any]) -> str:
    """The results as Markdown."""
    sizes = whole["sizes"]
    lines = [
        f"# A zeroth-order step on one {whole['machine']}",
        "",
        f"{whole['date'].split()[0]}, torch {whole['torch']}; {whole['precision']}, random weights in Qwen3's shapes, "
        f"every weight perturbed, {whole['rows']} rows × {whole['length']} tokens, one answer token a row. All parts "
        "of a size in one process on the same weights and rows; medians, by the clock with the device synchronised "
        "around each step. The update of a step is written while the next one reads the weights, so each timed step "
        "holds the update of the one before it.",
        "",
        "```",
        whole["command"],
        "```",
        "",
        "| | " + " | ".join(f"{s['size']}: ms | peak MiB | of inference" for s in sizes) + " |",
        "|---" * (1 + 3 * len(sizes)) + "|",
    ]
    for part, words in PARTS.items():
        cells = []
        for size in sizes:
            found = size["parts"][part]
            share = "–" if found["of_inference"] is None else f"{found['of_inference']:.3f}"
            cells.append(f"{found['ms']:.2f} | {found['peak_bytes'] / 2**20:,.0f} | {share}")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    for words, value in (
        ("speed-up over the reference", lambda s: f"{s['speed_up']:.1f}×"),
        (
            "**our step by two bare forwards stacked in one**",
            lambda s: f"**{s['of_two_forwards_stacked']:.2f}**",
        ),
        (
            "our step by two bare forwards one after the other",
            lambda s: f"{s['of_two_forwards_in_turn']:.2f}",
        ),
    ):
        lines.append(f"| {words} | " + " | ".join(f"{value(size)} | | " for size in sizes) + " |")
    if all("profile" in size for size in sizes):
        lines += _profiles(sizes)
    return "\n".join([*lines, ""])


def _profiles(sizes: list[dict[str, Any]]) -> list[str]:
    """Our step beside two bare forwards, by groups of kernels."""
    lines = [
        "",
        "By the profiler, milliseconds of the GPU (launches): our step / two bare forwards stacked. Kernels that run "
        "side by side both count, so the groups add up to more than the time that the GPU was busy.",
        "",
        "| | " + " | ".join(size["size"] for size in sizes) + " |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    names = [*GROUPS, "the rest"]
    for name in names:
        cells = []
        for size in sizes:
            both = [size["profile"][part] for part in ("our step", "two forwards, stacked")]
            cells.append(
                " / ".join(
                    f"{p['groups_ms'][name]:.2f} ({p['launches'][name]})" if name in p["groups_ms"] else "–"
                    for p in both
                )
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    busy = [
        f"{s['profile']['our step']['busy_ms']:.2f} / {s['profile']['two forwards, stacked']['busy_ms']:.2f}"
        for s in sizes
    ]
    return [*lines, "| busy | " + " | ".join(busy) + " |"]
