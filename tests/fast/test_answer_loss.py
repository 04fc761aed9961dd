"""The loss made at the head: the own loss and gradients of models of every family, or their own way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from picture_rows import drawn, question
from tiny_processors import tiny_pair
from trimtab.data.picture_collate import PictureCollator
from trimtab.fast.answer_loss import AnswerLoss, proved, told_labels
from trimtab.models.outputs import loss_in_step, loss_of
from trimtab.recipes.picture_trainer import ROWS, answers_alone, trained_tokens
from waiting import Waits

ASKED = [
    question("which colour?", "red", drawn()),
    question("say what you see there", "a blue thing", drawn(24, 44, "blue")),
]
FAMILIES = [
    *("llava_onevision", "paligemma"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "idefics3", "gemma3")),
]


def adapted(family: str) -> tuple[Any, Any, dict[str, Any], torch.Tensor]:
    """A model with adapters, its collator, a batch, and the places of its answers."""
    model, processor = tiny_pair(family)
    torch.manual_seed(1)
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(model, settings).train()
    collate = answers_alone(model, PictureCollator(processor, max_length=512), numbered=True)
    batch = collate(ASKED)
    rows = batch.pop(ROWS)
    return model, collate, batch, rows


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_models_own(family: str) -> None:
    model, _, batch, rows = adapted(family)
    way = proved(model, batch, rows)
    assert isinstance(way, AnswerLoss), way
    assert model.training
    plain = loss_in_step(model(**batch), trained_tokens(batch), 17)
    wanted = gradients(model, plain)
    with way.asked(told_labels(batch), rows) as asked:
        outputs = model(**batch)
    ours = loss_of(outputs) * (asked.found.tokens / 17)  # type: ignore[union-attr]
    found = gradients(model, ours)
    assert outputs.logits.numel() == 1
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    # Left as it was: logits again.
    assert model(**batch).logits.shape[-1] > 1


def test_a_trained_head_gets_its_gradient_too() -> None:
    model, processor = tiny_pair("llava_onevision")
    batch = PictureCollator(processor, max_length=512)(ASKED)
    way = proved(model.train(), batch)
    assert isinstance(way, AnswerLoss)
    wanted = gradients(model, model(**batch).loss)
    with way.asked(told_labels(batch)):
        found = gradients(model, model(**batch).loss)
    assert found.keys() == wanted.keys()
    assert model.get_output_embeddings().weight.grad is not None
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_no_answer_in_a_batch_is_nought_with_a_graph() -> None:
    model, _, batch, _ = adapted("llava_onevision")
    way = proved(model, batch)
    assert isinstance(way, AnswerLoss)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["shift_labels"] = torch.full_like(batch["shift_labels"], -100)
    with way.asked(told_labels(batch), torch.empty(0, dtype=torch.long)):
        loss = loss_of(model(**batch))
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(model, loss).values())


def test_an_adapted_head_and_changed_logits_are_found_out() -> None:
    model, processor = tiny_pair("llava_onevision")
    batch = PictureCollator(processor, max_length=512)(ASKED)
    told = proved(get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"])), batch)
    assert told == "its head is adapted, or no plain product"

    model, _ = tiny_pair("llava_onevision")
    own = model.lm_head.forward
    model.lm_head.register_forward_hook(lambda _m, _a, out: out * 0.5)
    told = proved(model, batch)
    assert isinstance(told, str)
    assert "changes its logits" in told
    assert model.lm_head.forward == own


def test_the_loss_itself_asks_no_device() -> None:
    model, _, batch, rows = adapted("llava_onevision")
    way = AnswerLoss(model)
    with Waits() as waits, way.asked(told_labels(batch), rows) as asked:
        (loss_of(model(**batch)) * (asked.found.tokens / 17)).backward()  # type: ignore[union-attr]
    ours = [wait for wait in waits.found if "/trimtab/" in wait]
    assert ours == []
