"""Which plan stands when a formula and an executed step do not agree, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from trimtab.config import load_request
from trimtab.config.schema import Config
from trimtab.hardware import Hardware, Launcher
from trimtab.monitor.last_words import OWN_AGENT
from trimtab.placement.plan import PlacementPlan
from trimtab.placement.sizing import DoesNotFit, PlacementError
from trimtab.recipes.executed_plan import Settling
from trimtab.recipes.planning import Known, know_model, machine_with, plan_run, resolve_for
from trimtab.recipes.trial_server import Answer
from trimtab.recipes.trial_step import Executed, Held, Trial

GIB = 2**30
Need = Callable[[PlacementPlan], float | str]
"""GiB on every GPU of a plan, or why it cannot be executed."""


class Scripted:
    """In the place of a process that executes."""

    def __init__(self, need: Need) -> None:
        self._need = need
        self.plans: list[PlacementPlan] = []

    def make(self, trial: Trial) -> Answer:
        self.plans.append(trial.plan)
        found = self._need(trial.plan)
        if isinstance(found, str):
            return Answer(None, found)
        held = Held(peak=int(found * GIB), reserved=int(found * GIB), context=0, kinds={"weights": GIB})
        return Answer(Executed(memory=dict.fromkeys(trial.plan.memory, held), rows="1 row of 64 tokens"))


@pytest.fixture(scope="module")
def config() -> Config:
    words = [
        "model=Qwen/Qwen3-8B",
        "data.source=/nowhere.jsonl",
        "data.max_length=512",
        "training.batch_size=1",
    ]
    return load_request(None, words).config


@pytest.fixture(scope="module")
def known(config: Config) -> Known:
    return know_model(config)


def settled(
    config: Config, known: Known, gpus: str, need: Need, **more: Any
) -> tuple[PlacementPlan, list[PlacementPlan]]:
    script = Scripted(need)
    plan = Settling(config, machine_with(gpus), known, script).plan(**more)  # type: ignore[arg-type]
    return plan, script.plans


def test_the_executed_figure_stands_in_the_formulas_place(config: Config, known: Known) -> None:
    plan, tried = settled(config, known, "H200", lambda plan: 100.0)
    share = plan.memory["cuda:0"]
    assert share.executed
    assert share.needed == 100 * GIB
    assert share.weights == GIB
    assert share.allocated == 100 * GIB
    assert plan.reasons["memory"].startswith("executed on virtual GPUs: 2 steps, 1 row of 64 tokens")
    assert len(tried) == 1
    assert not plan.notes


def test_what_cannot_be_executed_is_estimated_and_said(config: Config, known: Known) -> None:
    plan, _ = settled(config, known, "H200", lambda plan: "its class is unknown")
    assert not plan.memory["cuda:0"].executed
    assert plan.reasons["memory"] == "estimated by formula: no step could be executed (its class is unknown)"


def test_a_model_that_fits_by_the_formula_alone_is_divided(config: Config, known: Known) -> None:
    plan, tried = settled(
        config, known, "2xRTX-4090", lambda plan: 30.0 if plan.strategy != "split" else 15.0
    )
    assert [one.strategy for one in tried] == ["data_parallel", "split"]
    assert plan.strategy == "split"
    assert "executed on virtual GPUs" in plan.reasons["strategy"]
    (note,) = plan.notes
    assert note.startswith("by the formula it fits")
    assert "executed, it does not fit (30.0 GiB)" in note


def test_a_model_that_fits_when_executed_is_not_divided(config: Config, known: Known) -> None:
    long = config.model_copy(update={"data": config.data.model_copy(update={"max_length": 8192})})
    plan, tried = settled(long, known, "2xRTX-4090", lambda plan: 20.0)
    assert [one.strategy for one in tried] == ["split", "single", "data_parallel"]
    assert plan.strategy == "data_parallel"
    assert "would have divided" in plan.notes[-1]


def test_one_gpu_that_is_too_small_is_refused_with_the_executed_figure(config: Config, known: Known) -> None:
    with pytest.raises(DoesNotFit, match=r"needs 30\.0 GiB \(executed on virtual GPUs\) and has 23\.5 GiB"):
        settled(config, known, "RTX-4090", lambda plan: 30.0)


def test_what_is_done_already_or_does_nothing_is_not_advised(config: Config, known: Known) -> None:
    def advice(gpus: str, **training: Any) -> str:
        changed = config.model_copy(update={"training": config.training.model_copy(update=training)})
        with pytest.raises(DoesNotFit) as refused:
            settled(changed, known, gpus, lambda plan: 300.0)
        return str(refused.value)

    for gpus in ("RTX-4090", "2xRTX-4090"):
        plain = advice(gpus, batch_size=2)
        assert "lower training.batch_size or" in plain
        assert "gradient_checkpointing=true" in plain
        assert "`trimtab fit` looks" in plain
        done = advice(gpus, gradient_checkpointing=True)
        assert "batch_size" not in done
        assert "gradient_checkpointing" not in done


def test_an_apple_gpu_is_planned_for_without_four_bits(config: Config) -> None:
    plan = plan_run(config, machine_with("MPS-8GB")).plan
    assert plan.device == "mps"
    (note,) = plan.notes
    assert "mps would need about" in note
    assert "nf4" not in note


def test_a_refusal_of_the_formula_is_no_last_word(config: Config, known: Known) -> None:
    long = config.model_copy(update={"data": config.data.model_copy(update={"max_length": 8192})})
    with pytest.raises(DoesNotFit, match="estimate"):
        plan_run(long, machine_with("RTX-4090"))
    plan, _ = settled(long, known, "RTX-4090", lambda plan: 20.0)
    assert plan.strategy == "single"
    assert plan.notes[-1].startswith("by the formula it does not fit")


@pytest.mark.parametrize(("enough", "strategy"), [(True, "single"), (False, "")])
def test_what_the_allocator_keeps_in_store_is_given_back_where_it_is_short(
    config: Config, known: Known, enough: bool, strategy: str
) -> None:
    """Allocated 130 GiB of an H200's 140, reserved 150: on a GPU that has no more, torch frees what it keeps."""
    trials: list[Trial] = []

    class Squeezed(Scripted):
        def make(self, trial: Trial) -> Answer:
            trials.append(trial)
            if trial.snug and not enough:
                return Answer(None, "CUDA out of memory")
            reserved = (135 if trial.snug else 150) * GIB
            held = Held(peak=130 * GIB, reserved=reserved, context=GIB)
            return Answer(Executed(memory=dict.fromkeys(trial.plan.memory, held), rows="1 row"))

    script: Any = Squeezed(lambda plan: 0.0)
    settling = Settling(config, machine_with("H200"), known, script)
    if not enough:
        with pytest.raises(DoesNotFit, match=r"needs 151\.0 GiB"):
            settling.plan()
    else:
        plan = settling.plan()
        assert plan.strategy == strategy
        assert plan.memory["cuda:0"].needed == 136 * GIB
    assert [trial.snug for trial in trials[:2]] == [False, True]


def test_a_demanded_split_that_is_too_large_is_refused(config: Config, known: Known) -> None:
    split = config.model_copy(update={"model_parallel": True})
    with pytest.raises(DoesNotFit, match="the split model does not fit"):
        settled(split, known, "2xRTX-4090", lambda plan: 30.0)


def test_train_executes_all_but_what_surely_fits(config: Config, known: Known) -> None:
    plan, tried = settled(config, known, "B200", lambda plan: 20.0, near_only=True)
    assert not tried
    assert "nothing hangs on it" in plan.reasons["memory"]
    _, tried = settled(config, known, "RTX-4090", lambda plan: 20.0, near_only=True)
    assert len(tried) == 1


def test_train_refuses_nothing_by_the_formula_however_large_it_calls_it(config: Config, known: Known) -> None:
    long = config.model_copy(update={"data": config.data.model_copy(update={"max_length": 65536})})
    formula = resolve_for(long, machine_with("RTX-4090"), known, refuses=False)
    assert formula.memory["cuda:0"].needed > 3 * formula.memory["cuda:0"].capacity
    plan, tried = settled(long, known, "RTX-4090", lambda plan: 20.0, near_only=True)
    assert len(tried) == 1
    assert plan.memory["cuda:0"].executed


def launched(hardware: Hardware, local_rank: int) -> Hardware:
    launcher = Launcher(
        name="torchrun", rank=local_rank, world_size=2, local_rank=local_rank, local_world_size=2
    )
    return replace(hardware, launcher=launcher)


def test_under_a_launcher_the_first_process_of_a_machine_executes_for_all(
    config: Config, known: Known
) -> None:
    def plan_of(rank: int, need: float) -> tuple[PlacementPlan, Scripted]:
        script = Scripted(lambda plan: need)
        machine = launched(machine_with("2xRTX-4090"), rank)
        return Settling(config, machine, known, script).plan(), script  # type: ignore[arg-type]

    first, script = plan_of(0, 20.0)
    assert first.strategy == "data_parallel"
    assert first.device == "cuda:0"
    assert first.memory["cuda:0"].executed
    assert script.plans[0].launcher == "none"
    second, script = plan_of(1, 20.0)
    assert second.strategy == first.strategy
    assert not script.plans
    assert "the first process of this machine" in second.reasons["memory"]
    with pytest.raises(DoesNotFit, match="set sharding=true"):
        plan_of(0, 30.0)


def test_what_the_starting_process_has_executed_its_ranks_do_not_refuse(
    config: Config, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = config.model_copy(
        update={"data": config.data.model_copy(update={"max_length": 8192}), "sharding": False}
    )
    monkeypatch.setenv(OWN_AGENT, "0")
    script = Scripted(lambda plan: 20.0)
    machine = launched(machine_with("2xRTX-4090"), 0)
    plan = Settling(long, machine, known, script).plan()  # type: ignore[arg-type]
    assert plan.strategy == "data_parallel"
    assert not script.plans


def test_four_bits_that_the_formula_would_shard_are_executed_whole() -> None:
    words = ["model=Qwen/Qwen3-8B", "data.source=/nowhere.jsonl", "data.max_length=8192"]
    words += ["training.batch_size=8", "model.quantize=nf4", "processes=2"]
    config = load_request(None, words).config
    known = know_model(config)
    with pytest.raises(PlacementError, match="sharded"):
        plan_run(config, machine_with("2xRTX-4090"))
    plan, _ = settled(config, known, "2xRTX-4090", lambda plan: 20.0)
    assert plan.strategy == "data_parallel"
    with pytest.raises(PlacementError, match="sharded"):
        settled(config, known, "2xRTX-4090", lambda plan: 30.0)


def test_what_is_not_executed_is_estimated() -> None:
    config = load_request(None, ["model=smollm2", "data.source=/nowhere.jsonl", "device=cpu"]).config
    plan, tried = settled(config, know_model(config), "H200", lambda plan: 1.0)
    assert not tried
    assert "only what CUDA GPUs hold" in plan.reasons["memory"]


@pytest.mark.parametrize(("gpus", "strategy"), [("RTX-4090", "single"), ("2xT4", "split")])
def test_a_rehearsal_that_an_estimate_would_refuse_tells_the_true_gpus(
    config: Config, known: Known, gpus: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_with(gpus)
    long = config.model_copy(update={"data": config.data.model_copy(update={"max_length": 16384})})
    with pytest.raises(DoesNotFit):
        resolve_for(long, machine, known)
    monkeypatch.setenv("TRIMTAB_REHEARSAL", "1")
    plan = resolve_for(long, machine, known)
    size = machine.gpus[0].total_bytes / GIB
    assert plan.strategy == strategy
    assert f"{size:.1f} of {size:.1f} GiB free" in plan.reasons["device"]
    assert f"has {size:.1f} GiB free" in plan.reasons["strategy"] or strategy == "single"
    assert {share.capacity for share in plan.memory.values()} == {machine.gpus[0].free_bytes}
    assert plan.reasons["memory"].startswith("estimated by formula: the rehearsed step")
