"""Curves: long ones are thinned without losing a peak, and what is drawn is what was logged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trimtab.report.charts import COLUMNS, thin, thin_band
from trimtab.report.curves import Panel, Series, draw, panels


def test_a_short_curve_stays_whole() -> None:
    points = [(float(n), float(n % 7)) for n in range(2 * COLUMNS)]
    assert thin(points) == points


def test_a_long_curve_keeps_its_ends_and_every_peak() -> None:
    points = [(float(n), math.sin(n / 50)) for n in range(20_000)]
    points[7_777] = (7_777.0, 100.0)
    points[7_778] = (7_778.0, -100.0)
    kept = thin(points)
    assert len(kept) <= 2 * COLUMNS + 2
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert {points[0], points[-1], points[7_777], points[7_778]} <= set(kept)


def test_a_long_band_covers_all_that_it_stands_for() -> None:
    band = [(float(n), -float(n % 11), float(n % 13)) for n in range(5_000)]
    kept = thin_band(band)
    assert len(kept) == COLUMNS
    assert min(low for _, low, _ in kept) == -10
    assert max(high for *_, high in kept) == 12


def test_a_thinned_curve_says_so(parse: Callable[[str], Any]) -> None:
    rows = [{"step": n, "phase": "train", "loss": float(n % 17)} for n in range(10_000)]
    page = parse(draw(Panel("Loss", "loss", [Series("loss", "train")]), rows))
    (count,) = page.points("Loss")
    assert count <= 2 * COLUMNS + 2
    assert f"{count:,} of 10,000 points" in page.text


def test_a_caption_says_the_last_values_and_what_a_band_is(parse: Callable[[str], Any]) -> None:
    rows = [{"step": n, "phase": "train", "reward": n / 8, "reward_std": 0.5, "loss": 1.0} for n in range(5)]
    (reward, loss, *_), _ = panels(rows)
    assert parse(draw(reward, rows)).text.count("mean ± deviation; last: 0.5") == 1
    assert parse(draw(loss, rows)).text.count("last: 1") == 1
    again = [*rows, {"step": 4, "phase": "eval", "loss": 0.25}]
    page = parse(draw(loss, again))
    assert "last: 0.25" in page.text  # of two at one step the later, not the larger
    assert page.charts["Loss"]["series"][0]["values"][-1] == 0.25
    both = Panel("Both", "", [Series("reward", "one"), Series("loss", "other")])
    assert "last: one 0.5, other 1" in parse(draw(both, rows)).text


def test_every_value_stands_in_a_table_too(parse: Callable[[str], Any]) -> None:
    rows = [{"step": n, "loss": n / 4, **({"eval_loss": 9.5} if n == 2 else {})} for n in range(1, 4)]
    page = parse(
        draw(Panel("Loss", "loss", [Series("loss", "train"), Series("eval_loss", "held out")]), rows)
    )
    assert page.charts["Loss"]["at"] == [1, 2, 3]
    assert [line["values"] for line in page.charts["Loss"]["series"]] == [
        [0.25, 0.5, 0.75],
        [None, 9.5, None],
    ]
    assert len(page.all("td")) == 9
    assert "Values in loss" in page.text
    for value in ("0.75", "9.5", "–"):
        assert value in page.text


def test_held_out_figures_join_those_of_training_or_stand_alone() -> None:
    rows = [
        {"step": 0, "eval_loss": 1.0, "eval_accuracy": 0.5, "eval_runtime": 3.0},
        {"step": 1, "loss": 1.0, "projected_gradient": -0.1, "epoch": 0.1, "strange": 4, "name": "text"},
    ]
    wanted, rest = panels(rows)
    told = {panel.title: [series.key for series in panel.series] for panel in wanted}
    assert told == {
        "Loss": ["loss", "eval_loss"],
        "Held-out accuracy": ["eval_accuracy"],
        "Projected gradient": ["projected_gradient"],
    }
    assert [panel.title for panel in rest] == ["strange"]
