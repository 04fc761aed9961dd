"""Every token sees every other one, in each architecture and by either attention; what cannot is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from masked_rows import END, MASK, PLAN, ROWS, SEEING, TEXT_ONLY, padded, seeing_model, seen_batch, text_model
from trimtab.errors import RequestError
from trimtab.models.diffusion import MaskedDiffusion
from trimtab.models.two_way import TwoWay


def changed_last(batch: dict[str, Any]) -> dict[str, Any]:
    """The same rows with another last token."""
    ids = batch["input_ids"].clone()
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids[row, length - 1] = 60 + row
    return {**batch, "input_ids": ids}


def logits(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    way = TwoWay(model)
    with torch.no_grad():
        got: torch.Tensor = model(
            **way.inputs(batch["input_ids"], batch["attention_mask"].bool(), batch)
        ).logits
    return got


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [*TEXT_ONLY, *SEEING])
def test_a_later_token_changes_the_first_logit_and_padding_none(kind: str, attention: str) -> None:
    model = (text_model if kind in TEXT_ONLY else seeing_model)(kind, attention)
    batch = padded(ROWS) if kind in TEXT_ONLY else seen_batch(model)
    TwoWay(model).check(batch, END)
    before, after = logits(model, batch), logits(model, changed_last(batch))
    assert ((before - after)[:, 0].abs().amax(-1) > 1e-6).all()
    padding = batch["attention_mask"] == 0
    assert padding.any()
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(padding, 77)}
    torch.testing.assert_close(logits(model, other)[~padding], before[~padding])
    assert before.isfinite().all()


@pytest.mark.parametrize("kind", SEEING)
def test_a_row_alone_gets_the_logits_that_it_gets_beside_a_longer_one(kind: str) -> None:
    """Positions included: those of Qwen's pictures are read from the mask of the rows, not from the one given."""
    model = seeing_model(kind)
    batch = seen_batch(model)
    alone = {name: value[1:] for name, value in batch.items()}
    if kind.startswith("qwen"):
        alone["pixel_values"] = batch["pixel_values"][16:]
    length = int(alone["attention_mask"].sum())
    for name in ("input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"):
        if name in alone:
            alone[name] = alone[name][:, :length]
    torch.testing.assert_close(
        logits(model, alone)[0], logits(model, batch)[1, :length], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", SEEING)
def test_both_halves_share_what_the_tower_saw(kind: str) -> None:
    model = seeing_model(kind)
    batch = seen_batch(model)
    objective = MaskedDiffusion(model, mask_id=MASK, end_id=END, seed=0, answer_length=5)
    apart = objective.inputs(batch, 0)
    assert len(apart.inputs["pixel_values"]) == 2 * len(batch["pixel_values"])
    twice = model(**apart.inputs).logits

    objective.check(batch, PLAN)
    assert objective.two_way.shares
    shared = objective.inputs(batch, 0)
    assert torch.equal(shared.inputs["pixel_values"], batch["pixel_values"])
    with objective.pictures_once():
        once = model(**shared.inputs).logits
    assert torch.equal(shared.targets, apart.targets)
    torch.testing.assert_close(once, twice, rtol=1e-4, atol=1e-5)

    # The pictures do matter, each to its own rows; and the model is as it was.
    swapped = {**shared.inputs, "pixel_values": batch["pixel_values"].flip(0)}
    with objective.pictures_once():
        assert (model(**swapped).logits - once).abs().max() > 1e-3
    assert "get_image_features" not in vars(model.model)


def test_gradients_reach_the_tower_as_if_it_ran_twice() -> None:
    model = seeing_model("llava")
    batch = seen_batch(model)
    objective = MaskedDiffusion(model, mask_id=MASK, end_id=END, seed=0, answer_length=5)
    found = []
    for _ in range(2):
        masked = objective.inputs(batch, 0)
        with objective.pictures_once():
            loss, _ = objective.loss(model(**masked.inputs).logits, masked.targets)
        model.zero_grad()
        loss.backward()
        found.append([w.grad.clone() for w in model.parameters() if w.grad is not None])
        objective.check(batch, PLAN)
    for apart, shared in zip(*found, strict=True):
        torch.testing.assert_close(apart, shared, rtol=1e-3, atol=1e-6)


class Ordered(torch.nn.Module):
    """A decoder that reads in order, whatever its mask says: a running sum."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(128, 8), torch.nn.Linear(8, 128)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.head(self.embed(input_ids).cumsum(1)))


class Maskless(Ordered):
    """It sees both ways, padding and all."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        return SimpleNamespace(logits=self.head(hidden + hidden.mean(1, keepdim=True)))


class FlatMaskOnly(Ordered):
    """It takes a mask of two dimensions only."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        _rows, _columns = attention_mask.shape
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("model", "why"),
    [(Ordered, "no earlier logit"), (Maskless, "padding changes"), (FlatMaskOnly, "no mask of its own")],
)
def test_what_cannot_see_both_ways_is_refused(model: type[Ordered], why: str) -> None:
    with pytest.raises(
        RequestError, match=rf"(?s){model.__name__} does not give it.*{why}.*objective=causal"
    ):
        TwoWay(model()).check(padded(ROWS), END)


def test_a_state_space_model_is_refused() -> None:
    torch.manual_seed(0)
    made = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=128, state_size=4)
    model = AutoModelForCausalLM.from_config(made)
    with pytest.raises(RequestError, match=r"MambaForCausalLM .*does not give it"):
        TwoWay(model).check(padded(ROWS), END)
    assert model.training


def test_a_batch_that_is_wrong_by_itself_is_not_blamed_on_the_mask() -> None:
    model = seeing_model("llava")
    batch = seen_batch(model)
    batch["input_ids"][0, 1] = 9  # one token too few for its picture
    with pytest.raises(ValueError, match="tokens"):
        TwoWay(model).check(batch, END)
