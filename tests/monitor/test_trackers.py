"""A tracker that is not there is refused before anything is loaded."""

from __future__ import annotations

import pytest

from trimtab.errors import RequestError
from trimtab.monitor import trackers
from trimtab.monitor.trackers import check_trackers


def test_an_installed_tracker_passes() -> None:
    pytest.importorskip("tensorboard")
    check_trackers(["tensorboard"])
    check_trackers([])


def test_unknown_and_missing_trackers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RequestError, match=r"does not know this tracker[\s\S]*tensorboard, trackio, wandb, mlflow"
    ):
        check_trackers(["notebook"])
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ("no_such_package_here",))
    with pytest.raises(RequestError, match="not installed"):
        check_trackers(["wandb"])
