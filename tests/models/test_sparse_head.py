"""The sparse head gives TRL's numbers: loss, per-token values and gradients, from fewer projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from trimtab.models import sparse_head
from trimtab.models.sparse_head import use_sparse_head


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 250, (3, 17), generator=generator)
    labels = ids.clone()
    labels[:, :6] = -100
    labels[1, 10:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def scored(folder: Path, batch: dict[str, torch.Tensor], sparse: bool) -> tuple[Any, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if sparse:
        assert use_sparse_head(model)
    out = model(**batch, fused_lm_head=True)
    out.loss.backward()
    return out, model.model.layers[0].mlp.up_proj.weight.grad


@pytest.mark.parametrize("tile", [2048, 5])
def test_same_numbers_as_trl(
    tiny_model: Path, batch: dict[str, torch.Tensor], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_head, "TILE", tile)
    theirs, their_gradient = scored(tiny_model, batch, sparse=False)
    ours, our_gradient = scored(tiny_model, batch, sparse=True)
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=1e-5)
    assert torch.equal(ours.label_mask, theirs.label_mask)
    assert torch.equal(ours.is_top1.bool(), theirs.is_top1.bool())
    torch.testing.assert_close(our_gradient, their_gradient, atol=1e-6, rtol=1e-4)


def test_a_batch_without_labels_is_a_differentiable_zero(
    tiny_model: Path, batch: dict[str, torch.Tensor]
) -> None:
    out, gradient = scored(
        tiny_model, {**batch, "labels": torch.full_like(batch["labels"], -100)}, sparse=True
    )
    assert out.loss.item() == 0.0
    assert not gradient.any()


def test_generation_and_plain_forward_stay_as_they_are(
    tiny_model: Path, batch: dict[str, torch.Tensor]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    add_fused_lm_head(model)
    before = model(**batch)
    assert use_sparse_head(model)
    after = model(**batch)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.loss, after.loss)


def test_only_labelled_positions_are_projected(tiny_model: Path, batch: dict[str, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    add_fused_lm_head(model)
    use_sparse_head(model)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    model(**batch, fused_lm_head=True)
    assert seen == [int((batch["labels"][:, 1:] != -100).sum())]
