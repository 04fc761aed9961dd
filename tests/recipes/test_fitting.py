"""The search for what fits: which layouts it executes, in which order, and what it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from trimtab.config import dump_config, load_request
from trimtab.config.schema import Config
from trimtab.errors import RequestError
from trimtab.hardware import Launcher, probe
from trimtab.hardware.catalogue import Card, cards
from trimtab.launches import Launch
from trimtab.recipes.fit_options import MARGIN, Found, Option
from trimtab.recipes.fitting import Search
from trimtab.recipes.planning import Known, know_model
from trimtab.recipes.trial_server import Answer
from trimtab.recipes.trial_step import Executed, Held, Trial
from trimtab.recipes.trials import TrialsEnded

GIB = 2**30
FLOPS_A_TOKEN = 4 * 8e9


class Scripted:
    """A machine in which need is known: weights, and for each token what is kept of it."""

    _known: ClassVar[dict[str, Known]] = {}

    def __init__(
        self, weights: float = 15.0, a_row: float = 8.0, failing: str = "", moved: float = 0.0
    ) -> None:
        """`moved`: GiB that a row's kernels without products read and write."""
        self._weights, self._a_row, self._failing, self._moved = weights, a_row, failing, moved
        self._waiting: list[tuple[int, Trial]] = []
        self.trials: list[Trial] = []

    def know(self, config: Config) -> Known:
        """Looked at once for all searches: it hangs on these settings alone."""
        asked = repr((config.recipe, config.model, config.method, config.lora))
        if asked not in self._known:
            self._known[asked] = know_model(config)
        return self._known[asked]

    def ask(self, trial: Trial) -> int:
        self.trials.append(trial)
        self._waiting.append((len(self.trials), trial))
        return len(self.trials)

    def answer(self) -> tuple[int, Answer]:
        number, trial = self._waiting.pop()
        if trial.plan.strategy == self._failing:
            return number, Answer(None, "it cannot be")
        training, length = trial.config.training, trial.config.data.max_length
        kept = 0.1 if training.gradient_checkpointing else trial.config.speed.activation_memory_budget or 1.0
        weights = self._weights * (0.3 if trial.config.model.quantize else 1.0)
        weights /= len(trial.gpus) if trial.plan.strategy in ("sharded", "split") else 1
        need = int((weights + self._a_row * kept * training.batch_size * length / 4096) * GIB)
        held = Held(peak=need, reserved=need, context=GIB // 2, kinds={})
        again = 1.5 if training.gradient_checkpointing else 1.0
        products = Launch(int(FLOPS_A_TOKEN * again * training.batch_size * length), 0, "half", "compiled")
        moves = Launch(0, int(self._moved * GIB * again * training.batch_size), "", "compiled")
        work = {"pass": {products: 1.0, moves: 1.0}}
        return number, Answer(Executed(memory={"cuda:0": held}, rows="", work=work))


@pytest.fixture(scope="module")
def config() -> Config:
    words = [
        "model=Qwen/Qwen3-8B",
        "data.source=/nowhere.jsonl",
        "data.max_length=4096",
        "training.batch_size=24",
    ]
    return load_request(None, words).config


def searched(
    config: Config, gpu: str, script: Scripted, *, counts: tuple[int, ...] = (1, 2, 4, 8), **more: Any
) -> Found:
    search = Search(config, 24, probe(Launcher(name="none")), script, lambda text: None)  # type: ignore[arg-type]
    for card in cards([gpu]):
        search.on(card, counts, **more)
    return search.found


def test_the_largest_divisor_of_the_rows_that_fits_is_found_in_few_trials(config: Config) -> None:
    script = Scripted()
    best = searched(config, "H200", script).best
    assert best is not None
    # 132.8 GiB may be used: (132.8 - 0.5 - 15) / 8 = 14 rows, of which 12 divide the 24 of a step.
    assert (best.micro_batch, best.accumulation, best.way.strategy, best.way.kept) == (12, 2, "single", "all")
    assert len(script.trials) <= 4
    assert best.config.training.gradient_accumulation_steps == 2
    assert best.config.processes == 1


def test_less_is_kept_only_where_more_does_not_fit(config: Config) -> None:
    best = searched(config, "RTX-4090", Scripted(), counts=(1,)).best
    assert best is not None
    # 21.8 GiB: the whole of a row does not fit beside the weights, half of one does.
    assert best.way.kept == "half"
    assert best.way.quantize is None
    assert best.micro_batch == 1
    assert best.config.speed.activation_memory_budget == 0.5
    checkpointed = searched(config, "RTX-4090", Scripted(a_row=20.0), counts=(1,)).best
    assert checkpointed is not None
    assert checkpointed.way.kept == "checkpointed"
    assert checkpointed.config.training.gradient_checkpointing
    assert checkpointed.micro_batch == 3


def test_what_keeps_less_is_not_executed_where_all_rows_at_once_would_be_no_faster(config: Config) -> None:
    # By their products alone twice as many rows in a pass would be worth a try.
    script = Scripted(moved=1000.0)
    best = searched(config, "H200", script).best
    assert best is not None
    assert (best.micro_batch, best.way.kept) == (12, "all")
    assert not any(trial.config.speed.activation_memory_budget for trial in script.trials)
    assert not any(trial.config.training.gradient_checkpointing for trial in script.trials)


def test_four_bits_come_before_more_gpus_and_shorter_rows_last(config: Config) -> None:
    packed = searched(config, "RTX-3060", Scripted()).best
    assert packed is not None
    assert packed.way.quantize == "nf4"
    assert packed.way.gpus == 1
    assert packed.config.model.quantize == "nf4"
    shorter = searched(config, "RTX-3060", Scripted(a_row=100.0), counts=(1,)).best
    assert shorter is not None
    assert shorter.way.length == 2048
    assert shorter.config.data.max_length == 2048


@pytest.mark.parametrize("gpu", ["RTX-4090", "H200"])
@pytest.mark.parametrize("a_row", [1.0, 8.0, 60.0, 300.0, 1300.0, 5000.0])
def test_what_cannot_fit_by_what_was_executed_is_not_executed_and_all_else_is(
    config: Config, gpu: str, a_row: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded, script = Scripted(a_row=a_row), Scripted(a_row=a_row)
    found = searched(config, gpu, bounded)
    monkeypatch.setattr(Option, "least", lambda self, way, size: 0.0)
    every = searched(config, gpu, script)
    assert (found.best is None) == (every.best is None)
    if found.best is not None and every.best is not None:
        assert (found.best.way, found.best.micro_batch) == (every.best.way, every.best.micro_batch)
    assert len(bounded.trials) <= len(script.trials)
    if a_row >= 1300.0:
        assert len(bounded.trials) < 0.8 * len(script.trials)


def test_more_gpus_of_a_split_hold_together_what_fewer_do(config: Config) -> None:
    [option] = searched(config, "H200", Scripted(a_row=5000.0), counts=(1,)).options[:1]
    held = replace(option.held, peak=100 * GIB)
    way = replace(option.way, strategy="split", gpus=2)
    split = replace(option, way=way, held=held, micro_batch=4, at_once=180 * GIB)
    assert split.least(replace(way, gpus=4), 4) == 45 * GIB
    assert split.least(replace(way, gpus=4), 2) == 0
    assert split.least(replace(way, gpus=4, kept="half"), 4) == 0
    assert split.least(way, 2) == 25 * GIB
    assert split.least(replace(way, kept="half"), 8) == 0
    assert split.least(replace(way, length=way.length // 2), 4) == 0
    few = replace(split, way=replace(way, kept="checkpointed"))
    assert few.least(way, 8) == 100 * GIB
    assert few.least(replace(way, gpus=4, kept="checkpointed"), 8) == 0


def test_more_gpus_share_what_one_cannot_hold(config: Config) -> None:
    script = Scripted(weights=60.0)
    full = config.model_copy(update={"method": "full"})
    best = searched(full, "A100-40GB", script).best
    assert best is not None
    assert best.way.strategy == "sharded"
    assert best.way.gpus == 2
    assert best.config.sharding is True
    assert best.config.processes == 2
    split = searched(full, "A100-40GB", Scripted(weights=60.0, failing="sharded")).best
    assert split is not None
    assert split.way.strategy == "split"
    assert split.config.model_parallel is True


def test_up_to_a_number_of_gpus_all_counts_are_compared_and_the_fastest_is_best(config: Config) -> None:
    found = searched(config, "H200", Scripted(), counts=(1, 2, 4), all_counts=True)
    speeds = [option.tokens_a_second for option in found.in_order() if option.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert found.best is not None
    assert found.best.way.gpus == 4
    assert found.best.way.strategy == "data_parallel"
    assert {option.way.gpus for option in found.shown()} == {1, 2, 4}
    assert all(option.micro_batch * option.accumulation * option.way.ranks == 24 for option in found.options)


def test_gpus_of_one_kind_share_what_was_executed(config: Config) -> None:
    script = Scripted()
    search = Search(config, 24, probe(Launcher(name="none")), script, lambda text: None)  # type: ignore[arg-type]
    for card in cards(["H200", "H100", "H100-NVL"]):
        search.on(card, (1,))
    assert len(script.trials) <= 7
    assert {option.gpu for option in search.found.shown()} == {"H200", "H100", "H100-NVL"}


def test_nothing_that_fits_is_said_with_what_comes_nearest(config: Config) -> None:
    found = searched(config, "T4", Scripted(weights=500.0, a_row=500.0), counts=(1, 2))
    assert found.best is None
    (nearest,) = found.shown()
    assert not nearest.fits
    assert nearest.share == min(option.share for option in found.options)


def test_the_margin_is_left_free(config: Config) -> None:
    card = cards(["H200"])[0]

    def fits(capacity: float) -> bool:
        room = replace(card.accelerator, total_bytes=int(capacity * GIB), free_bytes=int(capacity * GIB))
        search = Search(
            config.model_copy(update={"method": "full"}),
            1,
            probe(Launcher(name="none")),
            Scripted(weights=40.0, a_row=0.0),  # type: ignore[arg-type]
            lambda text: None,
        )
        search.on(Card(card.key, room, card.model), (1,))
        return search.found.best is not None

    assert fits(40.51 / (1 - MARGIN))
    assert not fits(40.49 / (1 - MARGIN))


def test_apple_gpus_have_a_share_of_their_machines_memory_and_no_speed(config: Config) -> None:
    found = searched(config, "MPS-64GB", Scripted())
    assert found.best is not None
    assert found.best.capacity == 48 * GIB
    assert found.best.tokens_a_second is None
    assert found.best.config.device == "auto"
    on_cpu = config.model_copy(update={"device": "cpu"})
    best = searched(on_cpu, "MPS-64GB", Scripted()).best
    assert best is not None
    assert best.config.device == "mps"
    with pytest.raises(RequestError, match="MPS-16GB"):
        cards(["MPS-17GB"])


def test_the_answer_is_a_config_that_loads_back(config: Config, tmp_path: Any) -> None:
    best = searched(config, "RTX-3060", Scripted()).best
    assert best is not None
    file = tmp_path / "fitted.yaml"
    file.write_text(dump_config(best.config))
    assert load_request(file, []).config == best.config


def test_answers_of_a_rewarded_run_are_not_made_shorter() -> None:
    words = ["recipe=grpo", "model=smollm2", "data.source=/nowhere.jsonl", "grpo.rewards=[length]"]
    script = Scripted(weights=500.0)
    config = load_request(None, [*words, "data.max_length=2048"]).config
    assert searched(config, "T4", script, counts=(1,)).best is None
    assert {trial.config.data.max_length for trial in script.trials} == {2048}


def test_half_is_kept_only_where_layers_are_compiled(config: Config) -> None:
    found = searched(config, "V100-16GB", Scripted(weights=10.0), counts=(1,))
    assert {option.way.kept for option in found.options} == {"all", "checkpointed"}
    assert not found.failed


def test_a_layout_that_cannot_be_is_told_with_the_reason(config: Config) -> None:
    packed = config.model_copy(update={"model": config.model.model_copy(update={"quantize": "nf4"})})
    found = searched(packed, "T4", Scripted(weights=60.0), counts=(2,))
    assert any("packed weights are bytes" in why for why in found.failed.values())
    assert not any("asked for" in why for why in found.failed.values())
    uneven = searched(config, "H200", Scripted(), counts=(5,))
    assert any("cannot be shared out evenly" in why for why in uneven.failed.values())


def test_what_weighs_more_than_a_gpu_is_not_executed_and_told(config: Config) -> None:
    script = Scripted()
    full = config.model_copy(update={"method": "full"})
    found = searched(full, "RTX-4090", script, counts=(1,))
    assert found.best is None
    assert not script.trials
    assert found.failed["1 × RTX-4090, whole"].startswith("weights alone take 30.5 GiB on a GPU of 23.5")


def test_shorter_rows_are_not_tried_where_the_optimizer_leaves_no_room(config: Config) -> None:
    class Adam(Scripted):
        def answer(self) -> tuple[int, Answer]:
            number, answer = super().answer()
            assert answer.executed is not None
            held = replace(
                answer.executed.memory["cuda:0"], kinds={"weights": 15 * GIB, "optimizer": 30 * GIB}
            )
            return number, Answer(replace(answer.executed, memory={"cuda:0": held}))

    script = Adam(weights=60.0)
    found = searched(config, "A100-40GB", script, counts=(1,))
    assert found.best is None
    assert {trial.config.data.max_length for trial in script.trials} == {4096}
    assert len(script.trials) == 2  # as asked, and in four bits


def test_a_process_that_ends_is_told_and_ends_the_search(config: Config) -> None:
    class Ended(Scripted):
        def answer(self) -> tuple[int, Answer]:
            raise TrialsEnded("the process that executes steps ended: killed")

    found = searched(config, "H200", Ended(), counts=(1,))
    assert found.best is None
    assert "ended: killed" in found.failed["1 × H200, whole"]


def test_many_layouts_of_one_reason_are_told_in_a_line_that_can_be_read() -> None:
    found = Found(failed={f"{n} × T4, whole": "no native bf16" for n in range(20)})
    (note,) = [one for one in found.footnotes() if "not executed" in one]
    assert note.endswith("3 × T4, whole; 16 more: no native bf16")
    assert len(found.as_dict()["not_executed"]) == 20
