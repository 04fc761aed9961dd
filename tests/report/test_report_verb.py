"""`trimtab report`: what it takes, where it writes, and its exit codes; also the pages of benchmarks and rehearsals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trimtab.bench.results import Results
from trimtab.cli import app
from trimtab.diagnose.finding import Cause, Finding, Place
from trimtab.errors import RequestError
from trimtab.rehearse.verdict import Result
from trimtab.report.bench import html_of
from trimtab.report.make import make_report, write_page

Parse = Callable[[str], Any]


def report(*words: object) -> str:
    """What the verb prints; an error it raises comes through, with its exit code."""
    done = CliRunner().invoke(app, ["report", *map(str, words)])
    if isinstance(done.exception, RequestError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output.strip()


def test_the_page_goes_into_the_run_and_is_replaced(grpo_run: Path) -> None:
    page = grpo_run / "report.html"
    assert report(grpo_run) == str(page)
    before = page.read_text(encoding="utf-8")
    (grpo_run / "summary.json").unlink()
    report(grpo_run)
    after = page.read_text(encoding="utf-8")
    assert "unfinished" in after
    assert "unfinished" not in before
    assert not [file for file in grpo_run.iterdir() if file.name.startswith(".")]


def test_out_names_the_file_and_its_folder_is_made(grpo_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "pages" / "a.html"
    assert report(grpo_run, "--out", target) == str(target)
    assert target.is_file()
    assert not (grpo_run / "report.html").exists()


def test_json_tells_what_the_page_tells(grpo_run: Path) -> None:
    told = json.loads(report(grpo_run, "--json"))
    assert told["page"] == str(grpo_run / "report.html")
    assert (told["kind"], told["status"], told["recipe"], told["last_step"]) == (
        "run",
        "finished",
        "grpo",
        30,
    )
    assert told["latest"]["train"]["step"] == 30
    assert told["missing"] == []


def test_json_is_valid_whatever_the_run_wrote(grpo_run: Path) -> None:
    said = '{"status": "finished", "steps": 3, "eval_loss": {"before": NaN, "after": 1.5}, "samples": '
    (grpo_run / "summary.json").write_text(
        said + '[{"prompt": "p", "before": "\\ud83d half", "after": "é"}]}', encoding="utf-8"
    )

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    told = json.loads(report(grpo_run, "--json"), parse_constant=refuse)
    assert told["summary"]["eval_loss"] == {"before": "nan", "after": 1.5}
    assert told["summary"]["samples"][0]["before"] == "\ud83d half"
    assert "nan" in (grpo_run / "report.html").read_text(encoding="utf-8")


def test_no_file_but_a_page_is_replaced(grpo_run: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    for target in (notes, grpo_run / "config.yaml", tmp_path):
        with pytest.raises(RequestError) as error:
            report(grpo_run, "--out", target)
        assert error.value.exit_code == 2
    assert notes.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such folder or file"),
        ("folder", "not a run's folder"),
        ("not json", "not valid JSON"),
        ('{"verdict": "perhaps"}', "not the report of a rehearsal"),
        ('[{"verdict": 1}]', "not the report of a rehearsal"),
        ('{"verdict": "fault", "findings": [{"kind": "unheard-of"}]}', "not whole"),
        ('{"verdict": "clean", "findings": [], "memory": [], "steps": 0, "seconds": 0}', "not whole"),
    ],
)
def test_what_is_no_run_is_a_wrong_request(tmp_path: Path, content: str | None, said: str) -> None:
    source = tmp_path / "thing.json"
    if content == "folder":
        source.mkdir()
        (source / "letter.txt").write_text("dear reader")
    elif content is not None:
        source.write_text(content)
    with pytest.raises(RequestError, match=said) as error:
        report(source)
    assert error.value.exit_code == 2
    assert not source.with_suffix(".html").exists()


def test_a_rehearsal_gives_the_same_page_from_its_json(tmp_path: Path, parse: Parse) -> None:
    finding = Finding(
        kind="device-mismatch",
        message="a <message>",
        where=Place("train.py", 41, "loss = f(x)"),
        cause=Cause("train.py", 18, "x = torch.ones(3)", "made on cpu"),
        fix="x = x.to(device)",
        count=2,
    )
    memory = {"cuda:0": {"peak_bytes": 2**20, "capacity_bytes": 2**30}}
    result = Result("fault", [finding], memory, 3, 1.5, ["a note"], "train.py")
    file = tmp_path / "r.json"
    file.write_text(json.dumps(result.to_dict()))
    from trimtab.report.rehearsal import rehearsal_page

    assert report(file) == str(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert text == rehearsal_page(result.to_dict())
    assert "Rehearsal of train.py" in parse(text).text


def test_no_value_of_a_file_from_elsewhere_is_markup(tmp_path: Path, parse: Parse) -> None:
    evil: Any = "<script>alert(1)</script>"
    place = {"file": evil, "line": evil, "code": evil}
    tensor = {"name": evil, "device": evil, "dtype": evil, "shape": [evil], "born": place}
    finding = {
        **{"kind": "device-mismatch", "severity": "fault", "message": evil, "fix": evil, "module": evil},
        **{"where": place, "cause": {**place, "why": evil}, "tensors": [tensor]},
    }
    content = {
        **{"verdict": "fault", "findings": [finding], "steps": evil, "seconds": 1.0},
        **{"memory": {evil: {"peak_bytes": 1, "capacity_bytes": 2}}, "notes": [evil], "target": evil},
    }
    (tmp_path / "r.json").write_text(json.dumps(content))
    page = parse(make_report(tmp_path / "r.json").page)  # fails on a script
    assert page.text.count(evil) >= 10


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    header = {
        "benchmark": "glue+",
        "trimtab": "0",
        "torch": "2",
        "model": "tiny",
        "model_shown": "tiny <model>",
        "notes": ["a sample & no benchmark"],
        "device": "cpu",
        "device_reason": "asked for",
        "titles": {"sst2": "SST-2"},
        "data": {"sst2": {"origin": "sample"}},
    }
    results = Results.open(tmp_path / "glue", header)
    curve = [{"step": n, "forwards": n, "backwards": 0, "score": n / 10} for n in range(1, 6)]
    done = {
        "task": "sst2",
        "method": "mezo",
        "seed": 0,
        "status": "finished",
        "settings": {"steps": 5},
        "score": 0.5,
        "metrics": {"accuracy": 0.5},
        "eval_rows": 16,
        "forwards": 5,
        "backwards": 0,
        "train_seconds": 1.0,
        "curve": curve,
    }
    results.add(done)
    failed = {"task": "sst2", "method": "dizo", "seed": 0, "status": "failed", "reason": "it <broke>"}
    results.add({**failed, "settings": {}})
    results.save()
    return results.path


def test_a_benchmark_has_its_tables_plots_and_failures(glue: Path, parse: Parse) -> None:
    before = (glue / "results.json").read_text()
    assert report(glue) == str(glue / "report.html")
    page = parse((glue / "report.html").read_text(encoding="utf-8"))
    for part in (
        "1 of 2 cells measured, 1 failed",
        "sst2, dizo, seed 0: it <broke>",
        "a sample & no benchmark",
    ):
        assert part in page.text
    for part in ("tiny <model>", "accuracy 50.0", "GLUE+ benchmark glue"):
        assert part in page.text
    assert page.points("sst2 — tiny <model> — shipped sample") == [5]
    assert page.text.index("Results") < page.text.index("Plots") < page.text.index("Details")
    assert (glue / "results.json").read_text() == before


def test_a_benchmark_that_was_interrupted_is_not_called_clean(glue: Path, parse: Parse) -> None:
    content = json.loads((glue / "results.json").read_text())
    content["cells"] = [cell for cell in content["cells"] if cell["status"] == "finished"]
    for whole, kind in ((True, "clean"), (False, "warning")):
        content["run"]["whole"] = whole
        (glue / "results.json").write_text(json.dumps(content))
        page = parse(make_report(glue).page)
        assert page.all("section")[0]["class"] == kind
        assert ("interrupted, or still going" in page.text) is not whole


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"run": {"benchmark": "glue+"}, "cells": [{}]}', "not whole"),
        ('{"run": {"benchmark": "glue+", "model_shown": "m", "data": []}, "cells": []}', "not whole"),
        ('{"run": {"benchmark": "other"}, "cells": []}', "not the results of a benchmark"),
    ],
)
def test_results_of_something_else_are_a_wrong_request(glue: Path, content: str, said: str) -> None:
    (glue / "results.json").write_text(content)
    with pytest.raises(RequestError, match=said):
        report(glue)


@pytest.mark.parametrize("benchmark", ["memory", "speed"])
def test_memory_and_speed_have_their_pages(tmp_path: Path, parse: Parse, benchmark: str) -> None:
    header = {
        "benchmark": benchmark,
        "date": "2026-01-01",
        "command": "trimtab bench",
        "machine": "a machine",
        "device": "cpu",
        "torch": "2",
        "trimtab": "0",
        "notes": [],
        "interval": 50,
        "target": None,
    }
    cell = {
        "subject": "tiny | model",
        "batch": 2,
        "length": 8,
        "method": "mezo",
        "status": "finished",
        "peak_bytes": 2**30,
        "weights_bytes": 2**29,
        "anchor_bytes": 0,
        "weights": "fp32",
        "copies_in_a_forward": 1,
        "measured": "as it is",
        "step_seconds": [0.5],
        "bare_seconds": [0.25],
        "round_seconds": None,
        "passes": 2,
        "backwards": 0,
        "idle_steps": 0,
    }
    failed = {**cell, "method": "dizo", "status": "failed", "reason": "no room"}
    (tmp_path / "results.json").write_text(json.dumps({"run": header, "cells": [cell, failed]}))
    made = make_report(tmp_path)
    page = parse(write_page(made, None).read_text(encoding="utf-8"))
    assert "tiny | model" in page.text
    assert "no room" in page.text
    assert {"memory": "1.0 GiB", "speed": "2.00"}[benchmark] in page.text
    assert "bars" in [attrs.get("class") for attrs in page.all("figure")]
    assert "not measured" in page.text
    assert made.facts["failed"] == {"tiny | model, 2 × 8, dizo": "no room"}


def test_markdown_of_the_benchmarks_becomes_html(parse: Parse) -> None:
    text = (
        "# Title\n\n> a note\n\nWords of `code <x>`.\nTwo.\n## Part\n"
        "| a | b |\n|---|---|\n| 1 | x \\| y |\n\n- one\n- two\n"
    )
    html = "".join(html_of(text))
    page = parse(html)
    assert "Title" not in page.text
    assert [tag for tag, _ in page.tags if tag in ("h3", "td", "th", "li", "code")] == [
        *("code", "h3", "th", "th", "td", "td", "li", "li")
    ]
    assert "x | y" in page.text
    assert html.startswith("<p><strong>a note</strong></p><p>Words of <code>code &lt;x&gt;</code>.</p>")
