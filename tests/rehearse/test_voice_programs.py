"""Trainers of one's own around Higgs Audio v2, each with one fault of those that its users met, and repaired.

The line that fails is marked `# where`, a line that may be changed `# cause`: a finding has to name the one, and one of
the others. `UNSEEN` was written after the checks had been improved on the first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marks import marked_lines, named_lines

PROGRAMS = Path(__file__).parent / "voice"
Rehearse = Callable[..., dict[str, Any]]

FIRST = [
    ("batch_not_moved", "device-mismatch"),
    ("expanded_labels", "index-device"),
    ("labels_left_out", "device-mismatch"),
    ("codebook_weights", "unmoved-state"),
    ("constant_leaf", "scaler-misuse"),
    ("trainer_leaf", "scaler-misuse"),
    ("optimizer_first", "scaler-misuse"),
    ("adapter_not_trainable", "scaler-misuse"),
    ("frozen_by_name", "scaler-misuse"),
    ("all_ignored", "non-finite"),
    ("nan_steps_anyway", "scaler-misuse"),
    ("step_after_epoch", "scaler-misuse"),
    ("text_head_optimizer", "scaler-misuse"),
    ("half_adapters", "scaler-misuse"),
]
UNSEEN = [
    ("object_in_helper", "device-mismatch"),
    ("scaled_nan", "non-finite"),
    ("merged_before_training", "scaler-misuse"),
    ("loader_moved_by_name", "device-mismatch"),
]


@pytest.mark.parametrize(("name", "kind"), [*FIRST, *UNSEEN])
def test_found_with_its_cause(rehearse_warmer: Rehearse, name: str, kind: str) -> None:
    path = PROGRAMS / f"{name}.py"
    faulty = rehearse_warmer(str(path), gpus=1)
    assert faulty["verdict"] == "fault", faulty["text"]
    faults = [finding for finding in faulty["findings"] if finding["severity"] == "fault"]
    assert faults[0]["kind"] == kind, faulty["text"]
    report = {"findings": faults}
    assert faults[0]["where"]["line"] in marked_lines(path, "where"), faulty["text"]
    causes = named_lines(report, "cause")
    assert causes, faulty["text"]
    assert causes <= marked_lines(path, "cause"), faulty["text"]


FIRST_OF_ITS_KIND = {kind: name for name, kind in reversed([*FIRST, *UNSEEN])}.values()
"""Whose repaired twins are rehearsed by `make test`; the slow suite has the others."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST_OF_ITS_KIND else pytest.param(name, marks=pytest.mark.slow)
        for name, _ in [*FIRST, *UNSEEN]
    ],
)
def test_the_repaired_one_is_clean(rehearse_warmer: Rehearse, name: str) -> None:
    repaired = rehearse_warmer(str(PROGRAMS / f"{name}.py"), "fixed", gpus=1)
    assert repaired["verdict"] == "clean", repaired["text"]
    assert {finding["severity"] for finding in repaired["findings"]} <= {"warning"}, repaired["text"]
    assert "done" in repaired["stdout"]
