"""The estimate of a step's memory by the way it is computed, beside peaks that were measured on one H200."""

from __future__ import annotations

import pytest

from trimtab.placement import ModelProfile, Workload
from trimtab.placement.activations import Computed
from trimtab.placement.profile import CUDA_CONTEXT_BYTES, Part

GIB = 2**30


def llama(layers: int, hidden: int, intermediate: int, attention: int, vocabulary: int) -> ModelProfile:
    """A Llama's shape with an adapter of rank 16 on all seven projections."""
    narrow = 16 * (7 * hidden + attention + 3 * intermediate)
    each = hidden * attention + hidden * hidden + 3 * hidden * intermediate + narrow
    parts = [
        Part(name=f"layers.{n}", parameters=each, trainable=narrow, is_layer=True) for n in range(layers)
    ]
    tied = 1 if hidden < 4096 else 2
    table = Part(
        name="embed", parameters=tied * vocabulary * hidden, trainable=0, is_layer=False, embeds=True
    )
    return ModelProfile(
        parts=(table, *parts),
        hidden=hidden,
        intermediate=intermediate,
        attention=attention,
        vocabulary=vocabulary,
    )


EIGHT = llama(32, 4096, 14336, 6144, 128256)
ONE = llama(16, 2048, 8192, 3072, 128256)


def needed(profile: ModelProfile, computed: Computed, *, checkpointing: bool = False) -> float:
    work = Workload(batch_size=2, max_length=4096, gradient_checkpointing=checkpointing, computed=computed)
    share = profile.share(
        profile.parts, "bf16", "bf16", work, capacity=140 * GIB, overhead=CUDA_CONTEXT_BYTES
    )
    return share.needed / GIB


@pytest.mark.parametrize(
    ("profile", "computed", "checkpointing", "measured"),
    [
        (EIGHT, Computed(compiled=True, chunked_head=True), False, 51.3),
        (EIGHT, Computed(compiled=True, chunked_head=True, kept=0.5), False, 35.4),
        (EIGHT, Computed(compiled=True, chunked_head=True), True, 19.3),
        (ONE, Computed(compiled=True, chunked_head=True), False, 13.4),
    ],
)
def test_the_estimate_is_near_what_was_measured(
    profile: ModelProfile, computed: Computed, checkpointing: bool, measured: float
) -> None:
    """Not below it by more than a hair, for a run that was said to fit must; and not far above."""
    found = needed(profile, computed, checkpointing=checkpointing)
    assert 0.98 * measured < found < 1.15 * measured


def test_each_way_needs_less_than_the_plain_one() -> None:
    plain = needed(EIGHT, Computed())
    compiled = needed(EIGHT, Computed(compiled=True))
    kernels = needed(EIGHT, Computed(compiled=True, kernels=True))
    half = needed(EIGHT, Computed(compiled=True, kernels=True, kept=0.5))
    assert plain > compiled > kernels > half
