"""Samples with pictures: shown where they are the run's own, and said to be missing where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from trimtab.report import pictures
from trimtab.report.make import make_report

Parse = Callable[[str], Any]


def told(run: Path, *names: str, prompt: str = "how many?") -> str:
    summary = json.loads((run / "summary.json").read_text())
    sample = {"prompt": prompt, "expected": "three", "before": "<b>one", "after": "three", "pictures": names}
    summary["samples"] = [sample, {"prompt": "plain", "before": "x", "after": "y"}]
    (run / "summary.json").write_text(json.dumps(summary))
    return make_report(run).page


def drawn(run: Path, name: str) -> None:
    (run / "pictures").mkdir(exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(run / name)


def test_a_sample_shows_its_pictures_with_what_was_right(grpo_run: Path, parse: Parse) -> None:
    drawn(grpo_run, "pictures/0-0.png")
    drawn(grpo_run, "pictures/0-1.png")
    page = parse(told(grpo_run, "pictures/0-0.png", "pictures/0-1.png", prompt='how "many" <i>?'))
    assert [image["alt"] for image in page.all("img")] == ['how "many" <i>?'] * 2
    for part in ("picture", "expected", "three", "<b>one", "plain"):
        assert part in page.text


def test_what_is_not_the_runs_own_picture_is_not_shown(grpo_run: Path, parse: Parse) -> None:
    Image.new("RGB", (8, 8)).save(grpo_run.parent / "secret.png")
    (grpo_run / "pictures").mkdir()
    (grpo_run / "pictures" / "link.png").symlink_to(grpo_run.parent / "secret.png")
    (grpo_run / "pictures" / "text.png").write_text("<svg onload=alert(1)>")
    names = ["../secret.png", str(grpo_run.parent / "secret.png"), "pictures/link.png", "pictures/none.png"]
    page = parse(told(grpo_run, *names, "pictures/text.png"))
    assert not page.all("img")
    assert page.text.count("is missing") == len(names)
    assert "pictures/text.png is no picture" in page.text


def test_a_huge_picture_stays_out_of_the_page(grpo_run: Path, parse: Parse, monkeypatch: Any) -> None:
    monkeypatch.setattr(pictures, "LARGEST", 10)
    drawn(grpo_run, "pictures/0-0.png")
    page = parse(told(grpo_run, "pictures/0-0.png"))
    assert not page.all("img")
    assert "too large" in page.text
