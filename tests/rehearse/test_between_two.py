"""What two ranks hand each other: a send and its receive, the parts of an exchange of all with all."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

Rehearse = Callable[..., dict[str, Any]]

BEGIN = """
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch import nn

    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
"""
PIPED = """
    net = nn.Linear(512, 512).cuda()
    for _ in range(2):
        if rank == 0:
            dist.send(net(torch.randn(ROWS, 512, device="cuda")).detach(), dst=1)
        else:
            room = torch.empty(256, 512, device="cuda", dtype=torch.TYPE)  # cause
            dist.recv(room, src=0)  # where
            net(room.float()).sum().backward()
    dist.destroy_process_group()
"""
EXPERTS = """
    net = nn.Linear(512, 512).cuda()
    torch.manual_seed(rank)
    home = torch.randint(0, world, (256,), device="cuda")
    gives = torch.bincount(home, minlength=world)
    takes = gives.clone()  # cause
    EXCHANGED
    gives, takes = gives.tolist(), takes.tolist()
    rows = torch.randn(256, 512, device="cuda")[home.argsort()]
    CALL  # where
    net(got).sum().backward()
    dist.destroy_process_group()
"""
EXCHANGED = "dist.all_to_all_single(takes, gives)"
CALLS = {
    "single": "got = rows.new_empty(sum(takes), 512); dist.all_to_all_single(got, rows, takes, gives)",
    "functional": "got = functional.all_to_all_single(rows, takes, gives, dist.group.WORLD).clone()",
    "lists": (
        "parts = [rows.new_empty(n, 512) for n in takes]; dist.all_to_all(parts, list(rows.split(gives))); "
        "got = torch.cat(parts)"
    ),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
    return path


@pytest.mark.parametrize(
    ("rows", "kind", "said"),
    [
        ("256", "bfloat16", ("sends 131072 float32", "makes room for 131072 bfloat16", "type")),
        ("255", "float32", ("sends 130560 float32", "makes room for 131072 float32", "size")),
    ],
)
@pytest.mark.parametrize("shapes", [True, False])
def test_a_message_of_another_size_or_type_than_is_awaited(
    rehearse_warm: Rehearse, tmp_path: Path, rows: str, kind: str, said: tuple[str, ...], shapes: bool
) -> None:
    path = written(tmp_path, PIPED.replace("ROWS", rows).replace("TYPE", kind))
    report = rehearse_warm(str(path), ranks=2, shapes_only=shapes, every_rank=shapes)
    (found,) = report["findings"]
    assert found["kind"] == "ranks-disagree", report["text"]
    assert found["where"]["line"] in marked_lines(path, "where")
    assert found["cause"]["line"] in marked_lines(path, "cause")
    assert "Message number 1 from rank 0 to rank 1" in found["message"]
    assert all(part in found["message"] for part in said[:2])
    assert f"of another {said[2]} than what rank 0 sends" in found["cause"]["why"]
    assert "the last collectives" not in report["text"]  # there is none


@pytest.mark.parametrize("shapes", [True, False])
def test_a_message_that_is_awaited_as_it_is_sent(
    rehearse_warm: Rehearse, tmp_path: Path, shapes: bool
) -> None:
    path = written(tmp_path, PIPED.replace("ROWS", "256").replace("TYPE", "float32"))
    report = rehearse_warm(str(path), ranks=2, shapes_only=shapes, every_rank=shapes)
    assert report["verdict"] == "clean", report["text"]


@pytest.mark.parametrize("call", [*CALLS])
def test_parts_that_nobody_gives(rehearse_warm: Rehearse, tmp_path: Path, call: str) -> None:
    path = written(tmp_path, EXPERTS.replace("EXCHANGED", "").replace("CALL", CALLS[call]))
    report = rehearse_warm(str(path), ranks=2, shapes_only=True, every_rank=True)
    (found,) = report["findings"]
    assert found["kind"] == "ranks-disagree", report["text"]
    assert "rank 0 gives rank 1" in found["message"]
    assert "exchange the counts first" in found["fix"]
    assert found["where"]["line"] in marked_lines(path, "where")
    if call != "lists":
        assert found["cause"]["line"] in marked_lines(path, "cause"), report["text"]


@pytest.mark.parametrize("call", [*CALLS])
def test_parts_whose_counts_were_exchanged(rehearse_warm: Rehearse, tmp_path: Path, call: str) -> None:
    path = written(tmp_path, EXPERTS.replace("EXCHANGED", EXCHANGED).replace("CALL", CALLS[call]))
    report = rehearse_warm(str(path), ranks=2, shapes_only=True, every_rank=True)
    assert report["verdict"] == "clean", report["text"]


def test_counts_that_shapes_do_not_have_part_nobody(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    """A router of unknown weights: what goes where is a stand-in on every rank, and no finding."""
    routed = "home = nn.Linear(512, world).cuda()(torch.randn(256, 512, device='cuda')).argmax(1)"
    text = EXPERTS.replace('home = torch.randint(0, world, (256,), device="cuda")', routed)
    path = written(tmp_path, text.replace("EXCHANGED", EXCHANGED).replace("CALL", CALLS["single"]))
    report = rehearse_warm(str(path), ranks=2, shapes_only=True, every_rank=True)
    assert report["verdict"] in ("clean", "unproven"), report["text"]
