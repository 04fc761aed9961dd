"""Every token sees every other one, in each architecture and by either attention; what cannot is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tiny_models import IMAGE_TEXT, SIGLIP, TEXT, config
from trimtab.errors import RequestError
from trimtab.models.diffusion import MaskedDiffusion
from trimtab.models.two_way import TwoWay

IMAGE, END, MASK, PAD = 100, 2, 3, 0
LLAVA = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **SIGLIP},
    "image_token_index": IMAGE,
    "vision_feature_select_strategy": "full",
}
TEXT_ONLY = {
    "llama": TEXT,
    "qwen2": TEXT,
    "qwen3": {**TEXT, "head_dim": 8},
    "gemma3_text": {**TEXT, "head_dim": 8, "sliding_window": 4},
}
SEEING = ("llava", *IMAGE_TEXT)


def text_model(model_type: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    made = AutoConfig.for_model(model_type, **TEXT_ONLY[model_type])
    return AutoModelForCausalLM.from_config(made, attn_implementation=attention).eval()


def seeing_model(model_type: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    made = AutoConfig.for_model("llava", **LLAVA) if model_type == "llava" else config(model_type)
    model = AutoModelForImageTextToText.from_config(made, attn_implementation=attention).eval()
    with torch.no_grad():  # the usual start makes every picture look alike
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.normal_(std=0.15)
    return model


def padded(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Questions and answers as a collator makes a batch of them."""
    width = max(len(q) + len(a) for q, a in rows)
    fill = [width - len(q) - len(a) for q, a in rows]
    return {
        "input_ids": torch.tensor([q + a + [PAD] * n for (q, a), n in zip(rows, fill, strict=True)]),
        "attention_mask": torch.tensor(
            [[1] * (len(q) + len(a)) + [0] * n for (q, a), n in zip(rows, fill, strict=True)]
        ),
        "labels": torch.tensor(
            [[-100] * len(q) + a + [-100] * n for (q, a), n in zip(rows, fill, strict=True)]
        ),
    }


ROWS = [([5, 6, 7], [20, 21, 22, END]), ([8, 9], [23, END])]


def seen_batch(model: Any) -> dict[str, Any]:
    """Two rows with a picture of their own each, as the model's own processor would lay them out."""
    kind, draw = model.config.model_type, torch.Generator().manual_seed(1)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    seen: dict[str, Any]
    if kind.startswith("qwen"):
        side = model.config.vision_config.patch_size
        seen = {"pixel_values": pixels(32, 6 * side * side), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        tokens = 4
    elif kind == "llava_onevision":
        seen = {"pixel_values": pixels(2, 2, 3, 28, 28), "image_sizes": torch.tensor([[28, 28]] * 2)}
        tokens = sum(map(len, model.get_image_features(**seen).pooler_output)) // 2
    elif kind == "idefics3":
        seen, tokens = {"pixel_values": pixels(2, 1, 3, 28, 28)}, 1
    else:
        seen, tokens = {"pixel_values": pixels(2, 3, 28, 28)}, 4
    batch = padded([([q[0]] + [IMAGE] * tokens + q[1:], a) for q, a in ROWS])
    is_image = (batch["input_ids"] == IMAGE).long()
    if kind.startswith("qwen"):
        seen["mm_token_type_ids"] = is_image
    elif kind == "gemma3":
        seen["token_type_ids"] = is_image
    elif kind == "paligemma":
        seen["token_type_ids"] = batch["labels"].ne(-100).long()
    return {**batch, **seen}


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

    objective.check(batch)
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
        objective.check(batch)
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
