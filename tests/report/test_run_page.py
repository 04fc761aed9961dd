"""The page of a run: everything is on it, nothing is made up, and no text in it is taken for markup."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.monitor.metrics import MetricsFile
from trimtab.report.layers import layers_by_device
from trimtab.report.make import make_report
from trimtab.report.run import STEPS_SHOWN, spread_out

Parse = Callable[[str], Any]


def page_of(run: Path) -> str:
    return make_report(run).page


def test_a_run_is_told_whole(grpo_run: Path, parse: Parse) -> None:
    page = parse(page_of(grpo_run))
    for part in (
        "finished: 30 of 30 steps",
        "Run my-run: grpo of model",
        "some/model",
        "62 s",
        "mean reward",
        "+1.25",
        "KL was not logged: with grpo.beta=0",
        "a GPU is there",
        "native <here>",
        "RANK is stale",
        "model.embed_tokens, model.layers.0-5",
        "model.layers.6-11, lm_head",
        "3: empty prompt (first: rows.jsonl:7)",
        "3 checkpoints saved",
        "Nothing amiss",
        "recipe: grpo",
    ):
        assert part in page.text
    order = [attrs["id"] for attrs in page.all("section") if "id" in attrs]
    assert order == ["results", "curves", "completions", "health", "plan", "data", "config"]
    assert {f"#{name}" for name in order} == {attrs["href"] for attrs in page.all("a")}


def test_curves_have_a_point_for_each_row(grpo_run: Path, parse: Parse) -> None:
    page = parse(page_of(grpo_run))
    assert page.points("Reward") == [30, 3]  # while training, and held out
    for title in ("Reward answer", "Loss", "Learning rate", "Gradient norm", "Completion length", "Entropy"):
        assert page.points(title) == [30], title
    assert page.points("Memory") == [30] * 4
    assert page.points("Busy share of each device") == [30, 30]
    assert page.points("step_time") == [30]  # among all else
    spread = [line for chart in page.charts.values() for line in chart["series"] if "low" in line]
    assert [len(line["low"]) for line in spread] == [30, 30]  # of the reward, and of its one function
    assert spread[0]["low"][9] == pytest.approx(10 / 30 - 0.2)
    assert spread[0]["high"][9] == pytest.approx(10 / 30 + 0.2)


def test_completions_are_shown_with_prompt_and_rewards_and_are_no_markup(
    grpo_run: Path, parse: Parse
) -> None:
    text = page_of(grpo_run)
    page = parse(text)  # fails on a script
    assert "<script>alert(1)</script>" in page.text
    assert (
        text.count("<script") == len(page.charts) + 2
    )  # the data of each chart, the library and what draws with it
    for part in ("2 < 3 & so?", "the last word", "0.75", "-0.5", f"{STEPS_SHOWN} of 30 logged steps"):
        assert part in page.text
    assert page.text.count("2 < 3 & so?") == STEPS_SHOWN
    assert not any("open" in attrs for attrs in page.all("details"))  # one each: a single table
    metrics = MetricsFile(grpo_run / "metrics.jsonl")
    metrics.write(31, "completions", {"samples": [{"prompt": "p", "completion": "c", "rewards": {}}] * 2})
    metrics.close()
    page = parse(page_of(grpo_run))
    assert "Step 31, 2 completions" in page.text
    assert sum("open" in attrs for attrs in page.all("details")) == 2  # the first step and the last


def test_very_long_and_unprintable_texts_are_tamed(grpo_run: Path, parse: Parse) -> None:
    metrics = MetricsFile(grpo_run / "metrics.jsonl")
    sample = {"prompt": "p\x00\x1b[2J", "completion": "x" * 50_000, "rewards": {"answer": None}}
    metrics.write(31, "completions", {"samples": [sample]})
    metrics.close()
    with (grpo_run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        line = {"step": 32, "time": 1.0, "phase": "completions", "samples": [{"completion": "\ud83d half"}]}
        file.write(json.dumps(line) + "\n")
    page = parse(page_of(grpo_run).encode("utf-8").decode("utf-8"))
    assert "46,000 more characters" not in page.text  # step 31 of 32 is not among those shown
    assert "\N{REPLACEMENT CHARACTER} half" in page.text
    (grpo_run / "metrics.jsonl").write_text(
        json.dumps({"step": 31, "time": 1.0, "phase": "completions", "samples": [sample]}) + "\n",
        encoding="utf-8",
    )
    page = parse(page_of(grpo_run))
    assert "46,000 more characters" in page.text
    assert "\x1b" not in page.text


def test_no_secret_of_the_config_reaches_the_page(grpo_run: Path) -> None:
    report = make_report(grpo_run)
    for secret in ("hunter2", "abcdef123", "a-plain-word", "hf_abcdefghijklmnop"):
        assert secret not in report.page
        assert secret not in json.dumps(report.facts)
    assert "https://(not shown)@host/rows.jsonl" in report.page


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "data.json", "metrics.jsonl", "summary.json"])
def test_what_is_missing_is_said(grpo_run: Path, parse: Parse, name: str) -> None:
    (grpo_run / name).unlink()
    report = make_report(grpo_run)
    assert f"{name} is missing" in parse(report.page).text
    assert len(report.facts["missing"]) == 1
    assert report.facts["status"] == ("unfinished" if name == "summary.json" else "finished")


def test_a_broken_file_is_named_and_the_rest_is_told(grpo_run: Path, parse: Parse) -> None:
    (grpo_run / "plan.json").write_text('{"device": "cu')
    page = parse(page_of(grpo_run))
    assert "plan.json cannot be read" in page.text
    assert page.points("Loss") == [30]


def test_what_cannot_be_read_of_a_file_is_said(grpo_run: Path, parse: Parse) -> None:
    with (grpo_run / "metrics.jsonl").open("ab") as file:
        file.write(b'half a line {"step"\n\xff\n')
    with (grpo_run / "config.yaml").open("ab") as file:
        file.write(b"note: caf\xe9\n")
    page = parse(page_of(grpo_run))
    assert "2 lines of metrics.jsonl cannot be read" in page.text
    assert "config.yaml is not all UTF-8" in page.text
    assert page.points("Loss") == [30]
    assert "note: caf\N{REPLACEMENT CHARACTER}" in page.text


def test_values_that_differ_by_rounding_alone_are_drawn(grpo_run: Path, parse: Parse) -> None:
    rows = [
        {"step": n, "time": 1.0, "phase": "train", "loss": v}
        for n, v in enumerate((93447245.27622993, 93447245.27622995))
    ]
    (grpo_run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    assert parse(page_of(grpo_run)).points("Loss") == [2]


def test_a_run_that_was_killed_or_still_goes_is_unfinished(grpo_run: Path, parse: Parse) -> None:
    (grpo_run / "summary.json").unlink()
    with (grpo_run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "time": 17672256')
    page = parse(page_of(grpo_run))
    assert "It is still going, or it was killed or failed; last written: step 30" in page.text
    assert "the last line of metrics.jsonl is cut short" in page.text
    assert page.points("Loss") == [30]


def test_a_number_that_is_not_finite_is_a_failure(grpo_run: Path, parse: Parse) -> None:
    (grpo_run / "summary.json").unlink()
    metrics = MetricsFile(grpo_run / "metrics.jsonl")
    metrics.write(31, "train", {"loss": float("nan")})
    metrics.write(31, "nonfinite", {"what": "loss", "message": "loss is nan\n  why: a rate of 10"})
    metrics.close()
    report = make_report(grpo_run)
    assert report.facts["status"] == "failed"
    page = parse(report.page)
    for part in ("failed at step 31", "why: a rate of 10", "loss was not finite in 1 row"):
        assert part in page.text
    assert page.points("Loss") == [30]
    assert "1 value not finite, and so not drawn" in page.text


def test_an_interrupted_run_that_goes_on_is_not_called_interrupted(grpo_run: Path) -> None:
    summary = json.loads((grpo_run / "summary.json").read_text())
    (grpo_run / "summary.json").write_text(json.dumps({**summary, "status": "interrupted", "steps": 30}))
    assert make_report(grpo_run).facts["status"] == "interrupted"
    metrics = MetricsFile(grpo_run / "metrics.jsonl")
    metrics.write(30, "resume", {"cut_lines": 2})
    metrics.close()
    facts = make_report(grpo_run).facts
    assert facts["status"] == "unfinished"
    assert "since it was resumed" in facts["status_line"]
    assert any("2 lines of abandoned steps cut" in event["said"] for event in facts["health"])


def test_a_stall_is_told_with_its_stacks(grpo_run: Path, parse: Parse) -> None:
    (grpo_run / "stacks.txt").write_text("MainThread:\n  File <frozen>, line 3")
    page = parse(page_of(grpo_run))
    assert "stacks.txt: nothing finished for so long" in page.text
    assert "File <frozen>, line 3" in page.text
    assert "Nothing amiss" not in page.text


def test_answers_before_are_told_also_when_there_is_none_after(grpo_run: Path, parse: Parse) -> None:
    (grpo_run / "summary.json").unlink()
    with (grpo_run / "config.yaml").open("a") as file:
        file.write("samples:\n  prompts: ['What is a trim tab?']\n")
    (grpo_run / "baseline.json").write_text('{"answers": ["A <b>small</b> surface"]}')
    page = parse(page_of(grpo_run))
    assert "What is a trim tab?" in page.text
    assert "A <b>small</b> surface" in page.text
    assert "answers" in {attrs.get("id") for attrs in page.all("section")}


def test_neighbouring_layers_share_a_name() -> None:
    device_map = {"embed": "a", "layers.0": "a", "layers.1": "a", "layers.2": "b", "norm": "b", "head": "a"}
    assert layers_by_device(device_map) == [("a", "embed, layers.0-1, head"), ("b", "layers.2, norm")]
    assert layers_by_device({"": "cpu"}) == [("cpu", "(whole model)")]
    assert layers_by_device({"0": "a", "1": "a", "2": "b"}) == [("a", "0-1"), ("b", "2")]


def test_spread_out_keeps_both_ends() -> None:
    assert spread_out([1, 2, 3], 5) == [1, 2, 3]
    assert spread_out(list(range(101)), 5) == [0, 25, 50, 75, 100]


def test_a_real_run_has_its_page(tiny_model: Path, tiny_rows: Path, tmp_path: Path, parse: Parse) -> None:
    from typer.testing import CliRunner

    from trimtab.cli import app

    run = tmp_path / "run"
    settings = {
        "model": tiny_model,
        "data": tiny_rows,
        "output_dir": run,
        "device": "cpu",
        "training.max_steps": 3,
        "training.logging_steps": 1,
        "monitor.progress": "none",
        "data.eval_fraction": 0.2,
        "data.max_length": 64,
    }
    done = CliRunner().invoke(app, ["train", *(f"{k}={v}" for k, v in settings.items())])
    assert done.exit_code == 0, done.output
    told = CliRunner().invoke(app, ["report", str(run)])
    assert told.exit_code == 0
    assert told.output.strip() == str(run / "report.html")
    page = parse((run / "report.html").read_text(encoding="utf-8"))
    assert "finished: 3 of 3 steps" in page.text
    assert "held-out loss" in page.text
    assert page.points("Loss")[0] == 3
    assert "is missing" not in page.text
    # The page belongs to the run: one that replaces it takes it away.
    again = CliRunner().invoke(app, ["train", *(f"{k}={v}" for k, v in settings.items()), "overwrite=true"])
    assert again.exit_code == 0, again.output
    assert not (run / "report.html").exists()


def test_a_run_that_failed_tells_why_and_is_not_called_failed_once_it_goes_on(
    grpo_run: Path, parse: Parse
) -> None:
    summary = {
        "status": "failed",
        "recipe": "grpo",
        "error": {"kind": "RewardError", "message": "reward x raised\n  completion: <b> hf_abcdefghijklmnop"},
        "rank": 1,
        "steps": 30,
        "planned_steps": 40,
        "checkpoint": "checkpoints/checkpoint-20",
        "ended": time.time() + 3600,
    }
    (grpo_run / "summary.json").write_text(json.dumps(summary))
    metrics = MetricsFile(grpo_run / "metrics.jsonl")
    metrics.write(20, "resume", {"cut_lines": 0})  # before it failed
    metrics.close()
    report = make_report(grpo_run)
    assert report.facts["status"] == "failed"
    line = "failed after 30 of 40 steps: RewardError: reward x raised; training.resume=true goes on from "
    assert report.facts["status_line"] == f"{line}checkpoints/checkpoint-20"
    assert report.facts["health"][0]["said"] == "rank 1: RewardError: reward x raised"
    page = parse(report.page)
    assert "completion: <b> (not shown)" in page.text
    assert "hf_abcdefghijklmnop" not in report.page + json.dumps(report.facts)
    (grpo_run / "summary.json").write_text(json.dumps({**summary, "ended": 1.0}))
    facts = make_report(grpo_run).facts
    assert facts["status"] == "unfinished"
    assert "since it was resumed" in facts["status_line"]
    assert not [event for event in facts["health"] if event["kind"] == "fault"]
