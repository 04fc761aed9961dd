"""`rehearse --shapes-only --every-rank`: ranks that differ in their rows, compared without values; and what is told of
the collectives of every rank."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

Rehearse = Callable[..., dict[str, Any]]

SEEING = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.parallel import DistributedDataParallel

    WIDTH = 512

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.block = nn.Linear(48, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, pixels):
            return self.block(self.patch(pixels).relu())

    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.visual = nn.Embedding(1000, WIDTH), Tower()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1000)

        def forward(self, ids, pixels=None):
            hidden = self.words(ids)
            if CONDITION:  # cause
                hidden = hidden + self.visual(torch.zeros(4, 48, device="cuda") if pixels is None else pixels).mean(0)
            return self.head(self.layer(hidden).relu())

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = Seeing().cuda()
    WRAP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        ids = torch.randint(0, 1000, (2, 8), device="cuda")
        pixels = None if rank == 0 and step == 1 else torch.randn(4, 48, device="cuda")
        nn.functional.cross_entropy(model(ids, pixels).flatten(0, 1), ids.flatten()).backward()
        AFTER
        optimizer.step()
        optimizer.zero_grad()
"""
WRAPS = {
    "fsdp2": "fully_shard(model.visual); fully_shard(model.layer); fully_shard(model)",
    "fsdp1": "model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Tower}), device_id=rank)",
    "ddp": "model = DistributedDataParallel(model, device_ids=[rank], find_unused_parameters=True)",
    "each": "",
    "flat": "",
}
AFTER = {
    "each": "[dist.all_reduce(p.grad) for p in model.parameters() if p.grad is not None]",
    "flat": (
        "grads = [p.grad.flatten() for p in model.visual.parameters() if p.grad is not None]; "
        'dist.all_reduce(torch.cat(grads) if grads else torch.zeros(1, device="cuda"))'
    ),
}


def program(folder: Path, way: str, condition: str = "pixels is not None") -> Path:
    path = folder / "program.py"
    text = SEEING.replace("CONDITION", condition).replace("WRAP", WRAPS[way])
    path.write_text(textwrap.dedent(text.replace("AFTER", AFTER.get(way, ""))))
    return path


@pytest.mark.parametrize(
    ("way", "shapes"),
    [
        *(("fsdp2", True), ("fsdp1", False), ("each", True), ("flat", False)),
        *(
            pytest.param(way, shapes, marks=pytest.mark.slow)
            for way, shapes in (("fsdp2", False), ("fsdp1", True), ("each", False), ("flat", True))
        ),
    ],
)
def test_a_tower_that_one_rank_skips_is_named(
    rehearse_warm: Rehearse, tmp_path: Path, way: str, shapes: bool
) -> None:
    path = program(tmp_path, way)
    report = rehearse_warm(str(path), ranks=2, shapes_only=shapes, every_rank=shapes)
    found = next(finding for finding in report["findings"] if finding["kind"] == "ranks-disagree")
    assert found["cause"]["line"] in marked_lines(path, "cause"), report["text"]
    assert "`visual` has run on rank 1 and not on rank 0" in found["cause"]["why"]
    assert "rank 0 calls" in found["message"]
    assert "rank 1 calls" in found["message"]
    assert "dummy input" in found["fix"]
    if way == "flat":
        assert "all_reduce of 1 float32" in found["message"]
        assert f"all_reduce of {49 * 512 + 513 * 512} float32" in found["message"]
    assert "the last collectives of each rank" in report["text"]
    assert "Traceback" not in report["stderr"]  # it would be of our own error, and of gloo's
    assert report["stderr"].count("stopped: the ranks disagree") == 2


@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "each", "flat", "ddp"])
def test_a_tower_that_every_rank_runs_parts_nobody(rehearse_warm: Rehearse, tmp_path: Path, way: str) -> None:
    condition = "pixels is not None" if way == "ddp" else "True"  # DDP looks for what was not used
    report = rehearse_warm(str(program(tmp_path, way, condition)), ranks=2, shapes_only=True, every_rank=True)
    assert report["verdict"] == "clean", report["text"]
    assert report["steps"] == 3
    first, second = (rank["calls"] for rank in report["collectives"])
    assert [{**c, "where": None} for c in first] == [{**c, "where": None} for c in second]


def test_the_collectives_of_each_rank_are_told(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    report = rehearse_warm(str(program(tmp_path, "fsdp2", "True")), ranks=2, shapes_only=True)
    (rank,) = report["collectives"]
    assert rank["rank"] == 0
    assert "rank 0 of 2 stands for all" in report["text"]
    of_step = [calls for calls in rank["calls"] if calls["step"] == 1]
    ops = {calls["op"]: calls for calls in of_step}
    assert set(ops) == {"all_gather_into_tensor", "reduce_scatter_tensor"}
    # Half of each weight is gathered once going forward and, all but the root's, once more going back.
    tower, layer, rest = 49 * 512 + 513 * 512, 513 * 512, 1000 * 512 + 513 * 1000
    gathered = sum(c["elements"] * c["count"] for c in of_step if c["op"] == "all_gather_into_tensor")
    assert gathered == (2 * tower + 2 * layer + rest) // 2
    reduced = sum(c["elements"] * c["count"] for c in of_step if c["op"] == "reduce_scatter_tensor")
    assert reduced == tower + layer + rest
    assert rank["bytes_per_step"] == 4 * (gathered + reduced)
    assert all(
        c["ranks"] == 2 and c["dtype"] == "float32" and c["bytes"] == 4 * c["elements"] for c in of_step
    )


NORM_OF_A_SHARD = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    def norm(model):
        return model[0].weight.detach().full_tensor().norm()

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.randn(4, 512, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:  # cause
                print(step, norm(model).item())

    if __name__ == "__main__":
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank())
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
        if True:
            train(fully_shard(model))
"""


def test_what_only_one_rank_gathers_is_no_module_that_another_skips(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    """The other rank has gone on to its next pass: under no condition that the first is not under as well."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(NORM_OF_A_SHARD))
    report = rehearse_warm(str(path), ranks=2, shapes_only=True, every_rank=True)
    found = next(finding for finding in report["findings"] if finding["kind"] == "ranks-disagree")
    assert found["cause"]["line"] in marked_lines(path, "cause"), report["text"]
    assert "Every rank has to call it" in found["fix"]
