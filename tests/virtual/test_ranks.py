"""torch.distributed on virtual GPUs: NCCL by name, collectives on virtual tensors, a group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.virtual import virtual_gpus
from trimtab.virtual.observer import Observer


class Listener(Observer):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def collective(self, record: dict[str, Any]) -> None:
        self.seen.append(record)


@pytest.fixture
def listener() -> Iterator[Listener]:
    heard = Listener()
    with virtual_gpus(2, observer=heard):
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
        try:
            yield heard
        finally:
            dist.destroy_process_group()


def test_nccl_by_name(listener: Listener) -> None:
    assert dist.get_backend() == "nccl"
    assert dist.is_nccl_available()
    assert dist.get_backend(dist.new_group([0])) == "nccl"
    assert dist.get_backend(dist.new_group([0], backend="gloo")) == "gloo"


def test_collectives_keep_device_and_identity(listener: Listener) -> None:
    x = torch.arange(4.0, device="cuda:1")
    dist.all_reduce(x)
    dist.broadcast(x, src=0)
    out = [torch.zeros(4, device="cuda:1")]
    dist.all_gather(out, x)
    assert out[0].device == torch.device("cuda", 1)
    assert torch.equal(out[0], x)
    whole = torch.zeros(4, device="cuda:1")
    dist.all_gather_into_tensor(whole, x)
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [record["op"] for record in listener.seen] == [
        "all_reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
    ]
    assert listener.seen[0]["numel"] == 4
    assert listener.seen[0]["dtype"] == "float32"


def test_objects_and_barrier(listener: Listener) -> None:
    seen: list[Any] = [None]
    dist.all_gather_object(seen, {"a": 1})
    assert seen == [{"a": 1}]
    dist.barrier(device_ids=[1])
    assert listener.seen[-1]["op"] == "barrier"


def test_nccl_takes_no_host_tensors(listener: Listener) -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.group.WORLD.send([torch.ones(2)], 0, 0)


def test_ddp_with_device_ids(listener: Listener) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to("cuda:1")
    wrapped = DistributedDataParallel(model, device_ids=[1])
    wrapped(torch.ones(2, 3, device="cuda:1")).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]
    assert "all_reduce" in {record["op"] for record in listener.seen}


def test_nothing_is_left_behind() -> None:
    before = (dist.init_process_group, dist.get_backend, dist.is_nccl_available)
    with virtual_gpus(1):
        assert dist.init_process_group is not before[0]
    assert (dist.init_process_group, dist.get_backend, dist.is_nccl_available) == before
