"""A page read back as a browser would, a real browser where there is one, and a run's folder written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import chromium
import pytest
from chromium import Browser

from trimtab.monitor.metrics import MetricsFile
from trimtab.report import inlined

VOID = {"meta", "br", "hr", "img", "link", "input"}
OURS = inlined.script_texts()
LOADS = {"src", "srcset", "data", "action", "background", "poster", "xlink:href"}


class Page(HTMLParser):
    """A page's text, tags and charts.

    Fails on a tag that is not closed in order, a script that is not ours, or anything from elsewhere.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.charts: dict[str, dict[str, Any]] = {}
        """What the script is to draw, by title."""
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        assert tag not in {"iframe", "object", "embed", "link"}, tag
        assert tag != "script" or told in ({}, {"type": "application/json"}), told
        if tag == "img":  # a picture is inside the page, and a PNG: an SVG could bring a script
            assert (told.pop("src") or "").startswith("data:image/png;base64,"), told
            assert "alt" in told
        if tag == "audio":  # and a clip is inside it as well
            assert (told.pop("src") or "").startswith("data:audio/wav;base64,"), told
            assert "controls" in told
            assert "autoplay" not in told
        assert not LOADS & set(told), told
        assert not [name for name in told if name.startswith("on")], told
        assert (told.get("href") or "#").startswith("#"), told
        self.tags.append((tag, told))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            if self.tags[-1][1]:
                chart = json.loads(data)
                self.charts[chart["title"]] = chart
            else:
                assert data in OURS, data[:200]
        elif "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    def points(self, title: str) -> list[int]:
        """How many points each line of the chart of this title has; none where there is no such chart."""
        lines = self.charts[title]["series"] if title in self.charts else []
        return [sum(value is not None for value in line["values"]) for line in lines]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of a process."""
    program = chromium.found()
    if program is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    opened = Browser(program, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture
def parse() -> Callable[[str], Page]:
    return Page


@pytest.fixture
def grpo_run(tmp_path: Path) -> Path:
    """The folder of a GRPO run on a model that is split over two devices: 30 steps, two rewards, completions."""
    run = tmp_path / "my-run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "recipe: grpo\nmodel:\n  name: some/model\n"
        "data:\n  source: https://me:hunter2@host/rows.jsonl\n"
        "  endpoint_url: https://host/x?X-Amz-Signature=abcdef123\n"
        "hf_token: a-plain-word\n"
        "grpo:\n  beta: 0.0\n  prompt: hf_abcdefghijklmnop\nmethod: lora\n",
        encoding="utf-8",
    )
    device_map = {"model.embed_tokens": "cuda:0"} | {f"model.layers.{n}": f"cuda:{n // 6}" for n in range(12)}
    write(
        run / "plan.json",
        {
            "device": "cuda:0",
            "precision": "bf16",
            "scaler": False,
            "weight_precision": "bf16",
            "strategy": "split",
            "device_map": {**device_map, "lm_head": "cuda:1"},
            "memory": {f"cuda:{n}": {"weights": 2**30, "needed": 2**31, "capacity": 2**34} for n in (0, 1)},
            "reasons": {"device": "a GPU is there", "precision": "native <here>"},
            "notes": ["RANK is stale"],
        },
    )
    write(
        run / "data.json",
        {
            "source": "rows.jsonl",
            "rows_train": 400,
            "dropped": {"empty prompt": 3},
            "first_dropped": {"empty prompt": "rows.jsonl:7"},
        },
    )
    write(
        run / "summary.json",
        {
            "status": "finished",
            "recipe": "grpo",
            "steps": 30,
            "planned_steps": 30,
            "train_seconds": 61.5,
            "rewards": {"answer": 1.0},
            "eval_loss": {"before": None, "after": None},
            "metrics": {"mean reward": {"before": 0.25, "after": 1.5}},
            "samples": [],
        },
    )
    metrics = MetricsFile(run / "metrics.jsonl")
    for step in range(1, 31):
        figures = {
            "loss": 0.1 / step,
            "grad_norm": 1.0,
            "learning_rate": 1e-4,
            "reward": step / 30,
            "reward_std": 0.2,
            "rewards/answer/mean": step / 30,
            "rewards/answer/std": 0.2,
            "completions/mean_length": 5.0,
            "entropy": 2.0,
            "step_time": 0.5,
            **{f"peak_memory_bytes/cuda:{n}": 2**30 * (n + 1) for n in (0, 1)},
            **{f"memory_bytes/cuda:{n}": 2**30 for n in (0, 1)},
            **{f"busy/cuda:{n}": 0.9 for n in (0, 1)},
        }
        metrics.write(step, "train", figures)
        said = f"<script>alert({step})</script>" if step < 30 else "the last word"
        sample = {"prompt": "2 < 3 & so?", "completion": said, "rewards": {"answer": 0.75}, "advantage": -0.5}
        metrics.write(step, "completions", {"samples": [sample]})
        if step % 10 == 0:
            metrics.write(step, "eval", {"eval_reward": step / 30})
            metrics.write(step, "save", {"checkpoint": f"checkpoint-{step}"})
    metrics.close()
    return run


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
