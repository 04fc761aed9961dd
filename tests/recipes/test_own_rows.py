"""A run whose settings allow rows that would not fit: the data's own decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_request
from trimtab.config.schema import Config
from trimtab.hardware import probe
from trimtab.hardware.launcher import Launcher
from trimtab.placement.sizing import DoesNotFit
from trimtab.recipes.own_rows import plan_by_own_rows
from trimtab.recipes.planning import know_model, machine_with, plan_run
from trimtab.recipes.trial_server import Answer
from trimtab.recipes.trial_step import Executed, Held, Trial
from trimtab.recipes.trials import Trials

GIB = 2**30
WORST = DoesNotFit("rows as long as the settings let them be")


class Scripted:
    """In the place of a process that executes: what a step takes by its rows' tokens."""

    def __init__(self, gib_a_token: float) -> None:
        self._takes = gib_a_token
        self.trials: list[Trial] = []

    know = staticmethod(know_model)

    def make(self, trial: Trial) -> Answer:
        self.trials.append(trial)
        tokens = sum(len(row["input_ids"]) for row in trial.rows)
        held = Held(peak=int(self._takes * tokens * GIB), reserved=int(self._takes * tokens * GIB), context=0)
        return Answer(Executed(memory=dict.fromkeys(trial.plan.memory, held), rows="rows"))


@pytest.fixture
def config(repository: Path) -> Config:
    return load_request(repository / "examples" / "sft.yaml", ["data.max_length=8000"]).config


def test_the_longest_rows_of_the_data_are_executed_together(config: Config) -> None:
    script: Any = Scripted(0.001)
    planned = plan_by_own_rows(config, script, WORST, machine_with("T4"))
    (trial,) = script.trials
    lengths = [len(row["input_ids"]) for row in trial.rows]
    assert len(lengths) == 4
    assert lengths == sorted(lengths, reverse=True)
    assert trial.config.data.max_length == lengths[0] < 8000
    assert planned.plan.memory["cuda:0"].allocated == int(0.001 * sum(lengths) * GIB)
    assert f"the data's longest have {lengths[0]:,}" in planned.plan.notes[-1]


def test_what_the_data_has_may_be_too_much_as_well(config: Config) -> None:
    script: Any = Scripted(1.0)
    with pytest.raises(DoesNotFit, match="does not fit"):
        plan_by_own_rows(config, script, WORST, machine_with("T4"))


@pytest.mark.parametrize(("file", "words"), [("sft", ["data.max_length=64"]), ("zeroth-order", [])])
def test_where_the_data_says_no_other_it_stays_refused(repository: Path, file: str, words: list[str]) -> None:
    """Its rows are as long as they may be, or other things decide how long a step's are."""
    script: Any = Scripted(0.001)
    config = load_request(repository / "examples" / f"{file}.yaml", words).config
    with pytest.raises(DoesNotFit, match="rows as long as the settings let them be"):
        plan_by_own_rows(config, script, WORST, machine_with("T4"))
    assert not script.trials


def test_processes_of_a_launcher_go_by_the_settings(config: Config) -> None:
    script: Any = Scripted(0.001)
    gpus = machine_with("2xT4").accelerators
    machine = probe(Launcher(name="torchrun", world_size=2, local_world_size=2), accelerators=gpus)
    with pytest.raises(DoesNotFit, match="rows as long"):
        plan_by_own_rows(config, script, WORST, machine)
    assert not script.trials


@pytest.mark.slow
def test_a_real_step_of_the_data_fits_where_that_of_the_settings_does_not(config: Config) -> None:
    with Trials() as trials:
        with pytest.raises(DoesNotFit) as worst:
            plan_run(config, machine_with("T4"), trials=trials)
        planned = plan_by_own_rows(config, trials, worst.value, machine_with("T4"))
    share = planned.plan.memory["cuda:0"]
    assert share.executed
    assert share.fits
    assert "the data's 4 longest rows" in planned.plan.reasons["memory"]
