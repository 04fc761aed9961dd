"""Ranks that part without a wrong size to show it, or for another reason than the sizes: what is told of them."""

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
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
TASKS = """
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 16)
            self.adapters = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("code", "chat")})

        def forward(self, x, task):
            hidden = self.body(x)
            return hidden + self.adapters[task](hidden)  # forward

    torch.manual_seed(0)
    net = Adapted().cuda()
    WRAP
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        task = ("code", "chat")[(step + APART) % 2]
        net(torch.randn(4, 16, device="cuda"), task).square().mean().backward()  # backward
        optimizer.step()
        optimizer.zero_grad()
"""
WRAPS = {
    "forward": "[fully_shard(one) for one in net.adapters.values()]; fully_shard(net)",
    "backward": "fully_shard(net)",  # all is gathered, and only what has a gradient is reduced
}


def written(folder: Path, program: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(HEAD + program))
    return path


@pytest.mark.parametrize("line", WRAPS)
@pytest.mark.parametrize("shapes", [True, False], ids=["shapes", "values"])
def test_modules_of_one_size_that_ranks_take_each_for_itself_are_mixed(
    rehearse_warm: Rehearse, tmp_path: Path, line: str, shapes: bool
) -> None:
    settings = {"shapes_only": True, "every_rank": True} if shapes else {}
    wrapped = TASKS.replace("WRAP", WRAPS[line])
    path = written(tmp_path, wrapped.replace("APART", "rank"))
    report = rehearse_warm(str(path), ranks=2, **settings)
    (finding,) = report["findings"]
    assert (report["verdict"], finding["kind"]) == ("fault", "ranks-disagree"), report["text"]
    assert {finding["cause"]["line"]} == marked_lines(path, line), finding
    assert all(f"`adapters.{name}`" in finding["message"] for name in ("code", "chat")), finding
    path = written(tmp_path, wrapped.replace("APART", "0"))
    report = rehearse_warm(str(path), ranks=2, **settings)
    assert (report["verdict"], report["findings"]) == ("clean", []), report["text"]


def test_lists_of_objects_have_to_be_equally_long(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    program = """
    if rank == 0:
        told = [{"lr": 0.1}, "names"]
    else:
        told = ROOM  # cause
    dist.broadcast_object_list(told, src=0)
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
    net(torch.randn(2, 4, device="cuda")).sum().backward()
    """
    path = written(tmp_path, program.replace("ROOM", "[None]"))
    (finding,) = rehearse_warm(str(path), ranks=2)["findings"]
    assert {finding["cause"]["line"]} == marked_lines(path, "cause"), finding
    assert "[None] * 2" in finding["fix"]
    path = written(tmp_path, program.replace("ROOM", "[None, None]"))
    assert rehearse_warm(str(path), ranks=2)["verdict"] == "clean"


def test_a_sharded_model_that_one_rank_evaluates(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    program = """
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def evaluate():
        with torch.no_grad():
            return net(torch.randn(2, 8, device="cuda")).mean()

    for step in range(2):
        net(torch.randn(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:  # cause
            print(evaluate())
        dist.barrier()
    """
    path = written(tmp_path, program)
    (finding,) = rehearse_warm(str(path), ranks=2)["findings"]
    assert {finding["cause"]["line"]} == marked_lines(path, "cause"), finding
    assert "Let every rank evaluate" in finding["fix"]


@pytest.mark.timeout(120)
def test_groups_that_are_taken_in_another_order_wait_in_a_ring(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    program = """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("row", "column"))
    order = [mesh.get_group("row"), mesh.get_group("column")]
    if (mesh.get_local_rank("row") + mesh.get_local_rank("column")) % 2:  # cause
        order = order[::-1]
    figure = torch.ones(8, device="cuda")
    for group in order:
        dist.all_reduce(figure, group=group)  # waits
    print(figure.sum())
    """
    path = written(tmp_path, program)
    (finding,) = rehearse_warm(str(path), ranks=4, gpus=4)["findings"]
    assert {finding["where"]["line"]} == marked_lines(path, "waits"), finding
    assert {finding["cause"]["line"]} == marked_lines(path, "cause"), finding
    assert "rank 0 stands in all_reduce of ranks 0, 2" in finding["message"]
    assert "in one order on every rank" in finding["fix"]
