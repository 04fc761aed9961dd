"""Collectives where big tensors have shapes only: one rank that stands for all, and ranks that meet."""

from __future__ import annotations

import json
import os
import socket
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks

BEGIN = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import trimtab
from trimtab.virtual.observer import Observer
from trimtab.virtual.unknown import is_unknown

every = os.environ["WAY"] == "every"
found = {}
shapes, observer = os.environ["WAY"] != "values", Observer()
with trimtab.virtual_gpus(2, shapes=shapes, every_rank=every, observer=observer) as machine:
    rank, size = int(os.environ["RANK"]), 2
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    big = torch.randn(1000, 1000, device="cuda")
    small = torch.full((4,), float(rank + 1), device="cuda")
    whole = torch.tensor([rank, 7], device="cuda")

    def told(tensor):
        return "unknown" if is_unknown(tensor) else tensor.tolist()
"""
END = """
    with open(os.environ["FOUND"], "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()
"""


def one_rank(rank: int, program: Path, way: str, port: int) -> None:
    """The program, in a process that knows nothing but its rank."""
    os.environ.clear()
    os.environ.update(
        {
            **{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "WAY": way},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            "FOUND": str(program.with_name(f"{rank}.json")),
        }
    )
    exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__"})


def ranks(tmp_path: Path, code: str, every: bool, values: bool = False) -> list[Any]:
    """What each rank found; one of them where it stands for all."""
    with socket.socket() as held:
        held.bind(("", 0))
        port = held.getsockname()[1]
    path = tmp_path / "program.py"
    path.write_text(BEGIN + textwrap.indent(textwrap.dedent(code), "    ") + END)
    number = 2 if every else 1
    run_ranks(one_rank, path, "values" if values else "every" if every else "one", port, ranks=number)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(number)]


COLLECTIVES = """
    def one(name, tensor, call):
        call(tensor)
        found[name] = told(tensor)

    one("reduced", small.clone(), dist.all_reduce)
    one("counted", whole.clone(), dist.all_reduce)
    one("reduced big", big.clone(), dist.all_reduce)
    one("sent out", whole.clone(), lambda t: dist.broadcast(t, 1))
    gathered = [torch.zeros_like(whole) for _ in range(size)]
    dist.all_gather(gathered, whole)
    found["gathered"] = [told(t) for t in gathered]
    flat = torch.zeros(4, dtype=torch.long, device="cuda")
    dist.all_gather_into_tensor(flat, whole)
    found["gathered flat"] = told(flat)
    half = torch.zeros(500, 1000, device="cuda")
    dist.reduce_scatter_tensor(half, big)
    found["reduced parts"] = [told(half), list(half.shape)]
    swapped = torch.zeros_like(whole)
    dist.all_to_all_single(swapped, whole)
    found["swapped"] = told(swapped)
    things = [None] * size
    dist.all_gather_object(things, {"rows": 3 + rank})
    found["objects"] = things
    parts = [torch.zeros_like(whole) for _ in range(size)] if rank == 0 else None
    dist.gather(whole, parts, dst=0)
    with dist._coalescing_manager(device=torch.device("cuda", rank)):
        for tensor in (small, big):
            dist.all_reduce(tensor)
    dist.barrier()
    half_group = dist.new_group([rank]) if not every else [dist.new_group([n]) for n in range(size)][rank]
    alone = torch.tensor([5], device="cuda")
    dist.all_reduce(alone, group=half_group)
    found["alone"] = alone.tolist()
    found["backend"] = dist.get_backend()
"""


def test_one_rank_stands_for_all(tmp_path: Path) -> None:
    (mine,) = ranks(tmp_path, COLLECTIVES, every=False)
    assert mine == {
        "reduced": "unknown",
        "counted": "unknown",
        "reduced big": "unknown",
        "sent out": [0, 7],
        "gathered": [[0, 7], [0, 7]],
        "gathered flat": [0, 7, 0, 7],
        "reduced parts": ["unknown", [500, 1000]],
        "swapped": [0, 7],
        "objects": [{"rows": 3}, {"rows": 3}],
        "alone": [5],
        "backend": "nccl",
    }


def test_ranks_that_meet_know_what_all_of_them_know(tmp_path: Path) -> None:
    both = ranks(tmp_path, COLLECTIVES, every=True)
    for rank, mine in enumerate(both):
        assert mine == {
            "reduced": [3.0] * 4,
            "counted": [1, 14],
            "reduced big": "unknown",
            "sent out": [1, 7],
            "gathered": [[0, 7], [1, 7]],
            "gathered flat": [0, 7, 1, 7],
            "reduced parts": ["unknown", [500, 1000]],
            "swapped": [[0, 1], [7, 7]][rank],
            "objects": [{"rows": 3}, {"rows": 4}],
            "alone": [5],
            "backend": "nccl",
        }


FUNCTIONAL = """
    group = dist.group.WORLD
    found["reduced"] = told(functional.all_reduce(small, "sum", group))
    found["reduced big"] = told(functional.all_reduce(big, "sum", group))
    found["gathered"] = told(functional.all_gather_tensor(whole, 0, group))
    parts = functional.all_gather_tensor(big, 0, group)
    found["gathered big"] = [told(parts), list(parts.shape)]
    found["scattered"] = list(functional.reduce_scatter_tensor(big, "sum", 0, group).shape)
    found["swapped"] = list(functional.all_to_all_single(big, [500, 500], [500, 500], group).shape)
    found["sent out"] = told(functional.broadcast(whole, 1, group))
    found["device"] = str(parts.device)
    machine_bytes = torch.cuda.memory_allocated()
    kept = functional.all_gather_tensor(big, 0, group)
    found["bytes"] = 8_000_000 <= torch.cuda.memory_allocated() - machine_bytes <= 8_000_000 + 2**20
"""


@pytest.mark.parametrize("every", [False, True])
def test_functional_collectives(tmp_path: Path, every: bool) -> None:
    for rank, mine in enumerate(ranks(tmp_path, FUNCTIONAL, every)):
        assert mine == {
            "reduced": [3.0] * 4 if every else "unknown",
            "reduced big": "unknown",
            "gathered": [0, 7, 1, 7] if every else [0, 7, 0, 7],
            "gathered big": ["unknown", [2000, 1000]],
            "scattered": [500, 1000],
            "swapped": [1000, 1000],
            "sent out": [1, 7] if every else [0, 7],
            "device": f"cuda:{rank}",
            "bytes": True,
        }


MESSAGES = """
    other = 1 - rank
    got, counted = torch.zeros_like(big), torch.zeros_like(whole)
    if rank == 0:
        dist.send(big, 1)
        dist.recv(counted, 1)
    else:
        dist.recv(got, 0)
        dist.send(whole, 0)
    swap = torch.zeros_like(big)
    calls = [dist.P2POp(dist.isend, big, other), dist.P2POp(dist.irecv, swap, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    found["counted"] = told(counted)
    found["got"] = told(got)
    found["swapped"] = told(swap)
"""


def test_messages_between_two_ranks(tmp_path: Path) -> None:
    first, second = ranks(tmp_path, MESSAGES, every=True)
    assert first == {"counted": [1, 7], "got": "unknown", "swapped": "unknown"}
    assert second == {"counted": [0, 0], "got": "unknown", "swapped": "unknown"}
    (mine,) = ranks(tmp_path, MESSAGES, every=False)
    assert mine == {"counted": "unknown", "got": "unknown", "swapped": "unknown"}


TRAINING = """
    import gc
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    def layers():
        return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()

    def sharded(**options):
        model = layers()
        fully_shard(model[0], **options)
        return fully_shard(model, **options)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (2,))
    ways = {
        "ddp": lambda: DistributedDataParallel(layers(), device_ids=[rank]),
        "fsdp1": lambda: FullyShardedDataParallel(layers(), device_id=rank),
        "fsdp2": lambda: sharded(),
        "fsdp2 half": lambda: sharded(mp_policy=half),
        "fsdp2 kept": lambda: sharded(reshard_after_forward=False),
        "fsdp2 offloaded": lambda: sharded(offload_policy=CPUOffloadPolicy()),
        "tensor parallel": lambda: parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
        "zero": lambda: DistributedDataParallel(layers(), device_ids=[rank]),
    }
    for name, make in ways.items():
        gc.collect()  # what the way before left in cycles would go at any time
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = make()
        if name == "zero":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            model(torch.randn(256, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = torch.cuda.max_memory_allocated() - before
        del model, optimizer
"""


@pytest.mark.slow
def test_memory_is_that_of_a_run_with_values(tmp_path: Path) -> None:
    """Weights, gradients and their buckets, gathered weights, states of each rank's share."""
    first, second = ranks(tmp_path, TRAINING, every=True, values=True)
    met, other = ranks(tmp_path, TRAINING, every=True)
    assert met == other
    assert ranks(tmp_path, TRAINING, every=False) == [met]
    assert met == first == second
    weights = 2 * 513 * 512 * 4
    assert first["ddp"] > 5 * weights  # weights, gradients, buckets of them, two states
    assert weights < first["fsdp2"] < first["ddp"]
    assert first["fsdp2 offloaded"] < first["fsdp2 half"] < first["fsdp2 kept"] < first["ddp"]
    assert first["zero"] < first["ddp"]


KINDS = """
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    optimizer = torch.optim.SGD(fully_shard(model).parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(16, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = machine.devices[rank].ledger
    found.update({peak.phase: peak.kinds["weights"] for peak in ledger.peaks()})
    found["most"] = max(ledger.timeline("steady step").kinds["weights"])
"""


def test_gathered_weights_are_weights(tmp_path: Path) -> None:
    """Each layer is wrapped by itself, so that FSDP gathers what the very module holds that is called."""
    whole = 4 * 1024 * 1024 * 4
    for mine in (*ranks(tmp_path, KINDS, every=True, values=True), *ranks(tmp_path, KINDS, every=False)):
        assert mine["most"] == whole // 2 + whole
        assert mine["steady step"] > whole


def test_a_group_of_one_gets_back_what_it_gave(tmp_path: Path) -> None:
    """A gather is no less of a copy for having one rank, and a reduction of one is what it was."""
    (found,) = ranks(
        tmp_path,
        """
        alone, _ = dist.new_subgroups(1)
        given = torch.tensor([3, 5], device="cuda")
        listed, flat, part, sent = [torch.zeros_like(given)], *torch.zeros(3, 2, dtype=torch.int64, device="cuda")
        dist.all_gather(listed, given, group=alone)
        dist.all_gather_into_tensor(flat, given, group=alone)
        dist.reduce_scatter_tensor(part, given, group=alone)
        dist.all_to_all_single(sent, given, group=alone)
        dist.all_reduce(given, group=alone)
        found["each"] = [told(one) for one in (*listed, flat, part, sent, given)]
        linear = torch.nn.Linear(8, 8, device="cuda")
        wrapped = torch.nn.parallel.DistributedDataParallel(linear, process_group=alone)
        wrapped(torch.ones(1, 8, device="cuda")).sum().backward()
        found["gradient"] = list(linear.weight.grad.shape)
        """,
        every=False,
    )
    assert found == {"each": [[3, 5]] * 5, "gradient": [8, 8]}
