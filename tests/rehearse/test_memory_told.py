"""What a rehearsal tells of memory: kinds, phases and the line of the peak on each GPU, whatever ends the program."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

from trimtab.rehearse import memory_told

Rehearse = Callable[..., dict[str, Any]]
KINDS = {"weights", "gradients", "optimizer", "activations", "temporary", "cache", "workspace", "other"}
WEIGHTS = 4 * 4 * 512 * 512
NET = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(4)])

        def forward(self, x, past=None):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows=64):
        loss = model(torch.randn(rows, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def rehearsed(rehearse_warm: Rehearse, tmp_path: Path) -> Rehearse:
    def run(code: str, **settings: Any) -> dict[str, Any]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(NET) + textwrap.dedent(code))
        return rehearse_warm(str(path), **{"gpus": 1, **settings})

    return run


def phases(report: dict[str, Any], device: str = "cuda:0") -> dict[str, dict[str, Any]]:
    return {phase["name"]: phase for phase in report["memory"][device]["phases"]}


def test_every_phase_of_a_run_has_its_peak(rehearsed: Rehearse) -> None:
    report = rehearsed(
        """
        step()
        step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4096, 512, device="cuda"))
            model(torch.randn(2048, 512, device="cuda"), past=[torch.zeros(3)])
        torch.save(optimizer.state_dict(), "state.pt")
        optimizer.load_state_dict(torch.load("state.pt"))
        """
    )
    assert report["verdict"] == "clean", report["text"]
    found = phases(report)
    assert list(found) == ["load", "first step", "steady step", "evaluate", "generate", "save", "resume"]
    assert found["load"]["peak_bytes"] == pytest.approx(WEIGHTS, rel=0.2)
    assert found["first step"]["kinds"]["optimizer"] == 2 * found["load"]["kinds"]["weights"]
    assert found["evaluate"]["peak_bytes"] > found["generate"]["peak_bytes"] > found["save"]["peak_bytes"]
    assert found["resume"]["peak_bytes"] > found["save"]["peak_bytes"]
    assert all(set(phase["kinds"]) == KINDS for phase in found.values())
    assert all(sum(phase["kinds"].values()) == phase["peak_bytes"] for phase in found.values())
    for name in found:
        assert name in report["text"]


def test_a_state_that_is_handed_over_by_its_name_is_resumed_too(rehearsed: Rehearse) -> None:
    """As torch.distributed.checkpoint does."""
    report = rehearsed("step()\noptimizer.load_state_dict(state_dict=optimizer.state_dict())\nstep()\n")
    assert report["verdict"] == "clean", report["text"]
    assert "resume" in phases(report)


def test_a_step_behind_a_resume_is_no_first_one(rehearsed: Rehearse) -> None:
    """Its state was made before, by an optimizer that is gone; that of another one that begins anew is made by it."""
    report = rehearsed(
        """
        step(64)
        step(64)
        torch.save(optimizer.state_dict(), "state.pt")
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(torch.load("state.pt", map_location="cpu"))
        step(4096)
        """
    )
    found = phases(report)
    assert list(found) == ["load", "first step", "steady step", "save", "resume"]
    assert found["steady step"]["peak_bytes"] > found["first step"]["peak_bytes"] + 2 * WEIGHTS


def test_the_record_of_a_device_is_whole(rehearsed: Rehearse, tmp_path: Path) -> None:
    report = rehearsed("step()\nstep(8192)  # peak\n")
    told = report["memory"]["cuda:0"]
    names = {
        "capacity_bytes",
        "peak_bytes",
        "reserved_bytes",
        "context_bytes",
        "at_peak",
        "phases",
        "timeline",
    }
    assert set(told) == names
    assert told["context_bytes"] + told["reserved_bytes"] < told["capacity_bytes"]
    assert told["peak_bytes"] <= told["reserved_bytes"]
    at_peak, line = told["at_peak"], told["timeline"]
    assert set(at_peak) == {"kinds", "phase", "op", "module", "where", "inside"}
    assert at_peak["phase"] == line["phase"] == "steady step"
    assert at_peak["where"]["file"].endswith("program.py")
    assert at_peak["op"].startswith("aten::")
    assert sum(at_peak["kinds"].values()) == told["peak_bytes"]
    assert set(line["kinds"]) == KINDS
    assert all(len(series) == len(line["at"]) <= 400 for series in line["kinds"].values())
    assert max(map(sum, zip(*line["kinds"].values(), strict=True))) == told["peak_bytes"]
    assert [mark["name"] for mark in line["marks"] if mark["name"]][:2] == ["forward", "backward"]
    where = at_peak["where"]
    assert f"program.py:{where['line']}" in report["text"]


@pytest.mark.parametrize(
    ("end", "settings", "verdict"),
    [
        ("raise ValueError('no')", {}, "fault"),
        ("step(1 << 14)", {"memory_bytes": 1 << 26}, "fault"),
        ("for _ in range(9): step()", {"max_steps": 3}, "clean"),
        ("import os; os._exit(0)", {}, "clean"),
    ],
    ids=["an error", "no memory", "the steps asked for", "a hard end"],
)
def test_memory_is_told_however_the_program_ends(
    rehearsed: Rehearse, end: str, settings: dict[str, Any], verdict: str
) -> None:
    report = rehearsed(f"step()\n{end}\n", **settings)
    assert report["verdict"] == verdict, report["text"]
    assert phases(report)["first step"]["peak_bytes"] > 3 * WEIGHTS
    assert "memory" in report["text"].splitlines()


def test_a_program_on_the_cpu_has_no_table(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import torch\ntorch.ones(3, device='cpu').sum()\n")
    assert "memory" not in rehearse_warm(str(path))["text"].splitlines()


def test_two_optimizers_make_one_first_step(rehearsed: Rehearse) -> None:
    """The second one's state comes about in a first step too."""
    report = rehearsed(
        """
        other = Net().cuda()
        second = torch.optim.AdamW(other.parameters())
        for _ in range(2):
            step()
            other(torch.randn(64, 512, device="cuda")).mean().backward()
            second.step()
            second.zero_grad()
        """
    )
    assert (
        phases(report)["first step"]["kinds"]["optimizer"]
        == 4 * phases(report)["load"]["kinds"]["weights"] / 2
    )


def test_what_works_for_a_step_is_no_evaluation(rehearsed: Rehearse) -> None:
    report = rehearsed(
        """
        teacher = Net().cuda().eval().requires_grad_(False)
        loss = nn.MSELoss()
        for _ in range(2):
            rows = torch.randn(64, 512, device="cuda")
            with torch.no_grad():
                wanted = teacher(rows)
            loss(model(rows), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    assert list(phases(report)) == ["load", "first step", "steady step"]


def test_of_a_device_that_two_ranks_use_the_higher_peak_is_told(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import os
            import torch

            rows = 1 + int(os.environ["RANK"])
            held = torch.ones(rows << 20, device="cuda:0")  # made
            """
        )
    )
    report = rehearse_warm(str(path), ranks=2)
    told = report["memory"]["cuda:0"]
    assert told["peak_bytes"] == 2 << 22
    assert told["at_peak"]["where"]["line"] in marked_lines(path, "made")
    assert report["memory"]["cuda:1"]["peak_bytes"] == 0


def test_the_higher_peak_is_the_one_that_is_kept() -> None:
    low, high = {"peak_bytes": 1, "of": "a"}, {"peak_bytes": 2, "of": "b"}
    assert memory_told.joined({"cuda:0": low}, {"cuda:0": high, "cuda:1": low}) == {
        "cuda:0": high,
        "cuda:1": low,
    }
    assert memory_told.joined({"cuda:0": high}, {"cuda:0": low}) == {"cuda:0": high}
