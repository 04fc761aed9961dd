"""torch.cuda and torch.accelerator as a program sees them on virtual GPUs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest
import torch

from trimtab.gpu_models import MODELS, GpuModel
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.state import Machine, NotSimulated

MIB = 1 << 20


@pytest.fixture
def two() -> Iterator[Machine]:
    with virtual_gpus(2, memory="80GiB") as machine:
        yield machine


def test_the_machine_shows_in_torch_cuda(two: Machine) -> None:
    assert torch.cuda.is_available()  # noqa: TID251 - what is under test
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name(1) == "NVIDIA H100 80GB HBM3"
    assert torch.cuda.get_device_capability("cuda:1") == (9, 0)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor, properties.multi_processor_count) == (9, 0, 132)
    assert properties.total_memory == 80 << 30
    assert "H100" in repr(properties)
    assert torch.cuda.is_bf16_supported()
    assert "sm_90" in torch.cuda.get_arch_list()
    assert torch.cuda.can_device_access_peer(0, 1)
    assert torch.backends.cuda.is_built()
    assert torch.version.cuda is not None
    assert torch.cuda.nccl.version()[0] == 2


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.key)
def test_properties_are_those_of_the_catalogue(model: GpuModel) -> None:
    major, minor = (int(part) for part in model.capability.split("."))
    with virtual_gpus(1, name=model.name, capability=(major, minor), memory=model.memory_bytes):
        found = torch.cuda.get_device_properties(0)
    assert (found.name, found.total_memory) == (model.name, model.memory_bytes)
    assert (found.multi_processor_count, found.memory_bus_width) == (model.multiprocessors, model.bus_bits)
    assert (found.L2_cache_size, found.clock_rate) == (model.cache_mib * 2**20, model.clock_mhz * 1000)
    assert found.shared_memory_per_multiprocessor == model.architecture.shared_kib * 1024
    assert found.max_threads_per_multi_processor == model.architecture.threads


def test_nothing_is_left_behind() -> None:
    names = ("is_available", "Stream", "Event", "default_generators", "_initialized", "_lazy_init")
    before = {name: getattr(torch.cuda, name) for name in names}
    seen = (
        torch.cuda.is_available(),  # noqa: TID251
        torch.cuda.device_count(),
        torch.version.cuda,
        torch.Generator,
        torch.Stream,
    )
    layer = {name for name in vars(torch._C) if name.startswith(("_cuda", "_accelerator"))}
    importlib.import_module("torch._dynamo")  # sets a variable of its own when it is first imported

    variables = dict(os.environ)
    with virtual_gpus(2):
        torch.ones(2, device="cuda").sum().item()
    assert {name: getattr(torch.cuda, name) for name in names} == before
    assert seen == (
        torch.cuda.is_available(),  # noqa: TID251
        torch.cuda.device_count(),
        torch.version.cuda,
        torch.Generator,
        torch.Stream,
    )
    assert {name for name in vars(torch._C) if name.startswith(("_cuda", "_accelerator"))} == layer
    assert dict(os.environ) == variables


def test_initialisation_is_lazy(two: Machine) -> None:
    assert not torch.cuda.is_initialized()
    torch.cuda.device_count()
    assert not torch.cuda.is_initialized()
    torch.ones(1, device="cuda")
    assert torch.cuda.is_initialized()


def test_current_device(two: Machine) -> None:
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.ones(1, device="cuda").device == torch.device("cuda:1")
        with torch.cuda.device(None), torch.cuda.device(-1):
            assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    with torch.cuda.device_of(torch.ones(1, device="cuda:1")):
        assert torch.cuda.current_device() == 1
    with torch.cuda.device_of(torch.ones(1)):
        assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:1")
    assert torch.cuda.current_device() == 1
    torch.accelerator.set_device_index(0)
    assert torch.cuda.current_device() == 0


def test_a_device_that_is_not_there(two: Machine) -> None:
    with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
        torch.cuda.set_device(2)
    with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
        torch.ones(1, device="cuda:2")
    with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"), torch.cuda.device(7):
        pass
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)


def test_visible_devices_set_by_the_program_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # found so: a machine whose real GPUs are hidden
    with virtual_gpus(2):
        assert torch.cuda.device_count() == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert torch.cuda.device_count() == 1
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:1")  # the first use of a GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert torch.cuda.device_count() == 1  # too late, as on hardware


def test_memory_is_counted(two: Machine) -> None:
    assert torch.cuda.memory_allocated() == 0
    tensor = torch.zeros(MIB, device="cuda:1")
    assert torch.cuda.memory_allocated(1) == 4 * MIB
    assert torch.cuda.memory_allocated(0) == 0
    del tensor
    assert torch.cuda.memory_allocated(1) == 0
    assert torch.cuda.max_memory_allocated(1) == 4 * MIB
    assert torch.cuda.memory_reserved(1) == 20 * MIB
    free, total = torch.cuda.mem_get_info(1)
    context = two.devices[1].context_bytes
    assert (free, total) == ((80 << 30) - context - 20 * MIB, 80 << 30)
    assert len(torch.cuda.memory_snapshot()) == 1
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(1) == 0
    assert torch.cuda.mem_get_info(1)[0] == (80 << 30) - context
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(1) == 0
    assert torch.cuda.max_memory_reserved(1) == 0
    assert torch.cuda.memory_stats(1)["allocated_bytes.all.current"] == 0
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    assert torch.cuda.memory_snapshot() == []


def test_memory_fraction_limits(two: Machine) -> None:
    torch.cuda.set_per_process_memory_fraction(0.001, 0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 * MIB, device="cuda:0")
    torch.empty(100 * MIB, device="cuda:1")


def test_accelerator(two: Machine) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.device_count() == 2
    tensor = torch.zeros(MIB, device=torch.accelerator.current_accelerator())
    assert torch.accelerator.memory_allocated() == tensor.numel() * 4
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    assert torch.get_device_module() is torch.cuda
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1


def test_streams_and_events(two: Machine) -> None:
    side = torch.cuda.Stream()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        product = torch.ones(4, device="cuda") * 2
    torch.cuda.current_stream().wait_stream(side)
    product.record_stream(torch.cuda.current_stream())
    assert torch.cuda.current_stream() != side
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="must be recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert end.query()
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_what_is_not_simulated_says_so(two: Machine) -> None:
    with pytest.raises(NotImplementedError, match="not simulated"):
        torch.cuda.CUDAGraph()
    with pytest.raises(NotSimulated, match="not simulated"):
        torch.nested.nested_tensor([torch.ones(2, device="cuda"), torch.ones(1, device="cuda")])
    assert torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]).is_nested
    with pytest.raises(NotSimulated, match="not simulated"):
        torch.from_dlpack(torch.ones(2, device="cuda"))
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("inside")


def test_an_inner_machine_replaces_the_outer_one(two: Machine) -> None:
    torch.cuda.set_device(1)
    outer = torch.cuda.Stream()
    with torch.cuda.stream(outer):
        with virtual_gpus(4, name="NVIDIA A100-SXM4-80GB", capability=(8, 0)):
            assert torch.cuda.device_count() == 4
            assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB"
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() == outer


def test_the_drivers_library_says_that_nothing_is_busy(two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is installed and finds no driver, or other GPUs than these."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "_HAS_PYNVML", True)
    held = torch.ones(1 << 20, device="cuda:1")
    assert [cuda.utilization(1), cuda.memory_usage(), cuda.temperature("cuda:1"), cuda.power_draw(0)] == [
        0
    ] * 4
    assert cuda.clock_rate(1) == cuda.get_device_properties(1).clock_rate // 1000
    if hasattr(cuda, "device_memory_used"):  # from torch 2.7 on
        free, total = cuda.mem_get_info(1)
        assert cuda.device_memory_used(1) == total - free > held.nbytes
    assert str(os.getpid()) in cuda.list_gpu_processes(1)
    with pytest.raises(RuntimeError, match=r"invalid device ordinal|Invalid device"):
        cuda.utilization(2)


def test_without_the_drivers_library_torch_says_so(two: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    with pytest.raises(ModuleNotFoundError, match=r"nvidia-ml-py|pynvml"):
        torch.cuda.utilization()


def test_data_parallel(two: Machine) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    batch = torch.randn(6, 4)
    expected = model(batch)
    expected.sum().backward()
    gradient = model.weight.grad.clone()
    model.zero_grad()
    parallel = torch.nn.DataParallel(model.cuda())
    got = parallel(batch.cuda())
    assert got.device == torch.device("cuda:0")
    torch.testing.assert_close(got.cpu(), expected)
    got.sum().backward()
    torch.testing.assert_close(model.weight.grad.cpu(), gradient)


def test_compiled_code_runs_as_it_is_written(two: Machine) -> None:
    model = torch.nn.Linear(3, 2).cuda()
    batch = torch.ones(1, 3, device="cuda")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    assert torch.equal(compiled(batch), model(batch))
    assert isinstance(compiled, torch._dynamo.OptimizedModule)


def test_optimizer_steps_on_a_side_stream(two: Machine) -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    weight.grad = torch.ones_like(weight)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.optim.AdamW([weight], lr=0.1).step()
    assert weight.max().item() < 1


def test_a_machine_without_gpus() -> None:
    with virtual_gpus(0):
        assert torch.cuda.device_count() == 0
        assert not torch.cuda.is_available()  # noqa: TID251
        with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
            torch.cuda.init()
