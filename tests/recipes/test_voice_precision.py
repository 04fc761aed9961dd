"""A voice in fp32, bf16 and fp16 on a virtual GPU: gradients from the first step on, and the losses of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from voice_training import adapted_model, guard_of, logged, plan_for, seen, train_watched, trainer_of

from trimtab.errors import RequestError
from trimtab.monitor.metrics import read_metrics
from trimtab.placement import PlacementFault
from trimtab.recipes import voice_trainer
from trimtab.recipes.voice_trainer import VoiceTrainer
from voice_batches import NONE, Row, row, rows


def train(out: Path, device: str, precision: str, steps: int, **settings: Any) -> VoiceTrainer:
    plan = plan_for(device, precision)
    trainer = trainer_of(
        plan,
        out,
        rows(16),
        model=adapted_model(plan, num_hidden_layers=2),
        max_steps=steps,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        **settings,
    )
    trainer.train()
    return trainer


@pytest.fixture(scope="module", params=[15, pytest.param(50, marks=pytest.mark.slow)])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VoiceTrainer:
    return train(tmp_path_factory.mktemp("fp32"), "cpu", "fp32", request.param)


@pytest.mark.virtual_gpus(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_are_those_of_fp32(precision: str, exact: VoiceTrainer, tmp_path: Path) -> None:
    steps = len(logged(exact, "loss"))
    trainer = train(tmp_path, "cuda:0", precision, steps)
    scaler = trainer.accelerator.scaler
    assert (scaler is not None) == (precision == "fp16"), "fp16 alone needs one"
    assert {str(p.dtype) for p in trainer.model.parameters() if p.requires_grad} == {"torch.float32"}
    norms = logged(trainer, "grad_norm")
    assert len(norms) == steps >= 15
    assert all(0 < norm < float("inf") for norm in norms), "finite, and not zero, from the first step on"
    assert any(seen(trainer)[0].values())
    for name in ("loss", "text_loss", "audio_loss"):
        assert logged(trainer, name) == pytest.approx(logged(exact, name), rel=0.02), name
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0], "it learns"


@pytest.mark.virtual_gpus(1)
def test_steps_that_overflow_in_fp16_are_counted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a scale that is far too large the scaler comes down by itself; nothing of it is hidden."""
    monkeypatch.setattr(voice_trainer, "SCALE", 2.0**20)
    plan = plan_for("cuda:0", "fp16")
    trainer = trainer_of(plan, tmp_path, rows(8), max_steps=10, progress="plain")
    trainer.train()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    skips = [line for line in lines if line["phase"] == "skip"]
    taught = [line for line in lines if line["phase"] == "train"]
    bad = [line["step"] for line in taught if not isinstance(line["grad_norm"], float)]
    assert 0 < len(skips) < 10
    assert [line["step"] for line in skips] == bad, "those, and no others, have a norm that is not finite"
    assert [line["scale"] for line in skips] == [2.0 ** (19 - n) for n in range(len(skips))]
    assert [line["skipped_steps"] for line in taught] == [
        sum(step <= line["step"] for step in bad) for line in taught
    ]
    shown = capsys.readouterr().err
    assert (
        f"step {bad[0]} skipped: a gradient overflowed in fp16, and the scaler goes on with a scale of"
        in shown
    )
    assert f"skipped {len(skips)}  " in shown
    assert f"{len(skips)} step{'s' * (len(skips) > 1)} skipped, for overflow in fp16" in shown


def nothing_trained() -> list[Row]:
    return [Row(r.ids, [NONE] * len(r.ids), r.columns, [[NONE] * 4] * len(r.columns)) for r in rows(4)]


@pytest.mark.virtual_gpus(1)
class TestNoStepWithoutGradients:
    """Each of these ends in the scaler's "No inf checks were recorded" by itself; here it is named before that."""

    plan = property(lambda self: plan_for("cuda:0", "fp16"))

    def fault(self, out: Path, some: list[Row], model: Any) -> str:
        trainer = trainer_of(self.plan, out, some, model=model, max_steps=2)
        with pytest.raises((PlacementFault, RequestError)) as caught:
            train_watched(trainer)
        assert trainer.state.global_step == 0
        return str(caught.value)

    def test_everything_frozen(self, tmp_path: Path) -> None:
        model = adapted_model(self.plan).requires_grad_(False)
        assert "no parameter requires a gradient" in self.fault(tmp_path, rows(4), model)

    def test_an_optimizer_that_was_made_before_the_adapters(self, tmp_path: Path) -> None:
        model = adapted_model(self.plan)
        other = torch.nn.Linear(2, 2, device="cuda:0")
        trainer = trainer_of(self.plan, tmp_path, rows(4), model=model, max_steps=2)
        trainer.optimizer = torch.optim.AdamW(other.parameters())
        with pytest.raises(PlacementFault, match=r"optimizer: lacks \d+ trainable tensors"):
            train_watched(trainer)

    def test_labels_that_are_all_ignored(self, tmp_path: Path) -> None:
        told = self.fault(tmp_path, nothing_trained(), adapted_model(self.plan))
        assert "neither a token nor a code is trained" in told

    def test_adapters_that_no_trained_token_depends_on(self, tmp_path: Path) -> None:
        """Words are the text's part of a layer; in the last one only those count that tell a trained word."""
        model = adapted_model(self.plan, r".*layers\.3\.mlp\.(gate|up|down)_proj")
        told = self.fault(tmp_path, [row(4, 2, 3, n, ends=()) for n in range(4)], model)
        assert "3 adapted modules is exactly zero" in told
        assert "no trained token of this step depends on what it computed" in told


def test_adapters_of_the_text_alone_learn_from_codes_and_words(tmp_path: Path) -> None:
    model = adapted_model(plan_for(), r".*\.mlp\.(gate|up|down)_proj")
    trainer = trainer_of(plan_for(), tmp_path, rows(8), model=model)
    trainer.train()
    assert guard_of(trainer).table == [
        line for line in guard_of(trainer).table if "12 of 12 adapted modules" in line
    ]


def test_a_head_without_a_token_waits_for_one(tmp_path: Path) -> None:
    """The first step has no trained word, a later one has."""
    some = [row(4, 2, 3, n, ends=()) for n in range(2)] + rows(6)
    model = adapted_model(plan_for(), ["q_proj", "text_lm_head"])
    trainer = trainer_of(
        plan_for(), tmp_path, some, model=model, max_steps=4, train_sampling_strategy="sequential"
    )
    trainer.train()
    checks = {check.name: check.detail for check in guard_of(trainer).checks}
    assert "1 modules wait for a token that is sent through them" in checks["gradients arrive"]
    assert "arrived, step" in checks["gradients later"]
