"""metrics.jsonl: valid JSON whatever the values, and one history however often a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trimtab.monitor.metrics import MetricsFile, phase_of, read_metrics


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def trained(path: Path, steps: range) -> MetricsFile:
    metrics = MetricsFile(path)
    for step in steps:
        metrics.write(step, "train", {"loss": float(step)})
    return metrics


def history(path: Path) -> list[tuple[int, str]]:
    return [(entry["step"], entry["phase"]) for entry in read_metrics(path)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    metrics.write(3, "train", {"loss": 1.5, "epoch": 0.25})
    (entry,) = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert (entry["step"], entry["phase"], entry["loss"], entry["epoch"]) == (3, "train", 1.5, 0.25)
    assert entry["time"] > 1.7e9


def test_values_that_json_has_no_number_for(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    values = {
        "loss": float("nan"),
        "norm": torch.tensor(float("inf")),
        "low": np.float32("-inf"),
        "rate": np.float64(0.5),
        "many": [1, float("nan")],
    }
    metrics.write(1, "train", values)
    entry = json.loads(metrics.path.read_text(), parse_constant=refuse)
    assert {key: entry[key] for key in values} == {
        "loss": "nan",
        "norm": "inf",
        "low": "-inf",
        "rate": 0.5,
        "many": [1, "nan"],
    }


def test_a_value_cannot_take_the_place_of_the_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'step'"):
        MetricsFile(tmp_path / "metrics.jsonl").write(1, "train", {"step": 7})


def test_resuming_cuts_the_steps_that_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trained(path, range(1, 8)).close()
    with path.open("a") as file:
        file.write('{"step": 8, "phase": "tra')  # killed in the middle of a line

    metrics = MetricsFile(path)
    assert metrics.begin(4) == 4
    metrics.write(5, "train", {"loss": 5.0})

    assert history(path) == [
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (4, "train"),
        (4, "resume"),
        (5, "train"),
    ]
    assert read_metrics(path)[4]["cut_lines"] == 4


def test_resuming_twice_from_one_checkpoint_leaves_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    trained(path, range(1, 5)).close()
    for _ in range(2):
        metrics = MetricsFile(path)
        metrics.begin(2)
        metrics.write(3, "train", {"loss": 3.0})
        metrics.close()
    steps = [step for step, phase in history(path) if phase == "train"]
    assert steps == [1, 2, 3]


def test_a_fresh_start_drops_an_older_run_but_not_its_own_first_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    older = trained(path, range(1, 3))
    older.write(0, "eval", {"eval_loss": 9.0})
    older.close()

    metrics = MetricsFile(path)
    metrics.write(0, "eval", {"eval_loss": 4.0})
    metrics.begin(0)
    metrics.write(1, "train", {"loss": 1.0})

    assert history(path) == [(0, "eval"), (1, "train")]
    assert read_metrics(path)[0]["eval_loss"] == 4.0


def test_an_evaluation_repeated_before_resuming_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write(0, "eval", {"eval_loss": 4.0})
    first.write(1, "train", {"loss": 1.0})
    first.close()

    again = MetricsFile(path)
    again.write(0, "eval", {"eval_loss": 4.0})
    again.begin(1)

    assert history(path) == [(0, "eval"), (1, "train"), (1, "resume")]


def test_appending_after_a_half_written_line_keeps_the_new_line_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "pha')
    MetricsFile(path).write(2, "eval", {"eval_loss": 1.0})
    assert history(path) == [(2, "eval")]


def test_phases_of_what_a_trainer_logs() -> None:
    assert phase_of({"loss": 1.0, "train_runtime": 2.0}) == "train"
    assert phase_of({"eval_loss": 1.0, "epoch": 1}) == "eval"
    assert phase_of({"train_runtime": 3.0, "train_loss": 1.0}) == "summary"


def test_a_file_that_is_deleted_under_a_run_is_begun_anew(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    file.write(1, "train", {"loss": 1.0})
    file.path.unlink()
    file.path.parent.rmdir()
    file.write(2, "train", {"loss": 2.0})
    file.write(3, "train", {"loss": 3.0})
    assert [line["step"] for line in read_metrics(file.path)] == [2, 3]
    file.close()
