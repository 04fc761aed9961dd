"""Sharded tensors (DTensor, FSDP2) on virtual GPUs, in a group of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from trimtab.virtual import virtual_gpus
from trimtab.virtual.tensor import is_virtual

MIB = 2**20


@pytest.fixture
def _group() -> Iterator[None]:
    with virtual_gpus(2):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        torch.cuda.set_device(1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def losses(net: nn.Module, device: str) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    rows = torch.randn(5, 8).to(device)
    seen = []
    for _ in range(3):
        loss = net(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.usefixtures("_group")
def test_a_sharded_tensor_is_where_its_shard_is() -> None:
    mesh = init_device_mesh("cuda", (1,))
    whole = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    assert isinstance(whole, DTensor)
    assert is_virtual(whole.to_local())
    assert whole.device == torch.device("cuda", 1)
    assert (whole.is_cuda, whole.is_cpu, whole.is_meta, whole.get_device()) == (True, False, False, 1)
    assert whole.full_tensor().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    # It has no memory of its own: who writes files by addresses (safetensors) is told so, as on hardware.
    assert whole.untyped_storage().device == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="data pointer on an invalid python storage"):
        whole.untyped_storage().data_ptr()
    moved = whole.cpu()
    assert moved.to_local().device.type == "cpu"
    again = torch.empty_like(moved, device="cuda")
    assert isinstance(again, DTensor)
    assert again.device == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        whole + torch.ones(3, 2, device="cuda")


@pytest.mark.usefixtures("_group")
def test_a_plain_tensor_that_stands_before_a_sharded_one() -> None:
    """As on the CPU, where a plain tensor has no class of its own that could be asked first."""
    whole = distribute_tensor(torch.ones(3, 2), init_device_mesh("cuda", (1,)), [Shard(0)])
    factor, row = torch.tensor(2.0, device="cuda"), torch.ones(3, 2, device="cuda")
    for made in (factor * whole, whole * factor, factor[None] * whole):
        assert isinstance(made, DTensor)
        assert made.full_tensor().tolist() == [[2.0, 2.0]] * 3
    mixed: list[Callable[[], Any]] = [
        lambda: row + whole,
        lambda: torch.stack([row, whole]),
        lambda: torch._foreach_add([row, whole], [row, whole]),
        lambda: torch._foreach_add([*[row] * 8, *[whole] * 8], 1.0),  # more than are asked about at once
    ]
    for refused in mixed:
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            refused()
    with implicit_replication():
        assert (row + whole).full_tensor().tolist() == [[2.0, 2.0]] * 3  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_group")
def test_a_functional_collective_is_waited_for() -> None:
    made = all_reduce(torch.ones(3, device="cuda"), "sum", dist.group.WORLD)
    assert is_virtual(made)
    assert made.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("offload", [False, True])
def test_fsdp_trains_as_the_cpu_does(offload: bool) -> None:
    expected = losses(model(), "cpu")
    net = model() if offload else model().cuda()
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for layer in (net[0], net[2], net):
        fully_shard(layer, **options)  # type: ignore[arg-type]
    assert str(net[0].weight.device) == ("cpu" if offload else "cuda:1")
    assert losses(net, "cuda") == expected


@pytest.mark.usefixtures("_group")
def test_memory_follows_storages_that_are_freed_and_made_again() -> None:
    before = torch.cuda.memory_allocated()
    held = torch.ones(MIB, device="cuda")
    storage = held.untyped_storage()
    assert torch.cuda.memory_allocated() == before + 4 * MIB
    storage.resize_(0)
    assert torch.cuda.memory_allocated() == before
    storage.resize_(4 * MIB)
    assert torch.cuda.memory_allocated() == before + 4 * MIB
    del held, storage
    assert torch.cuda.memory_allocated() == before


def test_nothing_is_left_behind() -> None:
    before = {name: vars(DTensor).get(name) for name in ("device", "is_cuda", "is_meta", "get_device")}
    with virtual_gpus(1):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        assert vars(DTensor).get("device") is not None
        dist.destroy_process_group()
    assert {name: vars(DTensor).get(name) for name in before} == before
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        plain = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert plain.device == torch.device("cpu")
    finally:
        dist.destroy_process_group()
