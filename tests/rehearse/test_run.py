"""The ways in which a rehearsed script can end, and what the verdict is then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.errors import RequestError
from trimtab.rehearse.target import parse_target

Rehearse = Callable[..., dict[str, Any]]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_the_script_sees_its_own_arguments_and_path(rehearse: Rehearse, script: Callable[[str], str]) -> None:
    path = script("import json, sys\nprint(json.dumps([sys.argv, __name__, sys.path[0], __file__]))")
    report = rehearse(path, "--gpus", "7", "-m")
    argv, name, first, file = json.loads(report["stdout"])
    assert argv == [path, "--gpus", "7", "-m"]
    assert (name, first, file) == ("__main__", str(Path(path).parent), path)
    assert (report["verdict"], report["exit"]) == ("unproven", 3)
    assert any(
        "nothing ran on a GPU" in note and "torch was not even imported" in note for note in report["notes"]
    )


AS_PYTHON = """
import dataclasses, os
@dataclasses.dataclass
class Settings:
    lr: float = 0.1
assert dataclasses.fields(Settings)[0].type is float, "annotations are not postponed"
os.chdir("/")
assert os.path.exists(__file__), __file__
"""


def test_the_script_is_compiled_and_named_as_python_does(
    rehearse: Rehearse, script: Callable[[str], str]
) -> None:
    name = Path(script(AS_PYTHON)).name  # in the working directory of the rehearsal
    assert rehearse(name)["findings"] == []


def test_gpus_that_were_asked_for_are_not_made_more(
    rehearse_warm: Rehearse, script: Callable[[str], str]
) -> None:
    path = script("import torch; print(torch.cuda.device_count())")
    assert rehearse_warm(path, ranks=2, gpus=1)["stdout"].split() == ["2", "2"]
    assert rehearse_warm(path, ranks=2, gpus=1, gpus_given=True)["stdout"].split() == ["1", "1"]


def test_an_error_without_torch(rehearse: Rehearse, script: Callable[[str], str]) -> None:
    report = rehearse(script("def f():\n    raise KeyError('text')\nf()"))
    (finding,) = report["findings"]
    assert (report["verdict"], report["exit"], finding["kind"]) == ("fault", 1, "other-error")
    assert finding["where"]["line"] == 2
    assert "KeyError: 'text'" in report["stderr"]
    assert "rehearse" not in report["stderr"], "the traceback shows the script's frames alone"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("import sys; sys.exit(0)", "unproven"),
        ("import sys; sys.exit(3)", "fault"),
        ("import sys; sys.exit('no data')", "fault"),
        ("import os; os._exit(0)", "unproven"),
        ("import os; os._exit(4)", "fault"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "unproven"),
        ("def f(:", "fault"),
    ],
)
def test_ends(rehearse: Rehearse, script: Callable[[str], str], text: str, verdict: str) -> None:
    assert rehearse(script(text))["verdict"] == verdict


@pytest.mark.parametrize("end", ["import sys; sys.exit(0)", "import os; os._exit(0)", ""])
def test_ends_of_what_ran_on_a_gpu(rehearse_warm: Rehearse, script: Callable[[str], str], end: str) -> None:
    text = "import torch\nx = torch.ones(2, device='cuda')\ndel x\ntorch.cuda.reset_peak_memory_stats()\n"
    assert rehearse_warm(script(text + end))["verdict"] == "clean"


def test_a_time_out_says_where_it_stood(rehearse: Rehearse, script: Callable[[str], str]) -> None:
    report = rehearse(script("import time\n\n\ntime.sleep(600)"), timeout=2)
    assert (report["verdict"], report["exit"]) == ("unproven", 3)
    assert any("script.py:4" in note for note in report["notes"])


MISMATCH = """
import os, torch
model = torch.nn.Linear(4, 2).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scale = torch.ones(2)
shift = torch.ones(2)
while True:
    out = model(torch.randn(3, 4, device="cuda"))
    out = out * scale
    out = out + shift
    opt.zero_grad()
    out.sum().backward()
    opt.step()
"""


def test_all_faults_counted_and_stopped_after_steps(
    rehearse_warm: Rehearse, script: Callable[[str], str]
) -> None:
    report = rehearse_warm(script(MISMATCH), max_steps=3)
    assert report["verdict"] == "fault"
    assert report["steps"] == 3
    assert [finding["where"]["line"] for finding in report["findings"]] == [9, 10], report["text"]
    assert report["findings"][1]["count"] == 3
    assert report["findings"][0]["cause"]["line"] == 5
    assert report["memory"]["cuda:0"]["peak_bytes"] > 0
    for part in ("1. device-mismatch", "says", "where", "cause", "fix", "out = out * scale", "fault: 2 in"):
        assert part in report["text"]


def test_findings_survive_a_kill(rehearse_warm: Rehearse, script: Callable[[str], str]) -> None:
    text = MISMATCH.replace("    opt.step()", "    os.kill(os.getpid(), 9)")
    report = rehearse_warm(script(text))
    assert report["verdict"] == "fault"
    assert len(report["findings"]) == 2


@pytest.mark.parametrize("words", [[], ["missing.py"], ["--unknown", "x.py"], ["-m"], ["."]])
def test_a_request_that_cannot_be_met(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        parse_target(words, scratch=tmp_path)


def test_a_torchrun_line_is_read_as_torchrun_reads_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    target = parse_target(
        ["torchrun", "--nnodes=2", "--nproc_per_node", "3", str(script), "--lr", "1"], scratch=tmp_path
    )
    assert (target.ranks, target.nodes, target.launched) == (3, 2, True)
    assert target.arguments == (str(script), "--lr", "1")
    config = tmp_path / "c.yaml"
    config.write_text("")
    assert parse_target([str(config)], scratch=tmp_path).arguments[:4] == (
        "-m",
        "trimtab",
        "train",
        str(config),
    )


def test_looking_for_torch_before_importing_it(rehearse: Rehearse, script: Callable[[str], str]) -> None:
    text = "import importlib.util as u\nassert u.find_spec('torch')\nimport torch\nprint(torch.cuda.device_count())"
    assert rehearse(script(text), gpus=2)["stdout"].strip() == "2"
