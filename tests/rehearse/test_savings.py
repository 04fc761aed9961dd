"""A GPU that is too small: by how much, at which line, and what would save it, each change as it was rehearsed."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines

from trimtab.diagnose.finding import Finding, Lack
from trimtab.rehearse import savings
from trimtab.rehearse.savings import Change
from trimtab.rehearse.session import Settings
from trimtab.rehearse.shortage import measure
from trimtab.rehearse.verdict import Result

Rehearse = Callable[..., dict[str, Any]]
PROGRAM = """
    import sys
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))  # full

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(256, 8)
            self.layers = nn.ModuleList([Block() for _ in range(12)])

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if "checkpoint" in sys.argv else layer(x)
            return self.head(x)

    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = int(sys.argv[1])
    passes = 8192 // rows
    loader = DataLoader(TensorDataset(torch.randn(3 * 8192, 256)), batch_size=rows)
    for made, (batch,) in enumerate(loader, 1):
        model(batch.cuda()).square().mean().backward()
        if made % passes == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
MEMORY = 400 << 20


@pytest.fixture
def tried(ask: Rehearse, tmp_path: Path) -> Rehearse:
    """Rehearse the program on a GPU of a given size, and what would save memory where it is too small."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))

    def run(*words: str, memory: int = MEMORY) -> dict[str, Any]:
        settings = {"gpus": 1, "shapes_only": True, "memory_bytes": memory}
        return ask(str(path), *words, ranks=None, timeout=120, settings=settings, savings=True)

    return run


@pytest.mark.parametrize(("kind", "setting"), [("AdamW", "fused=True"), ("RMSprop", "foreach=False")])
def test_lists_of_all_tensors_that_are_too_much_are_gone_through_one_by_one(
    ask: Rehearse, tmp_path: Path, kind: str, setting: str
) -> None:
    path = tmp_path / "program.py"
    program = f"""
        import sys
        import torch

        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)]).cuda()
        more = {{"{setting.split("=")[0]}": {setting.split("=")[1]}}} if "changed" in sys.argv else {{}}
        optimizer = torch.optim.{kind}(model.parameters(), **more)
        for _ in range(2):
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    path.write_text(textwrap.dedent(program))
    settings = {"gpus": 1, "shapes_only": True}
    changed = ask(str(path), "changed", ranks=None, timeout=120, settings=settings)["memory"]["cuda:0"]
    # CUDA's own is a part of so small a GPU.
    settings["memory_bytes"] = (changed["reserved_bytes"] + (60 << 20)) * 8 // 7
    report = ask(str(path), ranks=None, timeout=120, settings=settings, savings=True)
    (finding,) = report["findings"]
    first, context = finding["savings"][0], report["memory"]["cuda:0"]["context_bytes"]
    assert (first["fits"], first["need_bytes"]) == (True, changed["peak_bytes"] + context)
    assert setting in finding["fix"]


@pytest.mark.slow
def test_each_saving_is_what_the_changed_program_takes(tried: Rehearse, tmp_path: Path) -> None:
    report = tried("8192")
    assert report["verdict"] == "fault"
    (finding,) = report["findings"]
    assert finding["kind"] == "out-of-memory"
    lack, told = finding["lack"], report["memory"]["cuda:0"]
    assert (lack["device"], lack["capacity_bytes"]) == ("cuda:0", MEMORY)
    assert lack["need_bytes"] == told["peak_bytes"] + told["context_bytes"]
    assert lack["short_bytes"] == lack["need_bytes"] - MEMORY > 0
    assert finding["where"]["line"] in marked_lines(tmp_path / "program.py", "full")
    assert finding["count"] == 1
    savings = {saving["change"]: saving for saving in finding["savings"]}
    assert len(savings) == 3
    for saving in savings.values():
        assert saving["saved_bytes"] == lack["need_bytes"] - saving["need_bytes"] > 0
        text = " ".join(report["text"].split())
        assert saving["change"] in text
        assert saving["how"] in text
    # Whoever takes them finds what was told.
    for words, change in (
        (("8192", "checkpoint"), "gradient checkpointing"),
        (("4096",), "half as many rows in a batch"),
        (("2048",), "a quarter of the rows in a batch"),
    ):
        taken, saving = tried(*words), savings[change]
        assert (taken["verdict"] == "clean") == saving["fits"], taken["text"]
        memory = taken["memory"]["cuda:0"]
        # What is too much may be so for want of blocks in one piece, which the finding counts in.
        need = [lacking["lack"]["need_bytes"] for lacking in taken["findings"]]
        assert saving["need_bytes"] == (need or [memory["peak_bytes"] + memory["context_bytes"]])[0]
    assert savings["a quarter of the rows in a batch"]["fits"]


def test_changes_are_taken_together_where_none_is_enough(tried: Rehearse) -> None:
    both = tried("2048", "checkpoint", memory=1 << 33)["memory"]["cuda:0"]["reserved_bytes"]
    # Of a GPU as small as this CUDA itself takes an eighth.
    report = tried("8192", memory=both * 8 // 7 + (4 << 20))
    (finding,) = report["findings"]
    first, *others = finding["savings"]
    assert first["fits"]
    assert first["change"] == "gradient checkpointing and a quarter of the rows in a batch"
    assert not any(saving["fits"] for saving in others)
    assert first["change"] in finding["fix"]


OWN_BATCHES = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8192)
    args = parser.parse_args()
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(args.batch_size, 256, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("line", "how"),
    [
        ((), "batch_size 2048 for 8192 (program.py:7)"),
        (("--batch-size", "8192"), "--batch-size 2048 for 8192"),
    ],
)
def test_rows_are_fewer_where_no_loader_makes_the_batches(
    ask: Rehearse, tmp_path: Path, line: tuple[str, ...], how: str
) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(OWN_BATCHES))
    settings = {"gpus": 1, "shapes_only": True, "memory_bytes": 144 << 20}
    report = ask(str(path), *line, ranks=None, timeout=120, settings=settings, savings=True)
    (finding,) = report["findings"]
    told = {saving["change"]: saving for saving in finding["savings"]}
    quarter = told["a quarter of the rows in a batch"]
    assert quarter["fits"], report["text"]
    assert quarter["saved_bytes"] > told["half as many rows in a batch"]["saved_bytes"] > 0
    assert how in finding["fix"]


def _result(
    need: int, *, fits: bool, steps: int = 2, ended: bool = True, kinds: tuple[str, ...] = ()
) -> Result:
    lack = Lack("cuda:0", 100, need, need - 100)
    found = [] if fits else [Finding("out-of-memory", lack=lack)]
    told = {"peak_bytes": need, "context_bytes": 0, "capacity_bytes": 100, "reserved_bytes": need}
    findings = [*found, *map(Finding, kinds)]
    return Result("clean" if fits else "fault", findings, {"cuda:0": told}, steps, 0.5, ended=ended)


@pytest.mark.parametrize(
    "trial",
    [
        _result(50, fits=True, steps=1),
        _result(50, fits=True, ended=False),
        _result(50, fits=True, kinds=("device-mismatch",)),
        _result(150, fits=False),
        _result(149, fits=False),
        None,
    ],
    ids=["fewer steps", "not ended", "another fault", "nothing saved", "next to nothing saved", "refused"],
)
def test_what_was_not_seen_to_help_is_not_told(trial: Result | None) -> None:
    result = _result(150, fits=False)
    savings.try_savings(result, [Change("a")], lambda change, seconds: trial, 100)
    assert result.findings[0].savings == []


def test_what_there_is_no_time_for_is_said() -> None:
    result = _result(150, fits=False)
    result.seconds = 20.0
    savings.try_savings(
        result, [Change("a"), Change("b")], lambda change, seconds: _result(50, fits=True), 10
    )
    assert result.findings[0].savings == []
    assert any("for want of time: a, b" in note for note in result.notes)


def test_what_was_begun_and_not_ended_in_time_is_said() -> None:
    def slow(change: Change, seconds: float) -> Result:
        time.sleep(seconds)
        return _result(50, fits=True, ended=False)

    result = _result(150, fits=False)
    result.seconds = 0.01
    savings.try_savings(result, [Change("a")], slow, 0.1)
    assert result.findings[0].savings == []
    assert any("for want of time: a" in note for note in result.notes)


def test_where_nothing_was_seen_to_fit_the_line_that_looks_further_is_told(repository: Path) -> None:
    config = str(repository / "examples" / "sft.yaml")
    settings = Settings(gpus=2, gpu_name="NVIDIA GeForce RTX 4090")
    line = savings.search_for(["A=1", config, "lora.r=4"], settings)
    assert line == f"trimtab fit {config} lora.r=4 --gpu 2xRTX-4090"
    assert savings.search_for(["train.py"], settings) == ""
    result = _result(150, fits=False)
    savings.try_savings(result, [Change("a")], lambda change, seconds: None, 100, search=line)
    assert line in result.findings[0].fix
    helped = _result(150, fits=False)
    savings.try_savings(
        helped, [Change("a", ("x=1",))], lambda change, seconds: _result(50, fits=True), 100, search=line
    )
    assert line not in helped.findings[0].fix


def test_memory_in_one_piece_is_no_fix_where_all_of_it_is_too_little() -> None:
    fix = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, then a smaller batch"
    for peak, wanted in ((150, "a smaller batch"), (90, fix)):
        finding = Finding("out-of-memory", message="GPU 0 has a total capacity of 1 GiB", fix=fix)
        told = {"peak_bytes": peak, "context_bytes": 0, "capacity_bytes": 100, "reserved_bytes": 150}
        measure([finding], {"cuda:0": {**told, "at_peak": None}})
        assert finding.fix == wanted


def test_the_settings_of_a_config_are_what_is_changed(repository: Path) -> None:
    config = str(repository / "examples" / "sft.yaml")
    found = {
        change.words: change
        for change in savings.changes_for(
            ["A=1", config, "lora.targets=all-linear"], 2, _result(150, fits=False)
        )
    }
    settings = [change.settings for change in found.values()]
    assert ("training.gradient_checkpointing=true",) in settings
    assert ("training.batch_size=2", "training.gradient_accumulation_steps=2") in settings
    assert ("training.batch_size=1", "training.gradient_accumulation_steps=4") in settings
    assert ("lora.targets=attention",) in settings
    assert ("sharding=true",) in settings
    assert not any(change.what_if for change in found.values())
    on_one = savings.changes_for(
        [config, "training.gradient_checkpointing=true", "training.batch_size=1"], 1, _result(150, fits=False)
    )
    assert [change.settings for change in on_one] == [("model.quantize=nf4",)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_config_that_does_not_fit_fits_with_a_saving_that_is_told(
    rehearse: Rehearse, ask: Rehearse, repository: Path
) -> None:
    words = [str(repository / "examples" / "sft.yaml"), "samples.prompts=[]", "samples.held_out=0"]
    words += ["training.batch_size=48"]
    # What transformers asks for before it loads is less than nothing on a GPU of less than 1.2 GiB.
    settings = {"gpus": 1, "max_steps": 2, "shapes_only": True, "memory_bytes": 2 << 30}
    report = ask(*words, ranks=None, timeout=400, settings=settings, savings=True)
    (finding,) = report["findings"]
    assert finding["kind"] == "out-of-memory", report["text"]
    assert not any("estimate" in note for note in report["notes"])
    assert any("the batch that has the most tokens" in note for note in report["notes"])
    saving = finding["savings"][0]
    assert saving["fits"], report["text"]
    again = rehearse(*words, *saving["settings"], **settings)
    assert again["verdict"] == "clean", again["text"]
