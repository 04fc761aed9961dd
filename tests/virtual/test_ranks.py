"""torch.distributed on virtual GPUs: NCCL by name, collectives on virtual tensors, a group of one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.virtual import ending, virtual_gpus
from trimtab.virtual.observer import Observer
from trimtab.virtual.state import NotSimulated


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
    assert listener.seen[-1]["gpu"] == "cuda:1"
    dist.barrier()
    assert listener.seen[-1]["gpu"] is None, "NCCL then goes by the rank, not by the current device"


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


def _futures(x: torch.Tensor) -> dict[str, Any]:
    like = torch.zeros_like
    return {
        "all_reduce": lambda: dist.all_reduce(x, async_op=True),
        "broadcast": lambda: dist.broadcast(x, 0, async_op=True),
        "reduce": lambda: dist.reduce(x, 0, async_op=True),
        "all_gather": lambda: dist.all_gather([like(x)], x, async_op=True),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(like(x), x, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(like(x), [x], async_op=True),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(like(x), x, async_op=True),
        "gather": lambda: dist.gather(x, [like(x)], 0, async_op=True),
        "scatter": lambda: dist.scatter(like(x), [x], 0, async_op=True),
        "all_to_all": lambda: dist.all_to_all([like(x)], [x], async_op=True),
        "all_to_all_single": lambda: dist.all_to_all_single(like(x), x, async_op=True),
    }


@pytest.mark.parametrize("name", _futures(torch.ones(1)))
@pytest.mark.usefixtures("listener")
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_future_of_a_collective_holds_tensors_on_the_gpu(name: str) -> None:
    x = torch.arange(4.0, device="cuda:1")
    (value,) = _futures(x)[name]().get_future().wait()
    assert value.device == torch.device("cuda", 1)
    assert value.tolist() == [0.0, 1.0, 2.0, 3.0]
    doubled = _futures(x)[name]().get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), x * 2)


@pytest.mark.usefixtures("listener")
def test_ddp_hook_with_a_callback() -> None:
    seen: list[torch.device] = []

    def half(future: Any) -> torch.Tensor:
        seen.append(future.value()[0].device)
        scale = torch.full((), 0.5, device=seen[-1])
        return future.value()[0] * scale  # type: ignore[no-any-return]

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(half)

    model = nn.Linear(3, 1).to("cuda:1")
    wrapped = DistributedDataParallel(model, device_ids=[1])
    wrapped.register_comm_hook(None, hook)
    wrapped(torch.ones(2, 3, device="cuda:1")).sum().backward()
    assert set(seen) == {torch.device("cuda", 1)}
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.usefixtures("listener")
def test_what_gloo_may_still_hold_is_held_until_it_is_done() -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(2, device="cuda:0"), async_op=True).wait()
        assert len(ending._pending) >= 1
    held = len(ending._pending)
    dist.all_reduce(torch.ones(2, device="cuda:0"))
    assert len(ending._pending) <= held


def test_rpc_with_gpu_tensors_says_that_it_is_not_simulated() -> None:
    from torch.distributed import rpc

    with virtual_gpus(2):
        options = rpc.TensorPipeRpcBackendOptions(device_maps={"other": {0: 1}})
        with pytest.raises(NotSimulated, match="cuda:1"):
            rpc.internal._internal_rpc_pickler.serialize({"x": torch.ones(1, device="cuda:1")})
        with pytest.raises(NotSimulated, match="device_maps"):
            rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
        rpc.internal._internal_rpc_pickler.serialize({"x": torch.ones(1)})


def _doubled(x: torch.Tensor) -> torch.Tensor:
    moved = x.cuda(1)
    assert moved.device == torch.device("cuda", 1)
    return (moved * 2).cpu()


def _slowly(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.1)  # the callback is added before the answer comes
    return _doubled(x)


def _on_gpu(x: torch.Tensor) -> torch.Tensor:
    return x.to("cuda")


@pytest.mark.filterwarnings("ignore:.*Backend.*ProcessGroup:FutureWarning")
def test_a_function_called_by_rpc_sees_the_gpus(tmp_path: Path) -> None:
    from torch.distributed import rpc

    with virtual_gpus(2):
        options = rpc.TensorPipeRpcBackendOptions(init_method=(tmp_path / "store").as_uri())
        rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
        try:
            x = torch.ones(2)
            assert rpc.rpc_sync("one", _doubled, args=(x,)).tolist() == [2.0, 2.0]
            then = rpc.rpc_async("one", _slowly, args=(x,)).then(lambda done: _doubled(done.value()))
            assert then.wait().tolist() == [4.0, 4.0]
            assert rpc.remote("one", _doubled, args=(x,)).to_here().tolist() == [2.0, 2.0]
            with pytest.raises(NotSimulated, match="RPC with a tensor on cuda:0"):
                rpc.rpc_sync("one", _on_gpu, args=(x,))
        finally:
            rpc.shutdown(graceful=False)


def test_nothing_is_left_behind() -> None:
    def parts() -> tuple[Any, ...]:
        functions = (dist.init_process_group, dist.get_backend, dist.is_nccl_available)
        return (*functions, dist.ProcessGroup.allreduce, dist.Work.get_future)

    before = parts()
    with virtual_gpus(1):
        assert all(now is not then for now, then in zip(parts(), before, strict=True))
    assert parts() == before


def _average(rank: int, store: str, queue: Any) -> None:
    with virtual_gpus(2):
        dist.init_process_group("nccl", rank=rank, world_size=2, init_method=f"file://{store}")
        torch.cuda.set_device(rank)
        whole = torch.tensor([3, -4], device="cuda") * (rank + 1) - rank
        dist.all_reduce(whole, op=dist.ReduceOp.AVG, async_op=True).wait()
        root = torch.tensor([7 if rank else 2], device="cuda")
        dist.reduce(root, 0, op=dist.ReduceOp.AVG)
        part = torch.zeros(1, dtype=torch.int32, device="cuda")
        dist.reduce_scatter(
            part, list((torch.tensor([[1], [4]], device="cuda") * (rank + 1)).int()), op=dist.ReduceOp.AVG
        )
        float_ = torch.tensor(1.0 + rank, device="cuda")
        dist.all_reduce(float_, op=dist.ReduceOp.AVG)
        queue.put((rank, whole.tolist(), root.tolist(), part.tolist(), float_.item()))
        dist.destroy_process_group()


def test_averages_of_whole_numbers_are_nccls(tmp_path: Path) -> None:
    """Sums [8, -13], 9, [3] and [12], divided towards nought; gloo refuses an average of whole numbers."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=_average, args=(n, str(tmp_path / "store"), queue)) for n in range(2)]
    for one in ranks:
        one.start()
    told = sorted(queue.get(timeout=120) for _ in ranks)
    for one in ranks:
        one.join()
    assert told == [(0, [4, -6], [4], [1], 1.5), (1, [4, -6], [7], [6], 1.5)]
