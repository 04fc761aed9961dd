"""Short runs of every recipe, and a warm process that makes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_runs import Warm

from voices import voice, write_clip

REWARD = """
def vowels(completions):
    return [sum(c in "aeiou" for m in messages for c in m["content"]) for messages in completions]
"""


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    logs = tmp_path_factory.mktemp("warm")
    (logs / "killed_reward.py").write_text(REWARD)
    process = Warm(logs)
    yield process
    process.close()


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rows = tmp_path_factory.mktemp("clips"), []
    for number in range(10):
        write_clip(folder / f"{number}.wav", voice(number, 0.4, 110.0 + 20 * (number % 3)))
        rows.append({"audio": f"{number}.wav", "text": f"Thing {number}."})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder / "rows.jsonl"


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labelled") / "rows.jsonl"
    rows = [{"sentence": f"film {n} is " + ("good" if n % 2 else "bad"), "label": n % 2} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def courses(tiny_model: Path, tiny_rows: Path, labelled: Path, clips: Path) -> dict[str, list[str]]:
    """The words of a run of each recipe: chance in every step, four checkpoints of which two are kept."""
    every = [
        *("device=cpu", "monitor.progress=none", "training.max_steps=8", "training.save_steps=2"),
        *("training.eval_steps=2", "training.learning_rate=0.01", "training.save_total_limit=2"),
    ]
    language = [f"model={tiny_model}", *every]
    return {
        "sft": [
            *("recipe=sft", f"data={tiny_rows}", "training.batch_size=4", "lora.dropout=0.1"),
            *("data.eval_fraction=0.2", "data.max_rows=20", "training.group_by_length=true", *language),
        ],
        "grpo": [
            *("recipe=grpo", "data=sums", "data.max_rows=8", "reward=killed_reward:vowels"),
            *("grpo.num_generations=2", "grpo.max_completion_length=4", "data.max_length=64"),
            *("training.batch_size=4", "training.keep_best=false", *language),
        ],
        "vision": [
            *(
                "recipe=vision",
                "model=tiny-vision",
                "data=drawn-pictures",
                "data.max_rows=24",
                "data.max_length=64",
            ),
            *("training.batch_size=4", "vision.show=0", "samples.held_out=0", *every),
        ],
        "voice": [
            *(
                "recipe=voice",
                f"data={clips}",
                "training.batch_size=2",
                "voice.show=0",
                "data.eval_fraction=0.2",
            ),
            *every,
        ],
        "zeroth_order": [
            *("recipe=zeroth_order", f"data={labelled}", "training.batch_size=4", "zeroth.interval=3"),
            *("zeroth.template={sentence}; it was", 'zeroth.labels={0: " terrible", 1: " great"}', *language),
        ],
    }
