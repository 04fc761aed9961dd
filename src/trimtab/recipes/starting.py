"""One start of a run, from its request to its entry in the record; the page of every run calls it (run.py)."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.hardware.launcher import detect_launcher
from trimtab.recipes.begun_with import GoingOn, is_folder
from trimtab.recipes.resumed_length import step_reached
from trimtab.recipes.starts import FORMAT, Start

if TYPE_CHECKING:
    from trimtab.placement import PlacementPlan
    from trimtab.recipes.recipe import Prepared


class Starting:
    """This start of a run, from the request to its entry in the record. The main process alone compares and keeps."""

    def __init__(self, config: Config, plan: PlacementPlan, checkpoint: Path | None) -> None:
        """Refuses a request that does not go on with what the checkpoint's run began with, as far as it tells that."""
        self._main = detect_launcher().rank == 0
        self._checkpoint = checkpoint
        self._now = Start.now(config, plan) if self._main else None
        self._going_on: GoingOn | None = None
        if checkpoint is not None and self._now is not None:
            self._going_on = GoingOn.of(checkpoint)
            if self._going_on is not None:
                self._going_on.check_request(self._now)

    def check_data(self, prepared: Prepared, say: Callable[[str], None]) -> None:
        """The rows are there: refuse others than those that the run began with, and tell what has changed."""
        if self._now is None:
            return
        self._now.read(prepared)
        if self._going_on is not None:
            self._going_on.check_data(self._now)
            for line in self._going_on.lines():
                say(line)
        elif self._checkpoint is not None:
            say(
                f"going on from {self._checkpoint}: nothing beside it tells what its run began with; not compared"
            )

    def check_steps(self, done: int, planned: int) -> None:
        """Refuse an end before the step that is reached, where a driver knows both before it trains."""
        if planned and done > planned:
            raise RequestError.of(
                f"training.resume: step {done} is reached already, and the run is asked to end at step {planned}",
                "a run cannot end before where it stands",
                "raise training.max_steps or training.epochs, or resume from an earlier checkpoint",
            )

    def record(self, run: Path) -> dict[str, Any]:
        """What is to be kept of it, by the main process."""
        assert self._now is not None, "the main process keeps the record"
        step = step_reached(self._checkpoint) if self._checkpoint is not None else 0
        return _starts_with(self._now, self._going_on, run, step)


def _starts_with(now: Start, going_on: GoingOn | None, run: Path, step: int) -> dict[str, Any]:
    """The content of `starts.json` once this start has begun in `run`."""
    about = {"time": round(time.time(), 3), "host": platform.node()}
    same_run = going_on is not None and is_folder(str(run), going_on.home)
    if going_on is None or not same_run:
        came_from = {"checkpoint": str(going_on.checkpoint), "step": step} if going_on is not None else {}
        began = about | came_from | now.as_dict()
        return {"format": FORMAT, "began": began, "went_on": [], "now": now.as_dict()}
    record = going_on.record
    began = record["began"] if record is not None else {"version": "earlier"} | going_on.earlier.as_dict()
    entry = about | {
        "step": step,
        "checkpoint": going_on.checkpoint.name,
        "changed": going_on.found.changed,
        "said": going_on.found.said,
    }
    went_on = [*(record["went_on"] if record is not None else []), entry]
    return {"format": FORMAT, "began": began, "went_on": went_on, "now": now.as_dict()}
