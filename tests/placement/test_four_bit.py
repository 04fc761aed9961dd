"""What the plan makes of weights in four bits: how much memory they take, and where they cannot be."""

from __future__ import annotations

import pytest

from trimtab.hardware import Accelerator, Cpu, Hardware, Launcher
from trimtab.placement import ModelProfile, PlacementError, PlacementRequest, Workload, resolve
from trimtab.placement.profile import Part

GIB = 2**30
WORK = Workload(batch_size=2, max_length=4096, gradient_checkpointing=True)


def llama(four_bit: bool) -> ModelProfile:
    """Llama 3.1 8B with LoRA of rank 16 on all linear layers."""
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    adapter = 16 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * (4096 + 14336))
    parts = [
        Part(
            name=f"model.layers.{i}",
            parameters=layer + adapter + 8192,
            trainable=adapter,
            four_bit=layer * four_bit,
            is_layer=True,
        )
        for i in range(32)
    ]
    ends = [Part(name=n, parameters=128256 * 4096, trainable=0, is_layer=False) for n in ("embed", "lm_head")]
    return ModelProfile(
        parts=(*parts, *ends), hidden=4096, intermediate=14336, attention=6144, vocabulary=128256
    )


def machine(*names: str, gib: int = 24) -> Hardware:
    size = {"total_bytes": gib * GIB, "free_bytes": gib * GIB, "bf16": True}
    gpus = tuple(Accelerator(name=n, model="Test GPU", capability="8.9", **size) for n in names)
    cpu = Cpu(model="Test CPU", cores=4, total_bytes=64 * GIB, free_bytes=64 * GIB, bf16=False)
    return Hardware(
        cpu=cpu,
        accelerators=gpus,
        launcher=Launcher(name="none"),
        torch_version="2.13",
        cuda_build="13.0",
    )


def test_an_8b_model_fits_where_sixteen_bits_do_not() -> None:
    request, card = PlacementRequest(), machine("cuda:0", gib=16)
    plan = resolve(request, card, llama(True), WORK)
    assert plan.memory["cuda:0"].weights < 6 * GIB
    assert "6,979 of 8,030 million" in plan.reasons["weights"]
    with pytest.raises(PlacementError, match=r"does not fit"):
        resolve(request, card, llama(False), WORK)


def test_a_model_that_does_not_fit_is_told_of_it() -> None:
    with pytest.raises(PlacementError, match=r"model\.quantize=nf4"):
        resolve(PlacementRequest(), machine("cuda:0", gib=16), llama(False), WORK)


def test_it_may_be_split_over_gpus_but_not_sharded() -> None:
    two = machine("cuda:0", "cuda:1", gib=12)
    assert resolve(PlacementRequest(model_parallel=True), two, llama(True), WORK).strategy == "split"
    with pytest.raises(PlacementError, match=r"model\.quantize with a sharded model"):
        resolve(PlacementRequest(sharding=True), two, llama(True), WORK)


def test_it_is_refused_on_the_apple_gpu() -> None:
    with pytest.raises(PlacementError, match="Apple"):
        resolve(PlacementRequest(), machine("mps", gib=64), llama(True), WORK)
