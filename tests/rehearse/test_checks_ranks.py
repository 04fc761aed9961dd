"""The checks about several processes, each alone in a group of one rank, and the graph walk that the checks share."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import marked_lines, named_lines

from trimtab.rehearse.checks.base import BaseCheck, shown, trained_by
from trimtab.rehearse.checks.cuts import leaves
from trimtab.rehearse.checks.ddp import Ddp
from trimtab.rehearse.checks.launcher import StaleLauncher
from trimtab.rehearse.checks.reduced import is_made_up

Checked = Callable[..., dict[str, Any]]
Rehearse = Callable[..., dict[str, Any]]

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


def test_a_rank_that_waits_for_one_that_failed_is_no_fault_of_its_own(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text("""
import multiprocessing, os, torch, torch.distributed as dist

def rank(number):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    if number == 0:
        raise ValueError("no folder for the logs")  # where
    dist.init_process_group("nccl", world_size=2, rank=number)

if __name__ == "__main__":
    for number in range(2):
        multiprocessing.get_context("fork").Process(target=rank, args=(number,)).start()
""")
    report = rehearse_warm(str(path))
    (finding,) = report["findings"]
    assert (finding["kind"], finding["where"]["line"]) == ("other-error", 7), report["text"]


@pytest.mark.parametrize(
    ("given", "made_up"),
    [
        ("torch.zeros(1).cuda(rank)", True),
        ("torch.tensor([1]).cuda(args.gpu)", True),
        ("torch.tensor([hits, seen]).cuda(args.gpu)", False),
        ("loss.detach().clone()", False),
    ],
)
def test_a_tensor_of_given_figures_only_makes_the_ranks_meet(given: str, made_up: bool) -> None:
    assert is_made_up(ast.parse(given, mode="eval").body) == made_up


RANKS = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
torch.manual_seed(0)
rows = TensorDataset(torch.randn(48, 8))
"""
LOOP = """
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(1):
    for (x,) in loader:
        x = x.cuda()
        opt.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        opt.step()
"""
APART: dict[str, tuple[str, list[str]]] = {
    "ranks-apart": (
        RANKS
        + """
loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
model = nn.Linear(8, 8).cuda(local_rank)  # cause
"""
        + LOOP,
        ["model = DDP(model, device_ids=[local_rank])"],
    ),
    "same-rows": (
        RANKS
        + """
loader = DataLoader(rows, batch_size=4, shuffle=True)  # cause
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
"""
        + LOOP,
        [
            "DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))",
            "loader.sampler.set_epoch(epoch)",
        ],
    ),
}


@pytest.mark.parametrize("kind", APART)
def test_ranks_that_share_no_gradients_or_read_the_same_rows(
    rehearse_warm: Rehearse, tmp_path: Path, kind: str
) -> None:
    code, edits = APART[kind]
    path = tmp_path / "program.py"
    path.write_text(code)
    report = rehearse_warm(str(path), ranks=2)
    (finding,) = report["findings"]
    assert finding["kind"] == kind
    assert finding["severity"] == "fault"
    assert {finding["cause"]["line"]} == marked_lines(path, "cause")
    assert [edit["text"].strip() for edit in finding["edits"]] == edits


PARTED: dict[str, tuple[str, str, str]] = {
    "features that are gathered without their graph": (
        "no-gradient",
        """
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    opt.zero_grad()
    ours, theirs = model(torch.randn(4, 8).cuda()), model(torch.randn(4, 8).cuda())
    parts = [torch.empty_like(theirs) for _ in range(2)]
    dist.all_gather(parts, theirs)  # cause
    loss = (ours @ torch.cat(parts).T).logsumexp(1).mean()
    loss.backward()
    opt.step()
    dist.all_gather([torch.zeros(1).cuda() for _ in range(2)], loss.view(1))
""",
        "parts[dist.get_rank()] = theirs",
    ),
    "a sampler with a seed of its own on each rank": (
        "same-rows",
        """
loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, seed=3 + local_rank))  # cause
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
"""
        + LOOP,
        "3",
    ),
    "weights that one rank alone loads": (
        "ranks-disagree",
        """
loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
if local_rank == 0:  # cause
    model.module.load_state_dict(nn.Linear(8, 8).state_dict())
"""
        + LOOP,
        "model.module.load_state_dict(nn.Linear(8, 8).state_dict())",
    ),
    "a learning rate that follows each rank's own loss": (
        "ranks-disagree",
        """
device = torch.device("cuda", local_rank)
model = DDP(nn.Linear(8, 8).to(device), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
for step in range(4):
    opt.zero_grad()
    model(torch.randn(4, 8).to(device)).pow(2).mean().backward()
    opt.step()
    plateau.step(-step * local_rank)  # cause
""",
        "figure = torch.as_tensor(-step * local_rank, dtype=torch.float32, device=device)\n"
        "    dist.all_reduce(figure)",
    ),
    "gradients that each rank changes after they were averaged": (
        "ranks-disagree",
        """
torch.manual_seed(local_rank)
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    opt.zero_grad()
    model(torch.randn(4, 8).cuda()).pow(2).mean().backward()
    for p in model.parameters():
        p.grad += 0.1 * torch.randn_like(p.grad)  # cause
    opt.step()
""",
        "dist.broadcast(p.grad, src=0)",
    ),
    "a buffer that each rank writes from its own rows": (
        "ranks-disagree",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)  # cause
        return self.body(x - self.seen)

model = DDP(Net().cuda(), device_ids=[local_rank], broadcast_buffers=False)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    opt.zero_grad()
    model(torch.randn(4, 8).cuda() + local_rank).pow(2).mean().backward()
    opt.step()
""",
        "dist.all_reduce(self.seen)\n        self.seen /= dist.get_world_size()",
    ),
    "a size that hangs on what each rank drew": (
        "ranks-disagree",
        """
import random
torch.zeros(1).cuda()

def draw():
    random.seed(local_rank)
    for step in range(6):
        size = random.choice([2, 3, 4, 5])  # cause
        figures = torch.ones(size).cuda()
        dist.all_reduce(figures)

draw()
""",
        "chosen = [size]\n        dist.broadcast_object_list(chosen, src=0)\n        size = chosen[0]",
    ),
}


@pytest.mark.parametrize("name", PARTED)
def test_what_parts_the_ranks_is_named_and_mended(rehearse_warm: Rehearse, tmp_path: Path, name: str) -> None:
    kind, code, edit = PARTED[name]
    path = tmp_path / "program.py"
    path.write_text(RANKS + code)
    report = rehearse_warm(str(path), ranks=2)
    (finding,) = report["findings"]
    assert finding["kind"] == kind, report["text"]
    assert {finding["cause"]["line"]} == marked_lines(path, "cause"), report["text"]
    assert finding["edits"][0]["text"].strip() == edit


ON_PURPOSE: dict[str, str] = {
    "figures that are summed up, and files of each rank's own": """
dist.all_reduce(torch.zeros(1).cuda())  # so that the ranks meet
files = [f"part{n}" for n in range(8)][local_rank::2]
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
total, mean, how = torch.zeros(1).cuda(), torch.zeros(1).cuda(), dist.ReduceOp.AVG
for name in files:
    opt.zero_grad()
    loss = model(torch.randn(4, 8).cuda()).pow(2).mean()
    loss.backward()
    opt.step()
    dist.all_reduce(loss.detach())
    total.zero_()
    total += loss.detach()
    dist.all_reduce(total)
    mean += loss.detach() / 2
    dist.all_reduce(mean, how)
    kept = {"loss": loss.detach().clone(), "total": total.clone()}
    for key in sorted(set(kept)):
        dist.all_reduce(kept[key])
""",
    "rows that each rank draws by chance": """
g = torch.Generator().manual_seed(local_rank)
sampler = torch.utils.data.RandomSampler(rows, replacement=True, num_samples=24, generator=g)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
"""
    + LOOP,
    "weights that are averaged every few steps": """
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
averager = PeriodicModelAverager(period=4, warmup_steps=0)
loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
model = nn.Linear(8, 8).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:
    opt.zero_grad()
    model(x.cuda()).pow(2).mean().backward()
    opt.step()
    averager.average_parameters(model.parameters())
""",
    "each rank takes its part of the batch": """
model = DDP(nn.Linear(8, 8).cuda(), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(rows, batch_size=8):
    opt.zero_grad()
    model(x.chunk(2)[local_rank].cuda()).pow(2).mean().backward()
    opt.step()
""",
    "a layer that is split by hand": """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient

torch.manual_seed(local_rank)
up, down = nn.Linear(8, 16).cuda(), nn.Linear(16, 8).cuda()
opt = torch.optim.SGD([*up.parameters(), *down.parameters()], lr=0.1)
for (x,) in DataLoader(rows, batch_size=4):
    opt.zero_grad()
    Sum.apply(down(up(x.cuda()).relu())).pow(2).mean().backward()
    opt.step()
""",
}


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_ranks_that_differ_on_purpose(rehearse_warm: Rehearse, tmp_path: Path, name: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(RANKS + ON_PURPOSE[name])
    report = rehearse_warm(str(path), ranks=2)
    assert report["findings"] == [], report["text"]
    assert report["verdict"] == "clean", report["text"]


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


LOCAL_SGD = """
model = DDP(nn.Linear(8, 8).cuda(local_rank), device_ids=[local_rank])
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(local_rank)
for step in range(6):
    x = torch.randn(4, 8).cuda()
    with model.no_sync():
        (model(x) - x).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
    if step % 3 == 2:
        for parameter in model.parameters():
            mean = parameter.detach().clone()
            dist.all_reduce(mean)
            {keep}
"""
KEPT = "parameter.data = mean / dist.get_world_size()"


@pytest.mark.parametrize(
    ("keep", "steps", "kinds"),
    [(KEPT, None, []), (KEPT, 2, []), ("del mean", None, ["ddp-bypassed"])],
    ids=["averaged", "cut off before", "averaged and thrown away"],
)
def test_weights_that_are_averaged_every_few_steps_may_differ_in_between(
    rehearse_warm: Callable[..., dict[str, Any]],
    tmp_path: Path,
    keep: str,
    steps: int | None,
    kinds: list[str],
) -> None:
    path = tmp_path / "train.py"
    path.write_text(RANKS + LOCAL_SGD.format(keep=keep))
    report = rehearse_warm(str(path), ranks=2, max_steps=steps)
    assert [finding["kind"] for finding in report["findings"]] == kinds, report["text"]
