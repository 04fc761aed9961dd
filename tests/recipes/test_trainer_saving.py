"""The best checkpoint at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trimtab.recipes import trainer_saving
from trimtab.recipes.run_folder import RunFolder


@pytest.mark.parametrize(("best", "loads"), [(4, 1), (9, 0)])
def test_the_best_is_loaded_where_it_is_not_in_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int, loads: int
) -> None:
    """It is looked at in either case: the run is to end with a whole checkpoint."""
    looked: list[Path] = []
    loaded: list[int] = []
    monkeypatch.setattr(trainer_saving, "check_best", lambda place, run: looked.append(place))
    place = tmp_path / f"checkpoint-{best}"
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(best_model_checkpoint=str(place), best_global_step=best, global_step=9),
        _save_checkpoint=None,
        _load_best_model=lambda: loaded.append(best),
        _get_output_dir=None,
        add_callback=lambda callback: None,
    )
    trainer_saving.save_whole(trainer, RunFolder(tmp_path), None, print)
    trainer._load_best_model()
    assert looked == [place]
    assert len(loaded) == loads
