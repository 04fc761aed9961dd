"""The trainer of voices: every part weighed by its own tokens of a whole step, and told as it was computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from voice_training import adapted_model, logged, plan_for, seen, trainer_of

from trimtab.models.voice_loss import teach_voice
from trimtab.recipes.voice_trainer import VoiceTrainer
from voice_batches import Row, batch, direct, loss_of_parts, row, rows, voice_model

PARTS = ["text_loss", "audio_loss", *(f"audio_loss_{book}" for book in range(4))]


def train(out: Path, some: list[Row], held: list[Row] | None = None, **settings: Any) -> VoiceTrainer:
    trainer = trainer_of(plan_for(), out, some, held, **settings)
    trainer.train()
    return trainer


def test_accumulating_four_batches_is_one_batch_of_four(tmp_path: Path) -> None:
    some = rows(16)
    one = train(tmp_path / "one", some, per_device_train_batch_size=4)
    four = train(tmp_path / "four", some, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    for name in ("loss", *PARTS):
        assert logged(four, name) == pytest.approx(logged(one, name), rel=1e-4), name
    assert seen(four)[0] == pytest.approx(seen(one)[0], rel=1e-3, abs=1e-7)


def test_batches_of_unequal_parts_are_weighed_by_their_tokens(tmp_path: Path) -> None:
    """One row has no trained text, one no clip: a mean of means, or one count for all parts, would be another loss."""
    some = [row(4, 0, 6, 1, ends=()), row(4, 2, 2, 2), row(4, 2, 0, 3), row(4, 0, 1, 4, ends=(5, 6, 7, 8, 9))]
    plan = plan_for()
    model = adapted_model(plan)
    sums, counts = direct(model.get_base_model(), some)  # the adapters start at nought
    trainer = train(
        tmp_path, some, model=model, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=1
    )
    assert logged(trainer, "loss") == pytest.approx([loss_of_parts(sums, counts)], rel=1e-5)
    assert logged(trainer, "text_loss") == pytest.approx([sums[0] / counts[0]], rel=1e-5)
    for book in range(4):
        assert logged(trainer, f"audio_loss_{book}") == pytest.approx(
            [sums[1 + book] / counts[1 + book]], rel=1e-5
        )


def test_an_evaluation_is_the_mean_over_all_tokens_of_the_set(tmp_path: Path) -> None:
    held = [*rows(4, seed=3), row(4, 0, 9, 5, ends=(5, 6, 7, 8))]
    model = adapted_model(plan_for())
    sums, counts = direct(model.get_base_model(), held)
    trainer = train(tmp_path, rows(4), held, model=model, max_steps=1)
    first = next(line for line in trainer.state.log_history if "eval_loss" in line)
    assert first["eval_loss"] == pytest.approx(loss_of_parts(sums, counts), rel=1e-5)
    assert first["eval_text_loss"] == pytest.approx(sums[0] / counts[0], rel=1e-5)
    assert first["eval_audio_loss"] == pytest.approx(first["eval_loss"] - first["eval_text_loss"], rel=1e-6)
    assert first["eval_audio_loss_3"] == pytest.approx(sums[4] / counts[4], rel=1e-5)


def test_parts_are_in_the_metrics_and_make_up_the_loss(tmp_path: Path) -> None:
    trainer = train(tmp_path, rows(8), rows(3, seed=2), max_steps=5, logging_steps=2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    taught = [line for line in lines if line["phase"] == "train"]
    assert [line["step"] for line in taught] == [1, 2, 4]
    for line in taught:
        assert line["loss"] == pytest.approx(line["text_loss"] + line["audio_loss"], rel=1e-5)
        books = [line[f"audio_loss_{book}"] for book in range(4)]
        assert line["audio_loss"] == pytest.approx(sum(books) / 4, rel=1e-6)
    held = [line for line in lines if line["phase"] == "eval"]
    assert [line["step"] for line in held] == [0, 2, 4, 5]
    assert all({f"eval_{name}" for name in ("loss", *PARTS)} <= set(line) for line in held)
    assert held[-1]["eval_loss"] < held[0]["eval_loss"], "it learns"
    assert trainer.state.global_step == 5


def test_a_logging_interval_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    each = train(tmp_path / "each", rows(16), max_steps=6, gradient_accumulation_steps=2)
    rare = train(
        tmp_path / "rare",
        rows(16),
        max_steps=6,
        gradient_accumulation_steps=2,
        logging_steps=3,
        logging_first_step=False,
    )
    for name in ("loss", *PARTS):
        steps = logged(each, name)
        assert logged(rare, name) == pytest.approx([sum(steps[:3]) / 3, sum(steps[3:]) / 3], rel=1e-5), name


def test_a_part_that_no_step_had_is_not_told(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, [row(4, 0, 3, n, ends=()) for n in range(4)], max_steps=2, model=audio_adapters()
    )
    assert logged(trainer, "text_loss") == []
    assert logged(trainer, "loss") == pytest.approx(logged(trainer, "audio_loss"), rel=1e-6)


def audio_adapters() -> Any:
    return adapted_model(plan_for(), ["q_proj", "v_proj", "audio_lm_head"])


def test_figures_are_not_read_from_the_device_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(
        plan_for(), tmp_path, rows(8), max_steps=4, logging_steps=4, logging_first_step=False
    )
    kept = []
    reduce = trainer.accelerator.reduce
    monkeypatch.setattr(
        trainer.accelerator, "reduce", lambda t, **more: kept.append(t.shape) or reduce(t, **more)
    )
    trainer.train()
    assert kept == [(5,)] * 4 + [(), (2, 5)], "the counts of each step; the loss and the figures once"


def test_the_plain_trainer_takes_the_loss_for_a_mean_of_its_batch(tmp_path: Path) -> None:
    """One that knows nothing of parts: it must not believe that the model counted over the whole step."""
    from transformers import Trainer, TrainingArguments

    model = voice_model()
    teach_voice(model)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    assert Trainer(model=model, args=arguments).model_accepts_loss_kwargs is False


def test_whole_models_are_trained_as_well(tmp_path: Path) -> None:
    model = voice_model()
    teach_voice(model)
    trainer = train(tmp_path, rows(8), model=model, max_steps=4, learning_rate=1e-2)
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]
    assert all(norm is not None for norm in seen(trainer)[0].values())


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize("head", ["cuda:0", "cuda:1"])
def test_split_over_two_gpus_it_is_the_run_of_one_device(tmp_path: Path, head: str) -> None:
    some, held = rows(8), rows(3, seed=1)
    one = train(tmp_path / "one", some, held)
    places = {f"model.layers.{n}": f"cuda:{n // 2}" for n in range(4)}
    places |= {f"model.{name}": "cuda:0" for name in ("embed_tokens", "embed_audio_tokens", "rotary_emb")}
    places |= {"model.norm": head, "text_lm_head": head, "audio_lm_head": head}
    plan = plan_for("cuda:0", strategy="split", device_map=places)
    two = trainer_of(plan, tmp_path / "two", some, held)
    two.train()
    for name in ("loss", *PARTS, "eval_loss", "eval_text_loss"):
        assert logged(two, name) == pytest.approx(logged(one, name), rel=1e-4), name
    assert torch.device("cuda:1") in {p.device for p in two.model.parameters()}


def test_checkpointing_makes_the_same_run(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", rows(8))
    again = train(tmp_path / "again", rows(8), gradient_checkpointing=True)
    for name in ("loss", *PARTS):
        assert logged(again, name) == pytest.approx(logged(plain, name), rel=1e-4), name


def test_batch_is_what_the_tests_say() -> None:
    """The hand-made batch itself: as many placeholders as columns."""
    made = batch(rows(3))
    placeholders = (made["input_ids"] == 100) | (made["input_ids"] == 102)
    assert placeholders.sum(1).tolist() == made["audio_input_ids_mask"].sum(1).tolist()
