"""Logs that arrive a step late say what logs at once say, under the same steps, and none is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from voice_training import plan_for, trainer_of

from trimtab.recipes.voice_trainer import VoiceTrainer
from voice_batches import rows

OF_THE_CLOCK = ("runtime", "per_second")


def told(out: Path, late: bool, **settings: Any) -> list[dict[str, Any]]:
    kind: Any = partial(VoiceTrainer, late=late)
    trainer = trainer_of(plan_for(), out, rows(8), rows(3, seed=2), kind=kind, max_steps=5, **settings)
    trainer.train()
    return [
        {name: value for name, value in line.items() if not name.endswith(OF_THE_CLOCK)}
        for line in trainer.state.log_history
    ]


@pytest.mark.parametrize("every", [1, 2])
def test_late_logs_are_those_of_their_step(tmp_path: Path, every: int) -> None:
    at_once = told(tmp_path / "once", False, logging_steps=every)
    late = told(tmp_path / "late", True, logging_steps=every)
    assert [line["step"] for line in late] == [line["step"] for line in at_once]
    assert len(late) >= 6
    for one, other in zip(late, at_once, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
