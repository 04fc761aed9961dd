"""SHIRG's views in training: adapters, checkpointing, precision, ranks, masked diffusion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shirg_ranks
import torch
from test_take_part_ranks import two_ranks

from masked_rows import END, MASK, PLAN
from tiny_models import SIGLIP
from tiny_shirg import SMALL, batch_of, model_of
from trimtab.config.schema import LoraSettings
from trimtab.errors import RequestError
from trimtab.models import IMAGE_TEXT
from trimtab.models.adapters import add_lora
from trimtab.models.diffusion import MaskedDiffusion
from trimtab.models.shirg import attach_shirg
from trimtab.models.shirg_tokens import look
from trimtab.models.unmask import unmask

EVERYWHERE = LoraSettings(r=2, targets=["all-linear", "vision", "connector"])


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


@pytest.mark.parametrize("kind", ["llava_onevision", "paligemma"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_the_towers_adapters(kind: str, checkpointing: bool) -> None:
    model: Any = add_lora(model_of(kind), EVERYWHERE, IMAGE_TEXT).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(rows=2, pictures=2)
    if kind == "paligemma":
        batch["token_type_ids"] = (batch["labels"] != -100).long()
    model(**batch).loss.backward()
    found = gradients(model)
    adapters = [name for name, p in model.named_parameters() if "lora_B" in name]
    assert sum("vision_tower" in name for name in adapters) >= 6 * SIGLIP["num_hidden_layers"]
    assert any("multi_modal_projector" in name for name in adapters)
    assert [name for name in adapters if name not in found or not found[name].any()] == []


def test_checkpointing_changes_no_gradient() -> None:
    seen = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model: Any = add_lora(model_of("llava_onevision"), EVERYWHERE, IMAGE_TEXT).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch_of()).loss.backward()
        seen.append(gradients(model))
    for name, gradient in seen[0].items():
        assert torch.allclose(gradient, seen[1][name], atol=1e-7), name


def test_tokens_that_are_not_kept_get_no_gradient() -> None:
    model = model_of("llava_onevision")
    features: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[Any, ...]) -> None:
        args[0].retain_grad()
        features.append(args[0])

    model.base_model.multi_modal_projector.register_forward_pre_hook(keep)
    pixels = batch_of()["pixel_values"]
    question = torch.randn(2, 32)
    found = look(model.base_model, model.shirg.settings, model.shirg.grid, pixels, question)
    found.tokens.square().sum().backward()
    got = features[0].grad.abs().sum(-1) > 0  # type: ignore[union-attr]
    kept = torch.zeros(2, 16, dtype=torch.bool).scatter_(1, found.kept, True)
    assert got[:, :4].all()  # the whole view
    assert torch.equal(got[:, 4:], kept)


def test_merged_tokens_share_the_gradient() -> None:
    model = model_of(
        "llava_onevision", SMALL.model_copy(update={"merge": -0.9, "keep": 1, "similarity": 0.0})
    )
    features: list[torch.Tensor] = []

    def keep(_: Any, args: tuple[Any, ...]) -> None:
        args[0].retain_grad()
        features.append(args[0])

    model.base_model.multi_modal_projector.register_forward_pre_hook(keep)
    pixels = batch_of()["pixel_values"]
    look(model.base_model, model.shirg.settings, model.shirg.grid, pixels, None).tokens.sum().backward()
    assert (features[0].grad.abs().sum(-1) > 0).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_bf16_autocast_and_bf16_weights(weights: torch.dtype, head: bool) -> None:
    exact = model_of("llava", vision_use_head=head)
    expected = exact(**batch_of()).loss.item()
    model: Any = add_lora(model_of("llava", vision_use_head=head).to(weights), EVERYWHERE, IMAGE_TEXT).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch_of()).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=0.02)
    found = gradients(model)
    named = {name: gradient for name, gradient in found.items() if "lora_B" in name}
    assert any("vision_tower.encoder.layers.0" in name and g.any() for name, g in named.items())
    assert all(torch.isfinite(gradient).all() for gradient in named.values())


def test_adapters_come_after_the_views() -> None:
    model = model_of("llava_onevision")
    with pytest.raises(RequestError, match="has them already"):
        attach_shirg(model, SMALL)
    with pytest.raises(RequestError, match="has adapters already"):
        attach_shirg(add_lora(model, EVERYWHERE, IMAGE_TEXT), SMALL)


def test_an_adapted_model_answers() -> None:
    model: Any = add_lora(model_of("llava_onevision"), EVERYWHERE, IMAGE_TEXT).eval()
    batch = batch_of(rows=2, answer=0)
    del batch["labels"]
    given = model.generate(**batch, max_new_tokens=2, do_sample=False)
    assert given.shape == (2, batch["input_ids"].shape[1] + 2)


@pytest.fixture
def seeing() -> Any:
    """A model in which pictures differ, and the question alone chooses."""
    model = model_of(
        "llava_onevision",
        SMALL.model_copy(update={"attention": 0.0, "similarity": 1.0, "edges": 0.0, "distance": 0.0}),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.normal_(std=0.15)
    return model


def kept_by(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    from trimtab.models import shirg

    found: list[torch.Tensor] = []

    def spying(*args: Any) -> Any:
        looked = look(*args)
        found.append(looked.kept)
        return looked

    monkeypatch.setattr(shirg, "look", spying)
    return found


def test_masked_diffusion_sees_each_picture_once_and_chooses_by_the_question(
    seeing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(rows=2)
    objective = MaskedDiffusion(seeing, mask_id=MASK, end_id=END, seed=0)
    objective.check(batch, PLAN)
    assert objective.two_way.shares
    kept = kept_by(seeing, monkeypatch)
    with torch.no_grad():
        seeing(**batch)
    for step in range(3):
        masked = objective.inputs(batch, step)
        with objective.pictures_once():
            logits = seeing(**masked.inputs).logits
        loss, trained = objective.loss(logits, masked.targets)
        assert torch.isfinite(loss)
        assert trained == 6
    assert len(kept) == 4
    assert all(len(one) == 2 for one in kept)  # two pictures, not four
    assert all(torch.equal(kept[0], one) for one in kept[1:])  # whatever is masked


def test_unmasking_chooses_as_training_does(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_by(seeing, monkeypatch)
    batch = batch_of(rows=2)
    with torch.no_grad():
        seeing(**batch)
    asked = {key: value[:, :-3] for key, value in batch.items() if key in ("input_ids", "attention_mask")}
    asked["pixel_values"] = batch["pixel_values"]
    unmask(seeing, asked, answer_length=3, steps=3, mask_id=MASK, ends=[END], end_id=END)
    assert len(kept) == 2  # one pass of the tower for three of the language model
    assert torch.equal(kept[0], kept[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_train_as_one_process(wrapper: str, tmp_path: Path) -> None:
    two_ranks(shirg_ranks.train, str(tmp_path), wrapper)
    left, right = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(left[1][name], right[1][name]) for name in left[1]), "the ranks stay identical"
    model = shirg_ranks.adapted()
    optimizer = shirg_ranks.optimizer_of(model)
    for step, kinds in enumerate(shirg_ranks.STEPS):
        losses = [model(**shirg_ranks.batch(kinds[rank], 10 * step + rank)).loss for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [left[0][step], right[0][step]] == pytest.approx([loss.item() for loss in losses], abs=1e-4)
    for name, weight in shirg_ranks.weights(model).items():
        assert torch.allclose(left[1][name], weight, atol=1e-3), name
