"""The loss of a voice against a direct evaluation in float64, and against transformers' own where the two agree."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForTextToWaveform,
    HiggsAudioV2ForConditionalGeneration,
)

from trimtab.errors import RequestError
from trimtab.models.voice_loss import VoiceOutput, count_trained, teach_voice
from voice_batches import AUDIO_END, NONE, Row, batch, direct, loss_of_parts, row, rows, voice_model


def taught(books: int = 4, **changes: Any) -> Any:
    model = voice_model(books, **changes)
    teach_voice(model)
    return model


def two_clips(books: int) -> Row:
    """A row that trains two clips, one after the other, after a reference."""
    first, second = row(books, 3, 4, 1, ends=(AUDIO_END,)), row(books, 0, 2, 2)
    return Row(*(getattr(first, f.name) + getattr(second, f.name) for f in dataclasses.fields(Row)))


def back_to_back(books: int) -> Row:
    """Two trained clips without a word between them: the last column of one stands before the first of the other."""
    first, second = row(books, 0, 3, 3, ends=()), row(books, 0, 2, 4)
    start = second.ids.index(100)
    return Row(
        first.ids + second.ids[start:],
        first.labels + second.labels[start:],
        first.columns + second.columns,
        first.column_labels + second.column_labels,
    )


@pytest.mark.parametrize("books", [2, 8])
def test_loss_and_parts_are_those_of_a_direct_evaluation(books: int) -> None:
    model = taught(books).double().eval()
    some = [row(books, 3, 5, 10), two_clips(books), back_to_back(books), row(books, 0, 2, 11)]
    sums, counts = direct(model, some)
    out = model(**batch(some))
    assert isinstance(out, VoiceOutput)
    assert out.sums.dtype == torch.float64
    assert out.counts.tolist() == counts
    assert out.sums.tolist() == pytest.approx(sums, rel=1e-10)
    assert out.loss.item() == pytest.approx(loss_of_parts(sums, counts), rel=1e-10)
    assert count_trained(batch(some), model.config).tolist() == counts
    # By hand: 2 ends in each turn but the first of two clips, which has 1, and the one without; codes and one end each.
    assert counts == [2 + 3 + 2 + 2, *[(5 + 1) + (4 + 1 + 2 + 1) + (3 + 1 + 2 + 1) + (2 + 1)] * books]


def test_it_is_transformers_loss_with_a_mean_over_codebooks() -> None:
    # Of eight codebooks: some versions of transformers' own loss know no other number.
    model, some = voice_model(8).eval(), batch(rows(3, 8))
    text = model(**some | {"audio_labels": None}).loss
    codes = model(**some | {"labels": None}).loss
    teach_voice(model)
    assert model(**some).loss.item() == pytest.approx((text + codes / 8).item(), rel=1e-5)


def test_the_gradients_are_those_of_transformers_loss() -> None:
    model, some = voice_model(8).double(), batch(rows(3, 8))
    text = model(**some | {"audio_labels": None}).loss
    (text + model(**some | {"labels": None}).loss / 8).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    teach_voice(model)
    model(**some).loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        # transformers' loss is one of fp32.
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-7)


def test_only_positions_that_tell_something_go_through_the_heads() -> None:
    model, some = taught(), batch(rows(3))
    widths: dict[str, tuple[int, ...]] = {}
    for name in ("text_lm_head", "audio_lm_head"):
        head = getattr(model, name)
        head.register_forward_hook(lambda _m, _a, out, name=name: widths.update({name: tuple(out.shape)}))
    out = model(**some)
    frames = int(some["audio_labels"].ne(NONE).any(-1).sum())
    assert widths == {"text_lm_head": (int(out.counts[0]), 128), "audio_lm_head": (frames, 4 * 18)}


@pytest.mark.parametrize("without", ["text", "audio", "labels", "audio_labels", "one codebook"])
def test_a_part_without_a_trained_token_is_nought_with_a_graph(without: str) -> None:
    model, some = taught(), batch(rows(2))
    gone = {"text": "labels", "audio": "audio_labels"}.get(without)
    if gone:
        some[gone] = torch.full_like(some[gone], NONE)
    elif without == "one codebook":
        some["audio_labels"][..., 2] = NONE
    else:
        del some[without]
    out = model(**some)
    out.loss.backward()
    lacking = {"text": [0], "labels": [0], "one codebook": [3]}.get(without, [1, 2, 3, 4])
    assert [place for place, count in enumerate(out.counts.tolist()) if not count] == lacking
    assert all(out.sums[place] == 0 for place in lacking)
    assert out.sums.requires_grad
    assert out.loss.isfinite()
    for head in (model.text_lm_head, model.audio_lm_head):
        # Also without a token: processes wait for each other's gradients.
        assert head.weight.grad is not None
        assert head.weight.grad.isfinite().all()
    whole = out.sums / out.counts.clamp(min=1)
    assert out.loss.item() == pytest.approx((whole[0] + whole[1:].mean()).item())


def test_a_batch_in_which_nothing_is_trained_is_an_error() -> None:
    some = batch(rows(2))
    some["labels"].fill_(NONE)
    some["audio_labels"].fill_(NONE)
    with pytest.raises(RequestError, match="neither a token nor a code is trained"):
        taught()(**some)


def test_what_does_not_fit_the_placeholders_is_an_error() -> None:
    some = batch(rows(2))
    some["audio_input_ids_mask"][0, -1] = ~some["audio_input_ids_mask"][0, -1]
    with pytest.raises((RuntimeError, IndexError)):
        taught()(**some)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_loss_is_still_computed_in_fp32(dtype: torch.dtype) -> None:
    model, some = taught(), batch(rows(3))
    whole = model(**some)
    with torch.autocast("cpu", dtype=dtype):
        half = model(**some)
    assert half.loss.dtype == half.sums.dtype == torch.float32
    assert half.loss.item() == pytest.approx(whole.loss.item(), rel=5e-3)
    # Sums of 16 bits would be multiples of large steps.
    assert not torch.equal(half.sums, half.sums.to(dtype).float())


def test_without_labels_it_is_transformers_own_model() -> None:
    model, some = voice_model().eval(), batch(rows(1))
    asked = {name: value for name, value in some.items() if "labels" not in name}
    before = model(**asked)
    teach_voice(model)
    after = model(**asked)
    assert type(after) is type(before)
    assert torch.equal(after.logits, before.logits)
    assert torch.equal(model(*asked.values()).logits, before.logits)


def test_it_generates() -> None:
    one = row(4, 3, 2, 5)
    until = len(one.ids) - one.ids[::-1].index(101)
    reference = 3 + 2 + 3
    asked = {
        "input_ids": torch.tensor([one.ids[:until]]),
        "attention_mask": torch.ones(1, until, dtype=torch.long),
        "audio_input_ids": torch.tensor([one.columns[:reference]]),
        "audio_input_ids_mask": torch.ones(1, reference, dtype=torch.bool),
    }
    model = voice_model().eval()
    wanted = model.generate(**asked, max_new_tokens=6, do_sample=False)
    teach_voice(model)
    assert torch.equal(model.generate(**asked, max_new_tokens=6, do_sample=False), wanted)


def test_it_is_kept_copied_and_loaded_as_transformers_model(tmp_path: Path) -> None:
    model, some = taught().eval(), batch(rows(2))
    names = set(voice_model().state_dict())
    assert set(model.state_dict()) == names
    loss = model(**some).loss
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**some).loss, loss)
        assert twin.model is not model.model
    model.save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept["architectures"] == ["HiggsAudioV2ForConditionalGeneration"]
    again = AutoModelForTextToWaveform.from_pretrained(tmp_path, use_text_head=True).eval()
    assert type(again) is HiggsAudioV2ForConditionalGeneration
    teach_voice(again)
    teach_voice(again)
    torch.testing.assert_close(again(**some).loss, loss)


def test_what_cannot_be_taught_is_refused() -> None:
    from tiny_models import skeleton

    with pytest.raises(RequestError, match="LlamaForCausalLM is to learn a voice"):
        teach_voice(skeleton("llama", "cpu"))


@pytest.mark.parametrize("adapters", [False, True])
def test_checkpointing_gives_the_same_gradients(adapters: bool) -> None:
    """The model adds to its hidden states in place, which a checkpoint has to survive."""
    from peft import LoraConfig, get_peft_model

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = taught()
        if adapters:
            torch.manual_seed(1)
            settings = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
            model = get_peft_model(model, settings)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch(rows(3))).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    assert len(plain) > 20
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.virtual_gpus(2)
@pytest.mark.parametrize(
    "heads", [("cuda:0", "cuda:0"), ("cuda:1", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:1")]
)
@pytest.mark.parametrize("taught_first", [True, False])
def test_split_over_two_gpus_it_is_the_loss_of_one_on_the_inputs_device(
    heads: tuple[str, str], taught_first: bool
) -> None:
    from accelerate import dispatch_model

    from trimtab.placement import move

    some = batch(rows(3))
    whole = taught()
    wanted = whole(**some)
    wanted.loss.backward()
    model = voice_model()
    if taught_first:
        teach_voice(model)
    places = {f"model.layers.{n}": "cuda:0" if n < 2 else "cuda:1" for n in range(4)}
    places |= {f"model.{name}": "cuda:0" for name in ("embed_tokens", "embed_audio_tokens", "rotary_emb")}
    places |= {"model.norm": "cuda:1", "text_lm_head": heads[0], "audio_lm_head": heads[1]}
    model = dispatch_model(model, device_map=places, main_device="cuda:0")
    teach_voice(model)
    out = model(**move(some, "cuda:0"))
    assert {value.device for value in out.values()} == {torch.device("cuda:0")}
    out.loss.backward()
    assert out.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    found = dict(model.named_parameters())
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name].grad.cpu(), parameter.grad, rtol=1e-3, atol=1e-6)


def test_without_a_text_head_the_codes_alone_are_trained() -> None:
    model, some = voice_model(8), batch(rows(3, books=8))
    codes = model(**some | {"labels": None}).loss
    model.text_lm_head = None
    teach_voice(model)
    out = model(**some)
    assert out.counts[0] == out.sums[0] == 0
    assert out.loss.item() == pytest.approx(codes.item() / 8, rel=1e-5)
    out.loss.backward()
    assert model.audio_lm_head.weight.grad.abs().sum() > 0
