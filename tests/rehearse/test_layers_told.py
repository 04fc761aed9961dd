"""Which layer is where, and the lines around what a rehearsal names: in its result, for a page that reads no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.diagnose.finding import Cause, Finding, Place
from trimtab.rehearse import excerpts
from trimtab.rehearse.layers import placement_of

Rehearse = Callable[..., dict[str, Any]]

SPLIT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4).to("cuda:0")
        self.blocks = nn.ModuleList(nn.Linear(4, 4).to(f"cuda:{n // 2}") for n in range(4))
        self.head = nn.Linear(4, 2).to("cuda:1")

    def forward(self, ids):
        x = self.embed(ids)
        for n, block in enumerate(self.blocks):
            x = block(x.to(f"cuda:{n // 2}"))
        return self.head(x)


def main():
    model = Net()
    model.embed(torch.zeros(1, dtype=torch.long, device="cuda:0"))  # a part by itself, before the whole
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = torch.zeros(3, dtype=torch.long)
    loss = nn.functional.cross_entropy(model(torch.zeros(3, dtype=torch.long, device="cuda:0")), labels)
    loss.backward()
    optimizer.step()


main()  # the model is gone when the program ends
"""


def test_a_result_tells_layers_and_lines(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    program = tmp_path / "split.py"
    program.write_text(SPLIT)
    told = rehearse_warm(str(program), gpus=2)
    blocks = {f"blocks.{n}": [f"cuda:{n // 2}"] for n in range(4)}
    assert told["placement"] == {"embed": ["cuda:0"], **blocks, "head": ["cuda:1"]}
    (finding,) = told["findings"]
    lines = told["sources"][finding["where"]["file"]]
    here = finding["where"]["line"]
    assert lines[str(here)].strip() == finding["where"]["code"]
    assert lines[str(here)].startswith("    loss = ")
    assert {str(here - 3), str(here + 3)} <= set(lines)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_numbered_layers_are_told_as_a_whole_and_wrappers_not_at_all() -> None:
    model = nn.Module()
    model.tower = nn.Module()
    model.tower.layers = nn.ModuleList(layer() for _ in range(2))
    model.join = nn.Linear(2, 2)
    model.act = nn.ReLU()
    model.scale = nn.Parameter(torch.ones(1))
    model.join.to("meta")
    wanted = {"tower.layers.0": ["cpu"], "tower.layers.1": ["cpu"], "join": ["meta"], "(its own)": ["cpu"]}
    assert placement_of(model) == wanted
    assert placement_of(Wrapped(Wrapped(model))) == wanted


def test_a_layer_over_two_devices_names_both() -> None:
    model = nn.ModuleList([layer(), layer()])
    model[1][0].to("meta")
    assert placement_of(model) == {"0": ["cpu"], "1": ["cpu", "meta"]}


def test_what_has_no_weights_has_no_place() -> None:
    assert placement_of(nn.ReLU()) == {}
    assert placement_of(Wrapped(nn.Linear(2, 2))) == {"": ["cpu"]}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "p.py"
    file.write_text("".join(f"line{n}\n" for n in range(1, 21)))
    return file


def test_lines_around_a_place(program: Path) -> None:
    where, cause = Place(str(program), 2, "line2"), Cause(str(program), 19, "line19", "why")
    finding = Finding("no-gradient", where=where, cause=cause)
    told = excerpts.of([finding], [], {})
    assert list(told[str(program)]) == [*map(str, range(1, 6)), *map(str, range(16, 21))]
    assert told[str(program)]["19"] == "line19"


def test_a_file_that_has_changed_is_left_out(program: Path) -> None:
    findings = [
        Finding("no-gradient", where=Place(str(program), 2, "another line")),
        Finding("no-gradient", where=Place(str(program), 99, "")),
        Finding("no-gradient", where=Place(str(program.with_name("gone.py")), 2, "x")),
    ]
    assert excerpts.of(findings, [], {}) == {}


def test_the_peak_has_its_line_too(program: Path) -> None:
    where = {"file": str(program), "line": 10, "code": "line10"}
    told = excerpts.of(
        [], [], {"cuda:0": {"at_peak": {"where": where, "inside": None}}, "cuda:1": {"at_peak": None}}
    )
    assert list(told[str(program)]) == [str(n) for n in range(7, 14)]
