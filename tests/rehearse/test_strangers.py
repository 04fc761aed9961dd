"""Programs as strangers write them about memory and ranks: what they are ready for is no fault."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

Rehearse = Callable[..., dict[str, Any]]

SEARCH = """
    import torch
    from torch import nn

    net = nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    rows = 1 << 16
    while rows:
        try:
            net(torch.randn(rows, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            break
        except HANDLER
    print("rows", rows)
"""
GOES_ON = [
    "torch.OutOfMemoryError:\n            rows //= 2",
    "RuntimeError as error:\n            if 'out of memory' in str(error):\n                rows //= 2\n"
    "            else:\n                raise",
]
STOPS = [
    "torch.OutOfMemoryError:\n            print('CUDA out of memory: take fewer rows')\n            raise",
    "ValueError:\n            rows //= 2",
]


def written(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("handler", GOES_ON)
def test_a_full_gpu_that_the_program_is_ready_for(ask: Rehearse, tmp_path: Path, handler: str) -> None:
    path = written(tmp_path, SEARCH.replace("HANDLER", handler))
    settings = {"gpus": 1, "shapes_only": True, "memory_bytes": 2 << 30}
    report = ask(str(path), ranks=None, timeout=120, settings=settings)
    assert report["findings"] == [], report["text"]
    assert report["memory"]["cuda:0"]["peak_bytes"] < 2 << 30
    assert any("the program catches that" in note for note in report["notes"])


@pytest.mark.parametrize("handler", STOPS)
def test_a_handler_that_only_says_so_saves_nothing(ask: Rehearse, tmp_path: Path, handler: str) -> None:
    path = written(tmp_path, SEARCH.replace("HANDLER", handler))
    settings = {"gpus": 1, "shapes_only": True, "memory_bytes": 2 << 30}
    report = ask(str(path), ranks=None, timeout=120, settings=settings)
    (finding,) = report["findings"]
    assert finding["kind"] == "out-of-memory"
    assert finding["lack"]["short_bytes"] > 0


def test_a_state_that_is_resumed_beside_the_one_in_use(ask: Rehearse, tmp_path: Path) -> None:
    """Within the share of the GPU that the program gives itself; the saving is rehearsed, and fits."""
    path = written(
        tmp_path,
        f"""
        import torch
        from torch import nn

        net = nn.Linear(2048, 2048, bias=False).cuda()
        optimizer = torch.optim.AdamW(net.parameters())

        def step():
            net(torch.randn(8, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        torch.save(optimizer.state_dict(), "{tmp_path}/state.pt")
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(144 * 2**20 / torch.cuda.mem_get_info()[1])
        kept = torch.load("{tmp_path}/state.pt", map_location="cuda")  # full
        optimizer.load_state_dict(kept)
        del kept
        """,
    )
    settings = {"gpus": 1, "memory_bytes": 8 << 30}
    report = ask(str(path), ranks=None, timeout=120, settings=settings, savings=True)
    (finding,) = report["findings"]
    assert (finding["kind"], finding["lack"]["phase"]) == ("out-of-memory", "resume"), report["text"]
    assert finding["where"]["line"] in marked_lines(path, "full")
    assert 0 < finding["lack"]["short_bytes"] < 64 << 20
    assert [(s["change"], s["fits"]) for s in finding["savings"]] == [
        ("a checkpoint that is loaded to the host", True)
    ]
    assert 'map_location="cpu"' in finding["fix"]


def test_blocks_that_wait_for_another_stream_leave_what_is_reserved_open(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    path = written(
        tmp_path,
        """
        import torch

        side = torch.cuda.Stream()
        for _ in range(3):
            made = torch.ones(1 << 20, device="cuda")
            with torch.cuda.stream(side):
                host = made.to("cpu", non_blocking=True)
            RECORD
        """,
    )
    text = path.read_text()
    for record, told in (("made.record_stream(side)", True), ("pass", False)):
        path.write_text(text.replace("RECORD", record))
        report = rehearse_warm(str(path))
        assert any("more may be reserved than is told" in note for note in report["notes"]) is told
        assert ("awaited_blocks" in report["memory"]["cuda:0"]) is told


SHARDED = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    net.to_empty(device="cuda")
    for weight in net.parameters():
        nn.init.normal_(weight, std=0.01)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    net(torch.randn(8, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))  # full
    dist.destroy_process_group()
"""


def test_a_sharded_model_that_is_gathered_to_be_saved(ask: Rehearse, tmp_path: Path) -> None:
    path = written(tmp_path, SHARDED)
    settings = {"gpus": 4, "shapes_only": True, "memory_bytes": 420 << 20}
    report = ask(str(path), ranks=4, timeout=120, settings=settings, savings=True)
    assert len(report["findings"]) == 1, report["text"]
    (finding,) = report["findings"]
    assert (finding["kind"], finding["lack"]["phase"]) == ("out-of-memory", "save"), report["text"]
    assert finding["where"]["line"] in marked_lines(path, "full")
    assert [(s["change"], s["fits"]) for s in finding["savings"]] == [
        ("a state that is gathered on the host", True)
    ]


def test_micro_batches_of_one_step_keep_their_losses(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    """As a pipeline does: their graphs go when the step is made."""
    path = written(
        tmp_path,
        """
        import torch
        from torch import nn

        net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(3):
            losses = []
            for part in torch.randn(8, 4, 16, device="cuda"):
                losses.append(net(part).square().mean())
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            print(torch.stack(losses).mean().item())
        """,
    )
    report = rehearse_warm(str(path))
    assert report["verdict"] == "clean", report["text"]


DDP = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def summed(value):
        dist.all_reduce(value)
        return value

    for step in range(3):
        loss = net(torch.randn(4, 8, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        AFTER
    dist.destroy_process_group()
"""
LOGGED = "if rank == 0:  # cause\n            print(summed(loss.detach().clone()))"
SAVED = "if rank == 0:  # cause\n            dist.barrier()"


@pytest.mark.parametrize("after", [LOGGED, SAVED])
def test_a_collective_of_one_rank_is_what_parts_it_from_the_others(
    rehearse_warm: Rehearse, tmp_path: Path, after: str
) -> None:
    """The others run the model meanwhile, which is no fault of theirs."""
    path = written(tmp_path, DDP.replace("AFTER", after))
    report = rehearse_warm(str(path), ranks=2)
    found = next(finding for finding in report["findings"] if finding["kind"] == "ranks-disagree")
    assert found["cause"]["line"] in marked_lines(path, "cause"), report["text"]
    assert "has run on rank 1" not in found["cause"]["why"]


def test_what_one_rank_alone_froze_is_why_its_gradients_differ(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    path = written(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        from torch import nn

        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
        if rank == 0:
            net[0].requires_grad_(False)  # cause
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3)
        for step in range(2):
            loss = net(torch.randn(4, 8, device="cuda")).square().mean()
            loss.backward()
            with dist._coalescing_manager(device=torch.device("cuda", rank)):
                for p in net.parameters():
                    if p.grad is not None:
                        dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    report = rehearse_warm(str(path), ranks=2)
    found = next(finding for finding in report["findings"] if finding["kind"] == "ranks-disagree")
    assert found["cause"]["line"] in marked_lines(path, "cause"), report["text"]
    assert "on every rank" in found["fix"]


@pytest.mark.parametrize(("rows", "standing"), [(8, True), (1 << 16, False)])
def test_a_smaller_batch_is_advised_only_where_it_can_help(
    ask: Rehearse, tmp_path: Path, rows: int, standing: bool
) -> None:
    """Weights, gradients and moments of 64 MiB each that do not fit, or rows that do not."""
    path = written(
        tmp_path,
        f"""
        import torch
        from torch import nn

        net = nn.Linear(4096, 4096, bias=False).cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            net(torch.randn({rows}, 4096, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    settings = {"gpus": 1, "shapes_only": True, "memory_bytes": (200 if standing else 1000) << 20}
    (finding,) = ask(str(path), ranks=None, timeout=120, settings=settings)["findings"]
    assert finding["kind"] == "out-of-memory"
    assert ("No smaller batch helps" in finding["fix"]) is standing, finding["fix"]


def test_a_loss_on_one_rank_and_a_count_on_the_other_are_two_things(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    after = (
        "count = torch.tensor(4, device='cuda')\n        values = [loss.detach(), count]\n"
        "        values = values[::-1] if rank else values\n        total = [summed(value) for value in values]"
    )
    report = rehearse_warm(str(written(tmp_path, DDP.replace("AFTER", after))), ranks=2)
    found = next(finding for finding in report["findings"] if finding["kind"] == "ranks-disagree")
    assert "different things" in found["cause"]["why"], report["text"]
    assert "dtype" not in found["fix"]


def test_what_a_program_calls_its_parts_steers_neither_terminal_nor_workflow(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    path = written(
        tmp_path,
        """
        import torch
        from torch import nn

        name = "<b>\\x1b[31m\\n::error::\\u202e"
        net = nn.ModuleDict({name: nn.Linear(64, 64)}).cuda()
        net[name](torch.randn(4, 64, device="cuda")).sum().backward()
        raise ValueError(name)
        """,
    )
    report = rehearse_warm(str(path))
    (finding,) = report["findings"]
    assert finding["message"] == "ValueError: <b>\x1b[31m\n::error::\u202e"
    assert r"\x1b[31m" in report["text"]
    assert not {"\x1b", "\u202e"} & set(report["text"])
    assert not any(line.lstrip().startswith("::") for line in report["text"].splitlines())


HELD = """
import sys
import torch
from torch import nn

net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8))).cuda()
torch.save({"net": net.state_dict()}, "held.pt")
kept = torch.load("held.pt", map_location=WHERE)  # cause
if GIVEN:
    net.load_state_dict(kept["net"])
opt = torch.optim.AdamW(net.parameters(), fused=True)
for _ in range(2):
    net(torch.randn(8, 4096, device="cuda")).square().mean().backward()  # where
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.parametrize("given", [True, False])
def test_a_checkpoint_that_stays_on_the_gpu_is_why_it_is_full(
    ask: Rehearse, tmp_path: Path, given: bool
) -> None:
    """What was never given to a model may be data, and is no checkpoint to let go."""
    settings = {"gpus": 1, "shapes_only": True, "memory_bytes": 5 << 29}
    path = tmp_path / "held.py"
    path.write_text(HELD.replace("WHERE", '"cuda"').replace("GIVEN", str(given)))
    (finding,) = ask(str(path), ranks=None, timeout=120, settings=settings)["findings"]
    assert finding["kind"] == "out-of-memory"
    named = finding["cause"] is not None and {finding["cause"]["line"]} == marked_lines(path, "cause")
    assert (named, "delete the name" in finding["fix"]) == (given, given), finding
    path.write_text(HELD.replace("WHERE", '"cpu"').replace("GIVEN", str(given)))
    assert ask(str(path), ranks=None, timeout=120, settings=settings)["verdict"] == "clean"


def test_a_model_that_is_too_large_as_it_is_built_is_told_nothing_of_batches(
    ask: Rehearse, tmp_path: Path
) -> None:
    path = tmp_path / "built.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "with torch.device('cuda'):\n"
        "    net = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(16))).half()\n"
        "net(torch.ones(1, 8192, device='cuda').half())\n"
    )
    settings = {"gpus": 1, "shapes_only": True, "memory_bytes": 3 << 30}
    (finding,) = ask(str(path), ranks=None, timeout=120, settings=settings)["findings"]
    assert finding["where"]["line"] == 4
    assert "There is no batch yet" in finding["fix"], finding
