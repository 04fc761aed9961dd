"""GPU models by name, and the accelerators that a request names."""

from __future__ import annotations

import pytest

from trimtab.errors import RequestError
from trimtab.hardware import GpuModel, accelerators, find_gpu, probe
from trimtab.hardware.catalogue import DEFAULT, MODELS

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h200", "NVIDIA H200"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("a100 80gb", "NVIDIA A100-SXM4-80GB"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("t4", "Tesla T4"),
        ("v100_32gb", "Tesla V100-SXM2-32GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 NVL", "NVIDIA H100 NVL"),
        ("mi300x", "AMD Instinct MI300X"),
    ],
)
def test_loose_names(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_every_model_answers_to_its_key_and_to_torchs_name(model: GpuModel) -> None:
    assert find_gpu(model.key) is model
    assert find_gpu(model.name) is model


@pytest.mark.parametrize(
    ("text", "gib", "capability", "bf16"),
    [
        ("T4", 15, "7.5", False),
        ("V100-16GB", 16, "7.0", False),
        ("A100-40GB", 40, "8.0", True),
        ("RTX-5090", 32, "12.0", True),
        ("H200", 141, "9.0", True),
        ("B200", 180, "10.0", True),
    ],
)
def test_figures(text: str, gib: float, capability: str, bf16: bool) -> None:
    model = find_gpu(text)
    # torch reports a little less than the box says, never more.
    assert 0.96 * gib * GIB < model.memory_bytes < gib * GIB
    assert (model.capability, model.bf16) == (capability, bf16)


def test_an_ambiguous_name_is_not_guessed() -> None:
    with pytest.raises(RequestError, match="A100-40GB or A100-80GB"):
        find_gpu("a100")


def test_an_unknown_name_gets_near_ones() -> None:
    with pytest.raises(RequestError, match="RTX-4090"):
        find_gpu("rtx4080")
    with pytest.raises(RequestError, match="use one of T4"):
        find_gpu("quantum")


@pytest.mark.parametrize(
    ("spec", "count", "model"),
    [
        ("2xH200", 2, "NVIDIA H200"),
        ("2 x h200", 2, "NVIDIA H200"),
        ("8×L40S", 8, "NVIDIA L40S"),
        ("H200", 1, "NVIDIA H200"),
        ("4090", 1, "NVIDIA GeForce RTX 4090"),
        ("2x4090", 2, "NVIDIA GeForce RTX 4090"),
        ("2", 2, find_gpu(DEFAULT).name),
    ],
)
def test_accelerators(spec: str, count: int, model: str) -> None:
    found = accelerators(spec)
    assert [gpu.name for gpu in found] == [f"cuda:{index}" for index in range(count)]
    assert {gpu.model for gpu in found} == {model}
    assert all(gpu.free_bytes == gpu.total_bytes == find_gpu(model).memory_bytes for gpu in found)
    assert found[0].kind == "cuda"


@pytest.mark.parametrize("spec", ["", "0", "0xH200", "99999", "-1", "2x", "H200x2", "2000xH200"])
def test_what_is_no_number_of_gpus(spec: str) -> None:
    with pytest.raises(RequestError):
        accelerators(spec)


@pytest.mark.gpu
def test_the_catalogue_agrees_with_a_gpu_that_is_here() -> None:
    known = {model.name: model for model in MODELS}
    here = [gpu for gpu in probe().gpus if gpu.model in known]
    if not here:
        pytest.skip("no GPU of the catalogue is in this machine")
    for gpu in here:
        model = known[gpu.model]
        assert (model.capability, model.bf16) == (gpu.capability, gpu.bf16)
        assert abs(model.memory_bytes - gpu.total_bytes) < 0.02 * gpu.total_bytes
