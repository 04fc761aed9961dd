"""The checks about several processes, each alone in a group of one rank, and the graph walk that the checks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import named_lines

from trimtab.rehearse.checks.base import BaseCheck, shown, trained_by
from trimtab.rehearse.checks.cuts import leaves
from trimtab.rehearse.checks.ddp import Ddp
from trimtab.rehearse.checks.launcher import StaleLauncher

Checked = Callable[..., dict[str, Any]]

GROUP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
FAULTS: dict[str, tuple[type[BaseCheck], str, str]] = {
    "a layer that the loss does not use": (
        Ddp,
        "ddp-unused",
        GROUP
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)
        self.extra = nn.Linear(4, 1)  # cause

    def forward(self, x):
        return self.body(x)

ddp = DDP(Net())
for _ in range(2):
    ddp(torch.ones(2, 4)).sum().backward()  # where
""",
    ),
    "a condition decides whether a layer is used": (
        Ddp,
        "ddp-unused",
        GROUP
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, more=False):
        out = self.body(x)
        if more:  # cause
            out = out + self.extra(x)
        return out

ddp = DDP(Net())
for _ in range(2):
    ddp(torch.ones(2, 4)).sum().backward()  # where
""",
    ),
    "a re-entrant checkpoint inside": (
        Ddp,
        "ddp-ready-twice",
        GROUP
        + """
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.body, checkpoint(self.body, x, use_reentrant=True), use_reentrant=True)  # cause

ddp = DDP(Net(), find_unused_parameters=True)
ddp(torch.ones(2, 4, requires_grad=True)).sum().backward()  # where
""",
    ),
    "rank variables that no launcher set": (
        StaleLauncher,
        "stale-launcher",
        """
import os
import torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
world = int(os.environ["WORLD_SIZE"])  # cause
dist.init_process_group("gloo")  # where
assert dist.get_world_size() == 1
""",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_ranks_is_found_with_its_lines(checked: Checked, name: str) -> None:
    check, kind, code = FAULTS[name]
    report = checked(check, code)
    assert [finding["kind"] for finding in report["findings"]] == [kind], report
    assert named_lines(report, "where") == report["marks"]["where"], report
    assert named_lines(report, "cause") == report["marks"]["cause"], report


def test_the_parameters_that_are_not_used_are_named(checked: Checked) -> None:
    (finding,) = checked(Ddp, FAULTS["a layer that the loss does not use"][2])["findings"]
    assert "Parameters without a gradient: extra.weight, extra.bias." in finding["message"]


CLEAN: dict[str, tuple[type[BaseCheck], str]] = {
    "a single rank may call the module inside and skip the exchange": (
        Ddp,
        GROUP
        + """
ddp = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
ddp.module(torch.ones(2, 4)).sum().backward()
opt.step()
with ddp.no_sync():
    ddp(torch.ones(2, 4)).sum().backward()
opt.step()
""",
    ),
    "a group of one, by the launcher's variables": (
        StaleLauncher,
        """
import os
import torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
""",
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_lone_rank_is_no_fault(checked: Checked, name: str) -> None:
    report = checked(*CLEAN[name])
    assert report["findings"] == [], report


def test_the_leaves_that_a_backward_pass_would_reach() -> None:
    first, second, cut = (torch.ones(2, requires_grad=True) for _ in range(3))
    root = (first * second + cut.detach()).sum()
    assert {id(leaf) for leaf in leaves(root)} == {id(first), id(second)}
    assert list(leaves(first)) == [first]


def test_a_long_list_of_names_stays_readable() -> None:
    assert shown(["a", "b"]) == "a, b"
    assert shown(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"


def test_what_an_optimizer_steps() -> None:
    one, two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [two], "lr": 0.1}], lr=1.0)
    assert trained_by(optimizer) == [one, two]
    assert trained_by(object()) == []
