"""Where embeddings and head do not fit on one GPU together, an untied head goes to the last one."""

from __future__ import annotations

from trimtab.placement import MemoryShare, ModelProfile, Workload
from trimtab.placement.balance import balanced_map
from trimtab.placement.profile import Part

GIB = 2**30
WORK = Workload(batch_size=1, max_length=64)


def profile(embed: float, head: float, layers: int = 6, each: float = 1.0) -> ModelProfile:
    """Sizes in billions of bytes at two bytes a parameter."""
    sizes = [
        ("embed", embed),
        *((f"layers.{i}", each) for i in range(layers)),
        ("norm", 1e-6),
        ("head", head),
    ]
    parts = tuple(
        Part(name=name, parameters=int(gib * GIB / 2), trainable=0, is_layer=name.startswith("layers."))
        for name, gib in sizes
    )
    return ModelProfile(parts=parts, hidden=16, intermediate=64, vocabulary=100, attention=48)


def spread(model: ModelProfile, *gib: float) -> tuple[dict[str, str], dict[str, MemoryShare]]:
    free = {f"cuda:{i}": int(n * GIB) for i, n in enumerate(gib)}
    return balanced_map(model, "cuda:0", free, "bf16", "bf16", WORK)


def test_they_share_the_first_gpu_where_they_fit() -> None:
    device_map, memory = spread(profile(embed=2, head=2), 10, 10)
    assert (device_map["embed"], device_map["norm"], device_map["head"]) == ("cuda:0",) * 3
    assert all(share.fits for share in memory.values())


def test_an_untied_head_goes_to_the_last_gpu_where_they_do_not() -> None:
    device_map, memory = spread(profile(embed=5, head=5), 9, 9, 9)
    assert device_map["embed"] == "cuda:0"
    assert (device_map["norm"], device_map["head"]) == ("cuda:2", "cuda:2")
    order = [int(device_map[f"layers.{i}"][-1]) for i in range(6)]
    assert order == sorted(order)
    assert all(share.fits for share in memory.values())


def test_unequal_gpus_keep_it_too() -> None:
    device_map, memory = spread(profile(embed=5, head=5), 7, 14)
    assert device_map["head"] == "cuda:1"
    assert all(share.fits for share in memory.values())


def test_a_tied_head_stays_with_its_embedding() -> None:
    device_map, memory = spread(profile(embed=10, head=0), 9, 9)
    assert device_map["embed"] == device_map["head"] == "cuda:0"
    assert not memory["cuda:0"].fits


def test_what_cannot_be_mended_is_reported_with_the_head_at_home() -> None:
    device_map, memory = spread(profile(embed=5, head=50), 9, 9)
    assert device_map["head"] == "cuda:0"
    assert not all(share.fits for share in memory.values())
