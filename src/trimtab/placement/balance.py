"""Spreads a model's layers over several GPUs so that each is about equally full.

Embeddings, final norm and head share the primary device where they fit: inputs, labels and loss meet there, and tied
weights stay one tensor. Where they do not, an untied head goes to the last device. Layers follow one another in
order, so activations cross from GPU to GPU as seldom as possible. It never refuses: a share that is too large says so
itself (`MemoryShare.fits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.placement.plan import MemoryShare, Precision
from trimtab.placement.profile import CUDA_CONTEXT_BYTES, ModelProfile, Part, Workload


def balanced_map(
    profile: ModelProfile,
    primary: str,
    capacities: Mapping[str, int],
    weights: Precision,
    compute: Precision,
    work: Workload,
) -> tuple[dict[str, str], dict[str, MemoryShare]]:
    """Module name to device, and what each device then holds."""
    together = _spread(profile, primary, capacities, weights, compute, work, ())
    tail = _tail(profile)
    if not tail or all(share.fits for share in together[1].values()):
        return together
    apart = _spread(profile, primary, capacities, weights, compute, work, tail)
    return apart if all(share.fits for share in apart[1].values()) else together


def _tail(profile: ModelProfile) -> tuple[Part, ...]:
    """Final norm and head, where the head has weights of its own; none where it is the embedding's tensor."""
    names = [p.name for p in profile.layers]
    if not names:
        return ()
    last = [p.name for p in profile.parts].index(names[-1])
    after = tuple(p for p in profile.parts[last + 1 :] if not p.is_layer and p.parameters)
    return after if sum(p.parameters for p in after) >= profile.vocabulary * profile.hidden else ()


def _spread(
    profile: ModelProfile,
    primary: str,
    capacities: Mapping[str, int],
    weights: Precision,
    compute: Precision,
    work: Workload,
    tail: Sequence[Part],
) -> tuple[dict[str, str], dict[str, MemoryShare]]:
    """The most even spread of the layers, with `tail` on the last device and all else on the primary one."""
    devices = [primary, *(d for d in capacities if d != primary)]
    layers = profile.layers
    others = [p for p in profile.parts if not p.is_layer and p not in tail]

    def share(device: str, start: int, end: int) -> MemoryShare:
        """A device that holds the layers from `start` up to `end`, and what else is there."""
        fixed = [*(others if device == primary else ()), *(tail if device == devices[-1] else ())]
        held = [*fixed, *layers[start:end]]
        # A GPU that holds nothing is never opened: one that others have filled is passed over.
        overhead = CUDA_CONTEXT_BYTES if held else 0
        capacity = capacities[device]
        return profile.share(held, weights, compute, work, capacity=capacity, overhead=overhead)

    def cost(device: str, start: int, end: int) -> tuple[int, float]:
        """Bytes too many, before all; then how uneven: the sum of needed²/capacity is least at equal fill."""
        held = share(device, start, end)
        # An empty GPU is charged for its opening too: else a small model would rather stay on one than be split.
        even = max(held.needed, CUDA_CONTEXT_BYTES)
        return max(0, held.needed - held.capacity), even**2 / max(held.capacity, 1)

    # best[end]: the least cost at which the devices so far hold the first `end` layers.
    best: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    starts: list[dict[int, int]] = []
    for device in devices:
        options = {
            end: min((_sum(best[start], cost(device, start, end)), start) for start in best if start <= end)
            for end in range(len(layers) + 1)
        }
        best = {end: total for end, (total, _) in options.items()}
        starts.append({end: start for end, (_, start) in options.items()})

    bounds, end = [], len(layers)
    for choices in reversed(starts):
        bounds.append((choices[end], end))
        end = choices[end]
    spans = dict(zip(devices, reversed(bounds), strict=True))
    where = {part.name: primary for part in others} | {part.name: devices[-1] for part in tail}
    where |= {layers[i].name: device for device, (start, end) in spans.items() for i in range(start, end)}
    return {p.name: where[p.name] for p in profile.parts}, {d: share(d, *span) for d, span in spans.items()}


def _sum(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    return one[0] + other[0], one[1] + other[1]
