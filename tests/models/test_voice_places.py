"""Text and sound found by their numbers: the loss, the parts and the gradients of masks, and no host that waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.models.voice_loss import count_trained, teach_voice
from trimtab.models.voice_places import PLACES, PlacedVoices, with_places
from voice_batches import batch, row, rows, voice_model
from waiting import Waits

SOME = {
    "rows of several lengths": rows(3),
    "no trained text": [row(4, 0, 6, 1, ends=()), row(4, 2, 3, 2, ends=())],
    "no clip beside one": [row(4, 2, 0, 3), row(4, 0, 2, 4)],
}


def adapted(dtype: torch.dtype = torch.float64) -> Any:
    from peft import LoraConfig, get_peft_model

    model = voice_model().to(dtype)
    teach_voice(model)
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    ).train()


def learned(model: Any, some: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    out = model(**some)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("some", SOME.values(), ids=SOME)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_loss_and_the_gradients_are_those_of_masks(some: list[Any], checkpointing: bool) -> None:
    model = adapted()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = batch(some)
    placed = PlacedVoices(batch, model.config)(some)
    assert "attention_mask" not in placed
    wanted, gradients = learned(model, plain)
    out, found = learned(model, placed)
    assert out.counts.tolist() == wanted.counts.tolist()
    assert count_trained(placed, model.config).tolist() == wanted.counts.tolist()
    torch.testing.assert_close(out.sums, wanted.sums, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.loss, wanted.loss, rtol=1e-12, atol=1e-12)
    assert found.keys() == gradients.keys()
    assert len(found) > 40
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_no_step_waits_for_the_device() -> None:
    model = adapted(torch.float32)
    some = with_places(batch(rows(3)), model.config)
    with Waits() as waits:
        model(**some).loss.backward()
        count_trained(some, model.config)
    assert waits.found == []
    with Waits() as waits:
        model(**batch(rows(3))).loss.backward()
    assert len(waits.found) > 50, "by masks it does: this test sees them"


def test_a_mask_that_hides_more_than_what_is_behind_a_row_stays() -> None:
    some = batch(rows(3))
    some["attention_mask"][0, 0] = 0
    assert "attention_mask" in with_places(some, voice_model().config)


def test_where_neither_is_trained_it_is_an_error_still() -> None:
    from trimtab.errors import RequestError

    model, some = adapted(), batch(rows(2))
    some["labels"].fill_(-100)
    some["audio_labels"].fill_(-100)
    with pytest.raises(RequestError, match="neither a token nor a code is trained"):
        model(**with_places(some, model.config))


def test_without_a_text_head_the_codes_alone_are_trained() -> None:
    model, some = voice_model(), batch(rows(3))
    model.text_lm_head = None
    teach_voice(model)
    wanted, out = model(**some), model(**with_places(some, model.config))
    assert out.counts.tolist() == wanted.counts.tolist()
    assert out.counts[0] == 0
    torch.testing.assert_close(out.sums, wanted.sums)


@pytest.mark.virtual_gpus(2)
def test_split_over_two_gpus_it_is_the_loss_of_one() -> None:
    from accelerate import dispatch_model

    from trimtab.placement import move

    some = batch(rows(3))
    whole = voice_model()
    teach_voice(whole)
    wanted = whole(**some)
    wanted.loss.backward()
    model = voice_model()
    teach_voice(model)
    split = {f"model.layers.{n}": "cuda:0" if n < 2 else "cuda:1" for n in range(4)}
    split |= {f"model.{name}": "cuda:0" for name in ("embed_tokens", "embed_audio_tokens", "rotary_emb")}
    split |= {"model.norm": "cuda:1", "text_lm_head": "cuda:0", "audio_lm_head": "cuda:1"}
    model = dispatch_model(model, device_map=split, main_device="cuda:0")
    placed = move(with_places(some, model.config), "cuda:0")
    assert PLACES in placed
    out = model(**placed)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    found = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name].grad.cpu(), parameter.grad, rtol=1e-3, atol=1e-6)
