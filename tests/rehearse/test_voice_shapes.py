"""Higgs Audio of three billion weights, rehearsed on a GPU of 24 GB by its shape alone, with nothing fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.hardware.catalogue import find_gpu

Rehearse = Callable[..., dict[str, Any]]
EXAMPLE = Path(__file__).parents[2] / "examples" / "voice-3b.yaml"
WEIGHTS = 5_771_283_456
"""Of the model without its adapter."""


def rehearsed(
    rehearse: Rehearse, *changes: str, gpu_name: str = "RTX-4090", **options: Any
) -> dict[str, Any]:
    gpu = find_gpu(gpu_name)
    return rehearse(
        str(EXAMPLE),
        *changes,
        **options,
        gpus=1,
        gpus_given=True,
        shapes_only=True,
        max_steps=1,
        gpu_name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        capability=(8, 9),
    )


def test_a_step_of_its_audio_head_alone(rehearse_warmer: Rehearse) -> None:
    """All weights take part, few are trained: the slow cases have the adapters of the example, and compiled layers."""
    short = (
        "data.max_rows=4",
        "data.eval_fraction=0",
        "voice.show=0",
        "training.gradient_accumulation_steps=1",
    )
    report = rehearsed(rehearse_warmer, *short, "lora.targets=[audio_head]", "speed.compile=false")
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]
    assert report["steps"] == 1
    assert report["memory"]["cuda:0"]["peak_bytes"] > 2 * WEIGHTS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_half_precision(rehearse: Rehearse, precision: str) -> None:
    report = rehearsed(rehearse, f"precision={precision}", timeout=400)
    assert report["verdict"] == "clean", report["text"]
    assert report["findings"] == [], report["text"]
    assert report["steps"] == 1
    memory = report["memory"]["cuda:0"]
    assert 2 * WEIGHTS < memory["peak_bytes"] < memory["capacity_bytes"]
    for part in ("language model: attention", "audio MLP", "audio head"):
        assert part in report["stdout"] + report["stderr"]


@pytest.mark.slow
def test_in_full_precision_it_is_said_that_it_does_not_fit(rehearse: Rehearse) -> None:
    report = rehearsed(rehearse, "precision=fp32", gpu_name="L4", timeout=400)
    assert report["verdict"] == "fault"
    (finding,) = report["findings"]
    assert finding["kind"] == "out-of-memory"
    lack, told = finding["lack"], report["memory"]["cuda:0"]
    assert lack["need_bytes"] == told["peak_bytes"] + told["context_bytes"] > 4 * WEIGHTS
    assert f"{lack['short_bytes'] / 2**30:.1f} GiB too little" in finding["message"]
    assert report["steps"] == 1
    assert not any("estimate" in note for note in report["notes"])
