"""Cells on disk, mean and spread, tables and plots; nothing that was not measured gets a figure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trimtab.bench.plots import Bars, Lines
from trimtab.bench.results import Results, shown, spread, table
from trimtab.errors import RequestError


def header(model: str = "tiny") -> dict[str, Any]:
    return {
        "benchmark": "glue+",
        "trimtab": "0",
        "torch": "0",
        "model": model,
        "model_shown": f"{model} (built in), in place of Big",
        "notes": ["tiny stands in for Big"],
        "device": "cpu",
        "device_reason": "asked for",
        "data": {"sst2": {"origin": "sample"}, "cola": {"origin": "folder"}},
    }


def point(step: int, score: float) -> dict[str, Any]:
    return {"step": step, "forwards": 10 * step, "backwards": 0, "score": score}


def cell(task: str, method: str, seed: int, score: float, **more: Any) -> dict[str, Any]:
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "status": "finished",
        "settings": {"steps": 4},
        "metrics": {"accuracy": score},
        "score": score,
        "curve": [point(4, score)] if method != "zero-shot" else [],
        "forwards": 10,
        "backwards": 0,
        "train_seconds": 2.0,
        "eval_rows": 16,
        "peak_memory_bytes": None,
        **more,
    }


@pytest.fixture
def results(tmp_path: Path) -> Results:
    results = Results.open(tmp_path / "out", header())
    for seed, score in ((0, 0.5), (1, 0.7)):
        results.add(cell("sst2", "dizo", seed, score, peak_memory_bytes=2**30 * (seed + 1)))
    results.add(cell("sst2", "zero-shot", 0, 0.55))
    results.add(cell("cola", "zero-shot", 0, math.nan))
    failed = {"task": "cola", "method": "dizo", "seed": 0, "status": "failed", "reason": "it broke"}
    results.add({**failed, "settings": {"steps": 4}})
    results.save()
    return results


def test_spread_is_the_sample_standard_deviation() -> None:
    assert spread([0.5, 0.7]) == {"mean": 0.6, "std": pytest.approx(math.sqrt(0.02)), "n": 2}
    assert spread([0.5]) == {"mean": 0.5, "std": None, "n": 1}
    assert spread([0.5, None]) == {"mean": None, "std": None, "n": 2}
    assert shown(spread([0.5, 0.7])) == "60.0 ± 14.1"
    assert shown(spread([math.nan])) == "undefined"


def test_tables_show_figures_failures_and_what_the_model_is(results: Results) -> None:
    text = (results.path / "results.md").read_text(encoding="utf-8")
    assert "> tiny stands in for Big" in text
    assert text.count("Model: tiny (built in), in place of Big.") == 2
    assert text.count("sst2 from the shipped sample (a smoke test, not a benchmark)") == 2
    assert "| dizo      | 60.0 ± 14.1 | failed    |" in text
    assert "| zero-shot | 55.0        | undefined |" in text
    assert "- cola, dizo, seed 0: it broke" in text
    assert "2.0 GiB" in text
    assert "± is the sample standard deviation (n - 1) over seeds" in text


def test_json_has_null_for_what_is_not_defined_and_nothing_for_what_failed(results: Results) -> None:
    whole = json.loads((results.path / "results.json").read_text(encoding="utf-8"))
    by_name = {(s["task"], s["method"]): s for s in whole["summary"]}
    assert by_name["cola", "zero-shot"]["score"]["mean"] is None
    broken = by_name["cola", "dizo"]
    assert broken["score"] == {"mean": None, "std": None, "n": 0}
    assert (broken["metrics"], broken["failed_seeds"]) == ({}, [0])
    assert not any("score" in c for c in whole["cells"] if c["status"] == "failed")


def test_going_on_keeps_what_is_finished_and_runs_again_what_failed(results: Results) -> None:
    again = Results.open(results.path, {**header(), "notes": [], "data": {}})
    assert again.finished("sst2", "dizo", 1, {"steps": 4})
    assert not again.finished("cola", "dizo", 0, {"steps": 4})
    assert not again.finished("sst2", "dizo", 2, {"steps": 4})
    assert again.header["notes"] == header()["notes"]
    assert set(again.header["data"]) == {"sst2", "cola"}
    with pytest.raises(RequestError, match=r"steps 4 \(now 5\)"):
        again.finished("sst2", "dizo", 1, {"steps": 5})


def test_another_model_and_other_folders_are_refused(results: Results, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="model tiny"):
        Results.open(results.path, header("other"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(RequestError, match="other things"):
        Results.open(tmp_path / "full", header())


def test_plots_hold_what_was_measured(results: Results) -> None:
    sst2, cola, memory = results.plots()
    assert isinstance(sst2, Lines)
    assert sst2.title == "sst2 — tiny — shipped sample"
    assert sst2.series == {"dizo": [(40, pytest.approx(60))]}
    assert sst2.levels == {"zero-shot": pytest.approx(55)}
    assert isinstance(cola, Lines)
    assert (cola.series, cola.levels) == ({}, {})  # one is not defined, the other failed
    assert isinstance(memory, Bars)
    assert memory.bars == {"dizo": 2.0, "zero-shot": pytest.approx(math.nan, nan_ok=True)}


def test_a_curve_is_the_mean_of_the_same_steps(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "out", header())
    results.add(cell("sst2", "mezo", 0, 0.8, curve=[point(500, 0.6), point(1000, 0.8)]))
    # Gone on with more points of the curve, which are no setting of a cell.
    results.add(cell("sst2", "mezo", 1, 0.9, curve=[point(250, 0.1), point(500, 0.7), point(1000, 0.9)]))
    assert results._curve("sst2", "mezo") == [(5000, pytest.approx(65)), (10000, pytest.approx(85))]


@pytest.mark.parametrize("content", [b"[]", b"{}", b"\xff\xfe{", b'{"task": "sst2"'])
def test_a_cell_that_is_none_is_named(results: Results, content: bytes) -> None:
    (results.path / "cells" / "odd.json").write_bytes(content)
    with pytest.raises(RequestError, match=r"odd\.json: not what a benchmark writes"):
        Results.open(results.path, header())


def test_a_folder_that_cannot_be_made_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="cannot be written to"):
        Results.open(tmp_path / "file" / "out", header())


def test_a_table_lines_up_and_escapes() -> None:
    lines = table(["a", "long head"], [["x|y", "1"]])
    assert len({len(line) for line in lines}) == 1
    assert r"x\|y" in lines[2]
