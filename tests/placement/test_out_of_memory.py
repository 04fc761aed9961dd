"""The one message for a device whose memory was not enough."""

from __future__ import annotations

from trimtab.errors import TrimtabError
from trimtab.placement import MemoryShare, PlacementPlan, out_of_memory

GIB = 2**30


def plan(**changes: object) -> PlacementPlan:
    shape: dict[str, object] = {
        "device": "cuda:0",
        "precision": "bf16",
        "scaler": False,
        "weight_precision": "bf16",
        "strategy": "single",
    }
    return PlacementPlan(**(shape | changes))  # type: ignore[arg-type]


def test_it_names_settings_devices_the_estimate_and_the_ways_out() -> None:
    memory = {
        "cuda:0": MemoryShare(weights=6 * GIB, activations=GIB, capacity=8 * GIB),
        "cuda:1": MemoryShare(weights=3 * GIB, capacity=8 * GIB),
    }
    split = plan(strategy="split", device_map={"a": "cuda:0", "b": "cuda:1"}, memory=memory)
    error = out_of_memory(
        split,
        {"training.batch_size": 8, "data.max_length": 512},
        "weights and activations",
        ["halve training.batch_size", "set training.gradient_checkpointing=true", "lower data.max_length"],
    )
    assert isinstance(error, TrimtabError)
    assert error.exit_code == 1, "the request was right; the run failed"
    assert str(error).splitlines() == [
        "out of memory on cuda:0, cuda:1 with training.batch_size=8, data.max_length=512",
        "  why: weights and activations did not fit (the plan's figure is an estimate: 7.0 of 8.0 GiB on cuda:0, "
        "3.0 of 8.0 GiB on cuda:1)",
        "  change: halve training.batch_size, set training.gradient_checkpointing=true, or lower data.max_length",
    ]


def test_without_a_profile_there_is_no_figure() -> None:
    error = out_of_memory(plan(), {"training.batch_size": 1}, "weights", ["use a smaller model"])
    assert "(the plan's figure is an estimate)" in str(error)
    assert str(error).endswith("change: use a smaller model")


def test_figures_of_other_ranks_are_left_out() -> None:
    share = MemoryShare(weights=GIB, capacity=2 * GIB)
    own = plan(strategy="data_parallel", processes=2, memory={"cuda:0": share, "cuda:1": share})
    assert "cuda:1" not in str(out_of_memory(own, {}, "weights", ["…"]))
