"""Spreads a model's layers over several GPUs so that each is about equally full.

Embeddings, final norm and head share the primary device where they fit: inputs, labels and loss meet there, and tied
weights stay one tensor. Where they do not, an untied head goes to the last device. Layers follow one another in
order, those of a tower before the language model's, so activations cross from GPU to GPU as seldom as possible. It
never refuses: a share that is too large says so itself (`MemoryShare.fits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from trimtab.placement.plan import MemoryShare, Precision
from trimtab.placement.profile import CUDA_CONTEXT_BYTES, ModelProfile, Part, Workload

Spread = tuple[dict[str, str], dict[str, MemoryShare]]


def balanced_map(
    profile: ModelProfile,
    primary: str,
    capacities: Mapping[str, int],
    weights: Precision,
    compute: Precision,
    work: Workload,
) -> Spread:
    """Module name to device, and what each device then holds."""

    def share(parts: tuple[Part, ...]) -> MemoryShare:
        # A GPU that holds nothing is never opened: one that others have filled is passed over.
        overhead = CUDA_CONTEXT_BYTES if parts else 0
        return profile.share(parts, weights, compute, work, capacity=0, overhead=overhead)

    # A split is one: the primary device takes all layers only where none fits anywhere else.
    every = len(profile.layers)
    most = every - 1 if len(capacities) > 1 else every
    found = _spread(profile, primary, capacities, share, (), most)
    for tail in dict.fromkeys([_tail(profile), ()]):
        if all(share.fits for share in found[1].values()):
            break
        found = _spread(profile, primary, capacities, share, tail, every)
    return found


def _tail(profile: ModelProfile) -> tuple[Part, ...]:
    """Final norm and head, where the head has weights of its own; none where it is the embedding's tensor."""
    layers = profile.layers
    if not layers:
        return ()
    after = profile.parts[profile.parts.index(layers[-1]) + 1 :]
    tied = {name for pair in profile.ties for name in pair}
    tail = tuple(p for p in after if not (p.is_layer or p.embeds or p.name in tied) and p.parameters)
    return tail if sum(p.parameters for p in tail) >= profile.vocabulary * profile.hidden else ()


def _spread(
    profile: ModelProfile,
    primary: str,
    capacities: Mapping[str, int],
    needs: Callable[[tuple[Part, ...]], MemoryShare],
    tail: tuple[Part, ...],
    most: int,
) -> Spread:
    """The most even spread: at most `most` layers and all else on the primary device, `tail` on the last one."""
    devices = [primary, *(d for d in capacities if d != primary)]
    layers = profile.layers
    others = tuple(p for p in profile.parts if not p.is_layer and p not in tail)
    bounds = _bounds(profile)

    @cache
    def held(first: bool, last: bool, start: int, end: int) -> MemoryShare:
        """What the layers from `start` up to `end` take, with what else lies there."""
        return needs((*(others if first else ()), *(tail if last else ()), *layers[start:end]))

    def share(device: str, start: int, end: int) -> MemoryShare:
        found = held(device == primary, device == devices[-1], start, end)
        return replace(found, capacity=capacities[device])

    # An empty GPU is charged for its opening too, with the working memory that its first layer would bring: else a
    # small model would rather stay on one than be split.
    count = len(layers)
    opening = CUDA_CONTEXT_BYTES
    if count > 1:
        one, other, both = ((count - 1, count), (count - 2, count - 1), (count - 2, count))
        beside = [held(False, False, *span).needed for span in (one, other, both)]
        opening = max(opening, beside[0] + beside[1] - beside[2])

    def cost(device: str, start: int, end: int) -> tuple[int, float]:
        """Bytes too many, before all; then how uneven: the sum of needed²/capacity is least at equal fill."""
        needed = held(device == primary, device == devices[-1], start, end).needed
        return max(0, needed - capacities[device]), max(needed, opening) ** 2 / max(capacities[device], 1)

    # best[end]: the least cost at which the devices so far hold the first `end` layers.
    best: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    starts: list[dict[int, int]] = []
    for device in devices:
        options = {
            end: min((_sum(best[start], cost(device, start, end)), start) for start in best if start <= end)
            for end in bounds
            if device != primary or end <= most or end == bounds[0]
        }
        best = {end: total for end, (total, _) in options.items()}
        starts.append({end: start for end, (_, start) in options.items()})

    runs, end = [], count
    for choices in reversed(starts):
        runs.append((choices[end], end))
        end = choices[end]
    spans = dict(zip(devices, reversed(runs), strict=True))
    where = {part.name: primary for part in others} | {part.name: devices[-1] for part in tail}
    where |= {layers[i].name: device for device, (start, end) in spans.items() for i in range(start, end)}
    return {p.name: where[p.name] for p in profile.parts}, {d: share(d, *span) for d, span in spans.items()}


def _bounds(profile: ModelProfile) -> list[int]:
    """How many layers may lie before a cut: no cut parts two that share a tensor, or one from what is no layer."""
    at = {part.name: index for index, part in enumerate(profile.layers)}
    tied = [sorted((at.get(one, -1), at.get(other, -1))) for one, other in profile.ties]
    return [end for end in range(len(at) + 1) if not any(first < end <= last for first, last in tied)]


def _sum(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    return one[0] + other[0], one[1] + other[1]
