"""Ranks of which some belong together: groups that are made, models that a group trains, layers that a group shares,
buffers and gradients that a library exchanges for them. Each faulty program has a right twin."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

Rehearse = Callable[..., dict[str, Any]]

HEAD = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("BACKEND")  # backend
    rank, world = dist.get_rank(), dist.get_world_size()
"""


def _written(folder: Path, program: str, backend: str = "nccl") -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(HEAD.replace("BACKEND", backend) + program))
    return path


GROUPS = """
    if rank == 0:  # cause
        mine = dist.new_group([0, 1])  # where
        OTHER
    else:
        FIRST
        mine = dist.new_group([1])
    net = DDP(nn.Linear(4, 4).cuda())
    net(torch.randn(2, 4, device="cuda")).sum().backward()
"""


def test_every_rank_makes_every_group(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = _written(tmp_path, GROUPS.replace("OTHER", "pass").replace("FIRST", "pass"))
    report = rehearse_warm(str(path), ranks=2)
    (found,) = report["findings"]
    assert found["kind"] == "ranks-disagree", report["text"]
    assert "time ran out" not in report["text"]
    assert {found["where"]["line"]} == marked_lines(path, "where"), found
    assert {found["cause"]["line"]} == marked_lines(path, "cause"), found
    whole = GROUPS.replace("OTHER", "dist.new_group([1])").replace("FIRST", "dist.new_group([0, 1])")
    report = rehearse_warm(str(_written(tmp_path, whole)), ranks=2)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]


def test_a_group_of_oneself_needs_nobody(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    alone = """
    mine = dist.new_group([rank])
    net = DDP(nn.Linear(4, 4).cuda())
    net(torch.randn(2, 4, device="cuda")).sum().backward()
    """
    report = rehearse_warm(str(_written(tmp_path, alone)), ranks=2)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]


TEAMS = """
    groups = [dist.new_group([0]), dist.new_group([1])]
    torch.manual_seed(rank)
    net = DDP(nn.Linear(4, 4).cuda(), process_group=GROUP)
    SPOIL
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        net(torch.randn(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_models_of_two_groups_are_two_models(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    teams = TEAMS.replace("GROUP", "groups[rank]").replace("SPOIL", "pass")
    report = rehearse_warm(str(_written(tmp_path, teams)), ranks=2)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]
    # That one model of all ranks goes apart is told as before.
    spoilt = TEAMS.replace("GROUP", "None").replace("SPOIL", "nn.init.normal_(net.module.weight)")
    report = rehearse_warm(str(_written(tmp_path, spoilt)), ranks=2)
    assert [one["kind"] for one in report["findings"]] == ["ranks-disagree"], report["text"]


SPLIT = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).cuda()
    parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    rows = TensorDataset(torch.randn(64, 8))
    sampler = DistributedSampler(rows, SHARE, shuffle=False)  # cause
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    for (x,) in DataLoader(rows, batch_size=4, sampler=sampler):
        net(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_ranks_that_share_layers_take_the_same_rows(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = _written(tmp_path, SPLIT.replace("SHARE", "world, rank"))
    report = rehearse_warm(str(path), ranks=2)
    (found,) = report["findings"]
    assert (report["verdict"], found["kind"]) == ("fault", "ranks-apart"), report["text"]
    assert {found["cause"]["line"]} == marked_lines(path, "cause"), found
    assert "DistributedDataParallel" not in found["fix"]
    report = rehearse_warm(str(_written(tmp_path, SPLIT.replace("SHARE", "1, 0"))), ranks=2)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]


OFFLOADED = """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(net, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(torch.randn(2, 8, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)  # where
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("shapes", [False, True], ids=["values", "shapes"])
def test_gradients_on_the_host_need_a_backend_there(
    rehearse_warm: Rehearse, tmp_path: Path, shapes: bool
) -> None:
    path = _written(tmp_path, OFFLOADED)
    report = rehearse_warm(str(path), ranks=2, shapes_only=shapes)
    (found,) = report["findings"]
    assert found["message"] == "No backend type associated with device type cpu", report["text"]
    assert {found["where"]["line"]} == marked_lines(path, "where"), found
    assert {found["cause"]["line"]} == marked_lines(path, "backend"), found
    path = _written(tmp_path, OFFLOADED, "cpu:gloo,cuda:nccl")
    report = rehearse_warm(str(path), ranks=2, shapes_only=shapes)
    assert report["findings"] == [], report["text"]


GROWN = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("kept", torch.zeros(0, 4))

        def forward(self, x):
            y = self.layer(x)
            self.kept = torch.cat([self.kept, y.detach()[: MANY]])  # cause
            return y.sum()

    net = DDP(Net().cuda())
    for _ in range(3):
        net(torch.randn(4, 4, device="cuda")).backward()  # where
"""


def test_a_buffer_that_grows_by_the_rank(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = _written(tmp_path, GROWN.replace("MANY", "rank + 1"))
    report = rehearse_warm(str(path), ranks=2)
    (found,) = report["findings"]
    assert found["kind"] == "ranks-disagree", report["text"]
    assert {found["where"]["line"]} == marked_lines(path, "where"), found
    assert {found["cause"]["line"]} == marked_lines(path, "cause"), found
    assert "`kept`" in found["fix"]
    assert "broadcast_buffers=False" in found["fix"]
    report = rehearse_warm(str(_written(tmp_path, GROWN.replace("MANY", "2"))), ranks=2)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]
