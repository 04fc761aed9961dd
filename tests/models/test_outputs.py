"""The loss is found in every kind of outputs, or the error says what was returned."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from transformers.utils import ModelOutput

from tiny_models import skeleton
from trimtab.errors import RequestError
from trimtab.models.outputs import loss_in_step, loss_of
from trimtab.virtual.ending import settle

LOSS = torch.tensor(2.5)
LOGITS = torch.zeros(2, 3, 7)
EXTRA = {
    "new_input_ids": torch.zeros(2, 3, dtype=torch.long),
    "final_masked_indices": torch.ones(2, 3, dtype=torch.bool),
    "p_mask": torch.rand(2, 3),
}
Named = namedtuple("Named", ["logits", "loss", "p_mask"])


@dataclass
class Plain:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    p_mask: torch.Tensor | None = None


@dataclass
class Wider(CausalLMOutputWithPast):
    new_input_ids: torch.Tensor | None = None


class Slotted:
    __slots__ = ("logits", "loss")

    def __init__(self) -> None:
        self.logits, self.loss = LOGITS, LOSS


@pytest.mark.parametrize(
    "outputs",
    [
        LOSS,
        LOSS.reshape(1),
        (LOSS, LOGITS),
        [LOSS, LOGITS],
        (LOSS,),
        (LOSS, LOGITS, torch.tensor(9.0)),
        (LOGITS, LOSS),
        (LOGITS, LOSS, None),
        {"loss": LOSS, "logits": LOGITS},
        {"logits": LOGITS, "aux_loss": torch.tensor(9.0), "loss": LOSS, **EXTRA},
        ModelOutput(loss=LOSS, logits=LOGITS, **EXTRA),
        CausalLMOutputWithPast(loss=LOSS, logits=LOGITS),
        MoeCausalLMOutputWithPast(loss=LOSS, aux_loss=torch.tensor(9.0), logits=LOGITS),
        Wider(loss=LOSS, new_input_ids=EXTRA["new_input_ids"]),
        Plain(LOGITS, LOSS, EXTRA["p_mask"]),
        Named(LOGITS, LOSS, EXTRA["p_mask"]),
        SimpleNamespace(logits=LOGITS, loss=LOSS, **EXTRA),
        Slotted(),
        (CausalLMOutputWithPast(loss=LOSS, logits=LOGITS), EXTRA["p_mask"]),
        ({"loss": LOSS}, {"masked": 3}),
    ],
    ids=lambda outputs: type(outputs).__name__,
)
def test_the_loss_is_found(outputs: Any) -> None:
    found = loss_of(outputs)
    assert found.dim() == 0
    assert found.item() == 2.5


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (None, ["no loss", "None"]),
        (LOGITS, ["float32 (2, 3, 7)"]),
        ({"logits": LOGITS, **EXTRA}, ["dict(", "logits: float32 (2, 3, 7)", "p_mask: float32 (2, 3)"]),
        ({"logits": LOGITS, "aux_loss": LOSS}, ["aux_loss may be a part", "under the name loss"]),
        (CausalLMOutputWithPast(logits=LOGITS), ["CausalLMOutputWithPast(logits: ", "is None", "labels"]),
        (Plain(LOGITS), ["Plain(logits: float32 (2, 3, 7), loss: None", "labels"]),
        (
            (LOGITS, LOSS, LOSS),
            ["2 of what the model returned", "tuple(float32 (2, 3, 7), float32 (), float32 ())"],
        ),
        ((LOGITS, EXTRA["new_input_ids"]), ["tuple(float32 (2, 3, 7), int64 (2, 3))"]),
        ((), ["tuple()"]),
        ({"loss": torch.rand(6)}, ["6 values, shape (6,)", "DataParallel", "processes: N"]),
        (
            {"loss": torch.rand(2, 3), "logits": LOGITS},
            ["6 values, shape (2, 3)", "mean over the trained tokens"],
        ),
        (torch.rand(2), ["2 values"]),
        ({"loss": 0.5}, ["the loss is a float", ".item()"]),
        ({"loss": torch.tensor(3)}, ["the loss is int64 ()"]),
        ({"loss": {"answer": LOSS}}, ["the loss is a dict"]),
        (SimpleNamespace(logits=LOGITS), ["SimpleNamespace(logits: float32 (2, 3, 7))"]),
        (3.0, ["no loss", "a float"]),
    ],
)
def test_what_has_no_one_loss_is_refused_with_what_it_is(outputs: Any, says: list[str]) -> None:
    with pytest.raises(RequestError) as refused:
        loss_of(outputs)
    for words in says:
        assert words in str(refused.value)


@pytest.mark.parametrize("options", [{}, {"return_dict": False}])
def test_a_real_model_with_and_without_names(options: dict[str, bool]) -> None:
    model = skeleton("llama", "cpu")
    tokens = torch.arange(12).reshape(2, 6)
    loss = loss_of(model(input_ids=tokens, labels=tokens, **options))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RequestError, match="no loss in what the model returned"):
        loss_of(model(input_ids=tokens, **options))


class Wrapped(torch.nn.Module):
    """A custom model whose outputs `make` builds."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.make = make

    def forward(self, rows: torch.Tensor) -> Any:
        logits = self.layer(rows)
        return self.make(logits.square().mean(), logits)


@pytest.mark.parametrize(
    "make",
    [
        lambda loss, logits: (loss, logits),
        lambda loss, logits: (logits, loss),
        lambda loss, logits: {"loss": loss, "p_mask": logits},
        lambda loss, logits: ModelOutput(loss=loss, logits=logits, new_input_ids=logits),
        lambda loss, logits: Plain(logits, loss),
        lambda loss, logits: Named(logits, loss, None),
        lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    ],
    ids=["tuple", "logits first", "dict", "ModelOutput", "dataclass", "named tuple", "object"],
)
def test_under_ddp(make: Callable[[torch.Tensor, torch.Tensor], Any], tmp_path: Any) -> None:
    """As recipes wrap it. Told to find unused parameters, DDP would not look into an object and call all unused."""
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/meet")
    try:
        model = DistributedDataParallel(Wrapped(make), find_unused_parameters=False)
        loss_of(model(torch.ones(2, 4))).backward()
        assert model.module.layer.weight.grad is not None
        # A thread of gloo that holds a tensor waits for the lock that the end of the group holds.
        settle()
        del model
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model_type", ["llama", "qwen2_5_vl", "gemma3"])
def test_parts_of_a_step_add_up_to_the_step(model_type: str) -> None:
    """Answers of 1, 5 and no tokens in three passes: loss and gradients of all rows in one."""
    torch.manual_seed(0)
    model = skeleton(model_type, "cpu")
    tokens = torch.randint(5, 90, (3, 8))
    labels = torch.full_like(tokens, -100)
    labels[0, 7:], labels[1, 3:] = tokens[0, 7:], tokens[1, 3:]
    # Gemma 3 makes its mask of what is a picture and what is text.
    kinds = {"token_type_ids": torch.zeros_like(tokens)} if model_type == "gemma3" else {}
    whole = model(input_ids=tokens, labels=labels, **kinds).loss
    whole.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for row in range(3):
        own = {name: value[row : row + 1] for name, value in kinds.items()}
        outputs = model(input_ids=tokens[row : row + 1], labels=labels[row : row + 1], **own)
        part = loss_in_step(outputs, labels[row, 1:] != -100, of=6)
        part.backward()
        total += part.item()
    assert part.item() == 0.0, "a row without an answer brings nothing"
    assert total == pytest.approx(whole.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        assert (parameter.grad is None) == (wanted is None), name
        assert wanted is None or torch.allclose(parameter.grad, wanted, atol=1e-6), name


def test_no_trained_token_and_nothing_but_a_loss_is_refused() -> None:
    with pytest.raises(RequestError, match="no token is trained"):
        loss_in_step({"loss": torch.tensor(float("nan"))}, torch.zeros(3, dtype=torch.bool), of=5)
