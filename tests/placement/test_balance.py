"""A split model: every part has a device, layers stay in order, GPUs are about equally full."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.placement import MemoryShare, ModelProfile, Workload
from trimtab.placement.balance import balanced_map
from trimtab.placement.profile import CUDA_CONTEXT_BYTES, Part

GIB = 2**30
WORK = Workload(batch_size=1, max_length=128)


def stack(*layer_parameters: int, outside: int = 1000) -> ModelProfile:
    parts = [Part(name="embed", parameters=outside, trainable=0, is_layer=False)]
    parts += [
        Part(name=f"layers.{i}", parameters=n, trainable=0, is_layer=True)
        for i, n in enumerate(layer_parameters)
    ]
    parts += [
        Part(name="norm", parameters=10, trainable=0, is_layer=False),
        Part(name="head", parameters=outside, trainable=0, is_layer=False),
    ]
    return ModelProfile(parts=tuple(parts), hidden=16, intermediate=64, vocabulary=100, attention=48)


def spread(
    profile: ModelProfile, *gib: float, primary: str = "cuda:0"
) -> tuple[dict[str, str], dict[str, MemoryShare]]:
    capacities = {f"cuda:{i}": int(n * GIB) for i, n in enumerate(gib)}
    return balanced_map(profile, primary, capacities, "bf16", "bf16", WORK)


def layers_on(device_map: dict[str, str]) -> dict[str, list[int]]:
    held: dict[str, list[int]] = {}
    for name, device in device_map.items():
        if name.startswith("layers."):
            held.setdefault(device, []).append(int(name.split(".")[1]))
    return held


def test_two_equal_gpus_take_half_each() -> None:
    device_map, memory = spread(stack(*[GIB // 4] * 10), 24, 24)
    assert layers_on(device_map) == {"cuda:0": [0, 1, 2, 3, 4], "cuda:1": [5, 6, 7, 8, 9]}
    assert all(share.fits for share in memory.values())


def test_four_gpus_and_layers_that_do_not_divide() -> None:
    device_map, _ = spread(stack(*[GIB // 4] * 5), 24, 24, 24, 24)
    counts = sorted(len(held) for held in layers_on(device_map).values())
    assert counts == [1, 1, 1, 2]


def test_gpus_of_different_size_are_equally_full() -> None:
    device_map, memory = spread(stack(*[GIB // 16] * 60), 24, 12)
    held = layers_on(device_map)
    assert len(held["cuda:0"]) > len(held["cuda:1"])
    fill = [share.needed / share.capacity for share in memory.values()]
    assert fill[0] == pytest.approx(fill[1], abs=0.02)


def test_everything_but_layers_is_on_the_primary_gpu() -> None:
    device_map, _ = spread(stack(*[GIB // 4] * 8), 24, 24, 24, primary="cuda:1")
    assert {device_map[name] for name in ("embed", "norm", "head")} == {"cuda:1"}
    assert layers_on(device_map)["cuda:1"][0] == 0, "the first layers are beside the embeddings"


def test_a_heavy_head_leaves_the_primary_gpu_fewer_layers() -> None:
    device_map, _ = spread(stack(*[GIB // 4] * 12, outside=GIB // 2), 24, 24)
    held = layers_on(device_map)
    assert len(held["cuda:0"]) == 4
    assert len(held["cuda:1"]) == 8


def test_too_small_gpus_say_so() -> None:
    _, memory = spread(stack(*[GIB] * 10), 8, 8)
    assert not all(share.fits for share in memory.values())


def test_embeddings_and_head_that_fit_nowhere_stay_on_the_primary_gpu_and_say_so() -> None:
    device_map, memory = spread(stack(*[GIB // 8] * 8, outside=2 * GIB), 6, 4)
    assert device_map["embed"] == device_map["head"] == "cuda:0"
    assert not memory["cuda:0"].fits


def test_a_gpu_without_room_gets_no_layer() -> None:
    device_map, memory = spread(stack(*[GIB // 4] * 8), 24, 0.7, 24)
    assert "cuda:1" not in device_map.values()
    assert all(share.fits for share in memory.values())


def test_a_gpu_that_others_have_filled_is_passed_over() -> None:
    """Less is free there than a CUDA context takes; nothing is put on it, so none is opened."""
    device_map, memory = spread(stack(*[GIB // 4] * 8), 24, 0.3, 24)
    assert set(device_map.values()) == {"cuda:0", "cuda:2"}
    assert memory["cuda:1"].needed == 0
    assert all(share.fits for share in memory.values())


def test_a_small_model_is_split_all_the_same() -> None:
    device_map, _ = spread(stack(10, 10), 24, 24)
    assert set(device_map.values()) == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("gib", [(24, 24), (80, 2), (2, 80), (24, 24, 24, 24)])
@pytest.mark.parametrize("lanes", [1, 2, 9])
def test_a_small_model_without_gradients_is_split_too(gib: tuple[int, ...], lanes: int) -> None:
    """Each GPU pays for the passes of one layer, whether it holds one or all: no reason to stay on one."""
    capacities = {f"cuda:{i}": n * GIB for i, n in enumerate(gib)}
    work = Workload(batch_size=16, max_length=2048, training=False, lanes=lanes)
    device_map, memory = balanced_map(stack(*[10] * 8), "cuda:0", capacities, "bf16", "bf16", work)
    assert all(share.fits for share in memory.values())
    assert len(set(device_map.values())) > 1
    if len(set(gib)) == 1:
        assert set(device_map.values()) == set(capacities), "equal GPUs all take part"


def test_what_fits_comes_before_what_is_even() -> None:
    device_map, memory = spread(stack(int(2.25 * GIB), int(2.3 * GIB)), 10, 5)
    assert layers_on(device_map) == {"cuda:0": [0, 1]}, "4.6 GiB and its own needs are too much for cuda:1"
    assert all(share.fits for share in memory.values())


machines = st.lists(st.integers(2, 40), min_size=2, max_size=4)
models = st.lists(st.integers(1, GIB), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(models, machines, st.integers(0, GIB))
def test_every_part_is_placed_once_and_layers_are_in_order(
    layers: list[int], gib: list[int], outside: int
) -> None:
    profile = stack(*layers, outside=outside)
    device_map, memory = spread(profile, *gib)
    assert list(device_map) == [part.name for part in profile.parts]
    order = [device_map[part.name] for part in profile.layers]
    assert order == sorted(order)
    for device, share in memory.items():
        held = [part for part in profile.parts if device_map[part.name] == device]
        assert share.weights == 2 * sum(part.parameters for part in held)
        assert share.capacity == gib[int(device[-1])] * GIB
        assert share.overhead == (CUDA_CONTEXT_BYTES if held else 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 2 * GIB), min_size=1, max_size=7), machines)
def test_what_can_be_placed_is_placed(layers: list[int], gib: list[int]) -> None:
    """If any cut of the layers into consecutive runs fits, the plan fits."""
    profile = stack(*layers)
    _, memory = spread(profile, *gib)

    def fits(cuts: tuple[int, ...]) -> bool:
        bounds = [0, *cuts, len(layers)]
        for index, (start, end) in enumerate(pairwise(bounds)):
            outside = [part for part in profile.parts if not part.is_layer] if index == 0 else []
            parts = [*outside, *profile.layers[start:end]]
            overhead = CUDA_CONTEXT_BYTES
            share = profile.share(parts, "bf16", "bf16", WORK, capacity=gib[index] * GIB, overhead=overhead)
            if not share.fits:
                return False
        return True

    possible = any(fits(cuts) for cuts in combinations_with_replacement(range(len(layers) + 1), len(gib) - 1))
    assert all(share.fits for share in memory.values()) == possible


@settings(max_examples=150, deadline=None)
@given(models, machines)
def test_neighbours_are_equally_full_within_one_layer(layers: list[int], gib: list[int]) -> None:
    profile = stack(*layers)
    device_map, memory = spread(profile, *gib)
    if not all(share.fits for share in memory.values()):
        return
    held = layers_on(device_map)
    away = sum(device != "cuda:0" for device in device_map.values())
    for left, right in pairwise(memory):
        for fuller, other, edge in ((left, right, -1), (right, left, 0)):
            if fuller not in held or (other == "cuda:0" and away == 1):
                # Nothing to move, or the one layer that makes it a split.
                continue
            moved = profile.layers[held[fuller][edge]]
            layer = profile.share([moved], "bf16", "bf16", WORK, capacity=0).needed
            one, two = memory[fuller], memory[other]
            filled = max(two.needed, CUDA_CONTEXT_BYTES)
            if filled + layer > two.capacity:
                continue
            gap = one.needed / one.capacity - filled / two.capacity
            # Moving this layer over would make things no better.
            assert gap <= layer / 2 * (1 / one.capacity + 1 / two.capacity) + 1e-9
