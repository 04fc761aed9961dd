"""What the page of a rehearsal, and that of a fit, tell of a whole record; and of an older one that has less."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import records

from trimtab.report.fit import fit_page
from trimtab.report.layers import layer_map
from trimtab.report.make import make_report
from trimtab.report.rehearsal import rehearsal_page

Parse = Callable[[str], Any]


def test_memory_over_the_step_is_drawn_by_kind_with_its_peak(parse: Parse) -> None:
    told = records.rehearsal()
    page = parse(rehearsal_page(told))
    chart = page.charts["Memory over the phase “steady step” (cuda:0)"]
    assert [line["name"] for line in chart["series"]] == [
        *("weights", "gradients", "optimizer", "activations", "temporary", "workspace")
    ]  # what was never held is left out
    totals = [sum(line["values"][n] for line in chart["series"]) for n in range(len(chart["at"]))]
    peak = told["memory"]["cuda:0"]["peak_bytes"] / 2**30
    assert max(totals) == pytest.approx(peak, rel=1e-6)
    assert chart["peak"]["at"] == chart["at"][totals.index(max(totals))]
    assert chart["peak"]["text"] == f"peak {peak:.4g} GiB"
    assert [mark["name"] for mark in chart["marks"]] == ["forward", "backward", "optimizer"]
    assert [line["shade"] for line in chart["series"]] == [0, 1, 2, 3, 4, 6]
    for part in (
        "aten::_log_softmax",
        "model.lm_head",
        "torch/nn/functional.py:3462",
        "first step",
        "evaluate",
    ):
        assert part in page.text


def test_a_full_device_shows_its_capacity(parse: Parse) -> None:
    told = records.rehearsal()
    told["memory"] = {"cuda:0": {**told["memory"]["cuda:0"], "capacity_bytes": 40 * 2**30}}
    (chart,) = parse(rehearsal_page(told)).charts.values()
    assert chart["series"][-1] == {"name": "capacity", "values": [40] * 400, "level": True}


def test_findings_have_the_lines_around_them(parse: Parse) -> None:
    page = parse(rehearsal_page(records.rehearsal()))
    here = [attrs for tag, attrs in page.tags if tag == "span" and attrs.get("class") == "here"]
    assert (
        len(here) == 6
    )  # where and cause, a warning's line, both peaks once, two values that were asked for
    assert "→ 26loss" not in page.text  # the indentation that the lines share is left out, the rest stays
    assert "→ 26    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())" in page.text
    for part in ("device-mismatch (fault, 3 times)", "with this change the fault is gone", "not tried"):
        assert part in page.text


def test_layers_stand_on_their_devices(parse: Parse) -> None:
    page = parse(rehearsal_page(records.rehearsal()))
    assert "model.embed_tokens, model.layers.0-15" in page.text
    assert "model.layers.16-31, model.norm, lm_head" in page.text
    cells = [attrs for tag, attrs in page.tags if tag == "i" and "model." in (attrs.get("title") or "")]
    assert len(cells) == 2 * 34
    assert sum("on" in (attrs.get("class") or "") for attrs in cells) == 34


def test_devices_that_hold_the_same_are_one_row(parse: Parse) -> None:
    everywhere = [f"cuda:{n}" for n in range(8)]
    page = parse(layer_map({f"layers.{n}": everywhere for n in range(4)}))
    assert "cuda:0 to cuda:7, each" in page.text
    assert page.text.count("layers.0-3") == 1
    assert len(page.all("i")) == 4
    assert layer_map({}) == ""
    assert parse(layer_map({"": "cpu"})).text.count("(whole model)") == 1


def test_layers_of_a_split_with_the_same_figures_are_told_once(parse: Parse) -> None:
    told = records.rehearsal()
    one = records.device_memory(0.5)
    split = {f"cuda:{n}": copy.deepcopy(one) for n in range(4)}
    for n, device in enumerate(split.values()):
        device["at_peak"]["module"] = f"model.layers.{8 * n}.mlp"
    told["memory"] = split
    page = parse(rehearsal_page(told))
    assert list(page.charts) == ["Memory over the phase “steady step” (cuda:0 to cuda:3, each)"]
    assert "model.layers.0.mlp on cuda:0" in page.text
    split["cuda:2"]["phases"][0]["peak_bytes"] += 2**30  # this one loads more
    assert len(parse(rehearsal_page(told)).charts) == 3


def test_sentences_show_code_as_code_and_lines_read_as_they_run(parse: Parse) -> None:
    told = records.rehearsal()
    told["findings"][0]["fix"] = "Run `tower` on every rank."
    turned = "if access == \u2067'user': # \u2066admin\u2069"
    told["findings"][0]["where"] = {"file": "other.py", "line": 3, "code": turned}
    page = rehearsal_page(told)
    assert "Run <code>tower</code> on every rank." in page
    assert not set("\u2066\u2067") & set(page)
    assert "access == \N{REPLACEMENT CHARACTER}" in parse(page).text


def test_a_line_of_which_two_things_are_not_proven_is_shown_once(parse: Parse) -> None:
    told = records.rehearsal()
    line = {"file": "train.py", "line": 26, "code": "if loss.item() > 9:"}
    told["asked"] = [
        {"how": how, "op": "item", "where": line, "inside": None} for how in ("value", "decision")
    ]
    unproven = rehearsal_page(told).split("Not proven")[-1]
    assert unproven.count("train.py:26") == 1
    assert "read, decided by" in unproven


def test_values_that_nothing_hangs_on_are_not_called_unproven(parse: Parse) -> None:
    told = records.rehearsal()
    lines = [{"file": "train.py", "line": number, "code": "x"} for number in (26, 31)]
    told["asked"] = [
        {"how": how, "op": "item", "where": line, "inside": None}
        for how, line in zip(("shape", "value"), lines, strict=True)
    ] + [{"how": "watch", "op": "item", "where": None, "inside": None}]
    before, known = rehearsal_page(told).split("Not known")
    assert "train.py:26" in before.split("Not proven")[1]
    assert "train.py:31" in known
    assert "Watched by Trimtab itself, at 1 line of its own" in known
    told["asked"] = told["asked"][1:]
    assert "Not proven" not in rehearsal_page(told)


def test_an_older_record_has_a_page_too(parse: Parse) -> None:
    told = records.rehearsal()
    for name in ("placement", "sources", "collectives", "asked", "files", "beyond", "shapes_only", "notes"):
        del told[name]
    told["memory"] = {"cuda:0": {"peak_bytes": 2**30, "capacity_bytes": 2**34}}
    for finding in told["findings"]:
        del finding["tried"], finding["follows"]
    page = parse(rehearsal_page(told))
    assert not page.charts
    assert "train.py:26" in page.text
    assert "6.2%" in page.text


def test_a_lack_of_memory_is_told_with_what_was_rehearsed(parse: Parse) -> None:
    told = records.rehearsal()
    saving = {"change": "gradient checkpointing", "settings": ["training.gradient_checkpointing=true"]}
    figures = {"need_bytes": 30 * 2**30, "saved_bytes": 9 * 2**30, "fits": True}
    told["findings"][0].update({"kind": "out-of-memory", "savings": [{**saving, **figures}]})
    text = parse(rehearsal_page(told)).text
    for part in (
        "What would save memory, rehearsed",
        "gradient checkpointing",
        "30.0\N{NO-BREAK SPACE}GiB",
        "yes",
    ):
        assert part in text


def test_ranks_that_part_are_told_side_by_side(parse: Parse) -> None:
    told = {**records.rehearsal(), "collectives": records.collectives()}
    text = parse(rehearsal_page(told)).text
    for part in (
        "did not call the same",
        "1 float32",
        "402,653,184 float32",
        "Calls of rank 1",
        "allreduce × 3",
    ):
        assert part in text
    told["collectives"] = [{**told["collectives"][0], "rank": n} for n in range(4)]
    page = parse(rehearsal_page(told))
    assert "0 to 3, each" in page.text
    assert "did not call the same" not in page.text


def test_a_fit_shows_what_fits_and_that_speed_is_an_estimate(parse: Parse, tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(records.fit()))
    report = make_report(file)
    assert (report.facts["kind"], report.path) == ("fit", tmp_path / "fit.html")
    page = parse(report.page)
    for part in (
        "fits: 1 × H200, whole",
        "✓ best",
        "✗ too large",
        "15,200 tokens/s (an estimate)",
        "batch_size: 4",
    ):
        assert part in page.text
    assert "the weights alone need 61 GiB" in page.text
    (chart,) = page.charts.values()
    assert sorted(sum(v is not None for v in line["values"]) for line in chart["series"]) == [1, 1, 2, 3]
    assert [mark["name"] for mark in chart["marks"]] == ["A100-40GB: 39 GiB", "H200: 140 GiB"]
    assert "1 × H200, whole, 4 × 4,096 tokens" in chart["names"]


def test_a_fit_of_nothing_says_so(parse: Parse) -> None:
    told = {**records.fit(), "options": [], "best": None, "config": None}
    page = parse(fit_page(told))
    assert "nothing fits" in page.text
    assert "0 layouts executed" in page.text
    tight = {**records.fit(), "best": None}
    assert "nothing fits; nearest comes 1 × H200, whole, checkpointing" in parse(fit_page(tight)).text
    # Who was stopped has not tried all.
    stopped = parse(fit_page({**tight, "stopped": True})).text
    assert "nothing that was executed fits; nearest comes" in stopped
    assert "nothing fits" not in stopped
    assert page.all("section")[0]["class"] == "fault"
    assert not page.charts


def test_a_fit_that_is_not_whole_is_a_wrong_request(tmp_path: Path) -> None:
    from trimtab.errors import RequestError

    file = tmp_path / "fit.json"
    file.write_text(json.dumps({"margin": 0.05, "options": [{"gpu": "H200"}]}))
    with pytest.raises(RequestError, match="output of a fit, but not whole"):
        make_report(file)
