"""GPU models by name, and the accelerators that a request names."""

from __future__ import annotations

import pytest
import torch

from trimtab.errors import RequestError
from trimtab.gpu_models import DEFAULT, MODELS, nearest
from trimtab.hardware import GpuModel, accelerators, find_gpu, probe
from trimtab.hardware.catalogue import planned_gpus

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


# What the vendors publish: GB/s to memory, and 32-bit TFLOP/s. They follow from the table's clocks, bus and
# multiprocessors, so a slip in one of those shows here.
PUBLISHED = {
    "T4": (320, 8.1),
    "V100-16GB": (900, 15.7),
    "V100-32GB": (900, 15.7),
    "A10": (600, 31.2),
    "A10G": (600, 35.0),
    "A40": (696, 37.4),
    "A100-40GB": (1555, 19.5),
    "A100-80GB": (2039, 19.5),
    "A30": (933, 10.3),
    "L4": (300, 30.3),
    "L40S": (864, 91.6),
    "RTX-3060": (360, 12.7),
    "RTX-3080": (760, 29.8),
    "RTX-3090": (936, 35.6),
    "RTX-4070": (504, 29.1),
    "RTX-4080": (717, 48.7),
    "RTX-4090": (1008, 82.6),
    "RTX-5080": (960, 56.3),
    "RTX-5090": (1792, 104.8),
    "RTX-PRO-6000": (1792, 125),
    "RTX-A6000": (768, 38.7),
    "RTX-6000-Ada": (960, 91.1),
    "H100": (3350, 66.9),
    "H100-PCIe": (2039, 51.2),
    "H100-NVL": (3938, 60.3),
    "H200": (4800, 66.9),
    "B200": (7700, 74.5),
    "MI250X": (1638, 23.9),
    "MI300X": (5300, 163.4),
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_clocks_bus_and_multiprocessors_give_the_published_peaks(model: GpuModel) -> None:
    gigabytes, teraflops = PUBLISHED[model.key]
    assert model.bandwidth / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert model.single_tflops == pytest.approx(teraflops, rel=0.01)


def test_a_name_that_is_not_known_gets_figures_of_its_kind() -> None:
    assert nearest("NVIDIA H200", "9.0") is find_gpu("H200")
    assert nearest("NVIDIA A100-PCIE-40GB", "8.0").capability == "8.0"
    assert nearest("Something else", "1.0") is find_gpu(DEFAULT)


def test_an_ambiguous_name_is_not_guessed() -> None:
    with pytest.raises(RequestError, match="A100-40GB or A100-80GB"):
        find_gpu("a100")


def test_an_unknown_name_gets_near_ones() -> None:
    with pytest.raises(RequestError, match="RTX-4090"):
        find_gpu("rtx4095")
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


def test_an_apple_gpu_is_planned_for_and_does_not_stand_in_for_cuda() -> None:
    (gpu,) = planned_gpus("MPS-32GB")
    assert (gpu.name, gpu.total_bytes) == ("mps", 24 * 2**30)
    assert planned_gpus("2xH200") == accelerators("2xH200")
    with pytest.raises(RequestError, match="one in its machine"):
        planned_gpus("2xMPS-32GB")
    with pytest.raises(RequestError, match="trimtab fit CONFIG --gpu MPS-32GB"):
        accelerators("MPS-32GB")
    with pytest.raises(RequestError, match="of one kind"):
        accelerators("2xH200,1xA100-80GB")


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
        there = torch.cuda.get_device_properties(gpu.name)
        assert (model.multiprocessors, model.bus_bits) == (
            there.multi_processor_count,
            there.memory_bus_width,
        )
        assert int(model.cache_mib * 2**20) == there.L2_cache_size
        assert model.architecture.shared_kib * 1024 == there.shared_memory_per_multiprocessor
        assert model.architecture.block_kib * 1024 == there.shared_memory_per_block_optin
        assert model.architecture.threads == there.max_threads_per_multi_processor
