"""SHIRG's views in models of transformers: what they take, what they give, what is refused, what is learned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tiny_models import SIGLIP, TEXT, config, skeleton
from tiny_shirg import SMALL, TOKENS, batch_of, model_of
from trimtab.config.vision import ShirgSettings
from trimtab.errors import RequestError
from trimtab.models.shirg import attach_shirg, saved_shirg
from trimtab.models.shirg_grid import MODELS, grid_of
from trimtab.models.shirg_tokens import look, through_tower


def test_the_default_is_256_and_724_tokens() -> None:
    tower = {"model_type": "siglip_vision_model", **SIGLIP, "image_size": 384}
    grid = grid_of(ShirgSettings(), config("llava_onevision", vision_config=tower))
    assert (grid.side, grid.pooled, grid.keep, grid.tokens) == (32, 256, 724, 980)
    model = model_of("llava_onevision", ShirgSettings())
    pixels = torch.randn(1, 2, 3, 448, 448)
    with torch.no_grad():
        given = model.get_image_features(pixel_values=pixels).pooler_output
    assert [tuple(one.shape) for one in given] == [(980, TEXT["hidden_size"])]


@pytest.mark.parametrize("kind", MODELS)
def test_it_trains_and_answers(kind: str) -> None:
    model = model_of(kind)
    batch = batch_of(rows=2, pictures=2)
    if kind == "paligemma":
        batch["token_type_ids"] = (batch["labels"] != -100).long()
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.base_model.vision_tower.embeddings.patch_embedding.weight.grad.norm() > 0
    prompt = {key: value[:, :-3] for key, value in batch.items() if key in ("input_ids", "attention_mask")}
    asked = prompt | {"pixel_values": batch["pixel_values"]}
    once = model.generate(**asked, max_new_tokens=3, do_sample=False)
    assert once.shape == (2, prompt["input_ids"].shape[1] + 3)
    # Beams repeat each row with its own pictures.
    beams = model.generate(**asked, max_new_tokens=3, do_sample=False, num_beams=2, num_return_sequences=2)
    assert len(beams) == 4


def test_generation_sees_what_training_sees() -> None:
    model = model_of("llava_onevision")
    batch = batch_of(rows=2)
    logits = model(**batch).logits
    prompt = batch["input_ids"][:, :-3]
    told = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        pixel_values=batch["pixel_values"],
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert torch.allclose(told.logits[0], logits[:, -4], atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_names_of_weights_stay_and_the_settings_are_saved(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    plain = model_of("llava").state_dict() if kind == "llava" else skeleton(kind).state_dict()
    assert list(model.state_dict()) == list(plain)
    assert saved_shirg(config("llava_onevision")) is None
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    kept = saved_shirg(again.config)
    assert kept == SMALL
    attach_shirg(again.eval(), kept)
    batch = batch_of()
    assert torch.equal(model(**batch).loss, again(**batch).loss)


def test_all_views_of_a_batch_go_through_the_tower_once() -> None:
    model = model_of("llava_onevision")
    calls = []
    model.base_model.vision_tower.register_forward_pre_hook(
        lambda _, args: calls.append(tuple(args[0].shape))
    )
    model(**batch_of(rows=3, pictures=2))
    assert calls == [(12, 3, 56, 56)]


def test_a_text_without_pictures_leaves_the_tower_alone() -> None:
    model = model_of("llava_onevision")
    model.base_model.vision_tower.register_forward_pre_hook(lambda *_: pytest.fail("the tower ran"))
    ids = torch.randint(3, 99, (2, 6))
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    assert model.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (2, 8)


def test_the_whole_view_is_pooled_and_the_fovea_chosen_in_raster_order() -> None:
    model = model_of("llava_onevision", SMALL.model_copy(update={"similarity": 0.0}))
    pixels = batch_of(rows=3)["pixel_values"]
    seen = through_tower(model.base_model, pixels)
    found = look(model.base_model, model.shirg.settings, model.shirg.grid, pixels, None)
    connector = model.base_model.multi_modal_projector
    square = seen.whole[:, [0, 1, 4, 5]].mean(1)
    assert torch.allclose(found.tokens[:, 0], connector(square), atol=1e-5)
    assert torch.equal(found.kept, found.kept.sort(-1).values)
    for row, kept in enumerate(found.kept):
        assert torch.allclose(found.tokens[row, 4:], connector(seen.fovea[row, kept]), atol=1e-5)


def test_positions_are_interpolated_to_the_views_grid() -> None:
    model = model_of("llava_onevision")
    tower = model.base_model.vision_tower
    with torch.no_grad():
        tower.embeddings.patch_embedding.weight.zero_()
        tower.embeddings.patch_embedding.bias.zero_()
        out = tower.embeddings(torch.zeros(1, 3, 56, 56), interpolate_pos_encoding=True)
    assert out.shape == (1, 16, SIGLIP["hidden_size"])
    assert len({tuple(token) for token in out[0].tolist()}) == 16  # four trained positions, sixteen places


def test_edges_choose_the_tokens_under_the_line() -> None:
    only = {"attention": 0.0, "similarity": 0.0, "distance": 0.0, "edges": 1.0, "keep": 4}
    model = model_of("llava_onevision", SMALL.model_copy(update=only))
    pixels = torch.zeros(1, 2, 3, 56, 56)
    pixels[:, 1, :, :, 35:] = 1.0  # the foveal view alone has a line, in the third column of patches
    found = look(model.base_model, model.shirg.settings, model.shirg.grid, pixels, None)
    assert found.kept.tolist() == [[2, 6, 10, 14]]


@pytest.mark.parametrize("head", [True, False])
def test_attention_is_that_of_the_pooling_head_where_there_is_one(head: bool) -> None:
    model = model_of("llava", vision_use_head=head)
    pixels = batch_of(rows=3)["pixel_values"]
    tower = model.base_model.vision_tower
    seen = through_tower(model.base_model, pixels)
    if head:
        tokens = tower(pixels[:, 1], interpolate_pos_encoding=True).last_hidden_state
        probe = tower.head.probe.expand(3, -1, -1)
        direct = tower.head.attention(probe, tokens, tokens, need_weights=True)[1][:, 0]
        assert seen.readings.shape == (3, SIGLIP["num_attention_heads"], 16)
    else:
        direct = torch.cosine_similarity(seen.fovea, seen.fovea.mean(1, keepdim=True), dim=-1)
        assert seen.readings.shape == (3, 1, 16)
        every = through_tower(model.base_model, pixels, every_layer=True)
        assert every.readings.shape == (3, SIGLIP["num_hidden_layers"], 16)
        assert torch.equal(every.attention, seen.attention)
    assert torch.allclose(seen.attention, direct, atol=1e-5)


def chosen_with(model: Any, monkeypatch: pytest.MonkeyPatch, **batch: Any) -> torch.Tensor:
    """Which foveal tokens a call of the model keeps."""
    from trimtab.models import shirg

    found = []

    def spying(*args: Any) -> Any:
        found.append(look(*args))
        return found[-1]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(shirg, "look", spying)
        model(**batch)
    return found[0].kept


ONLY_TEXT = SMALL.model_copy(update={"attention": 0.0, "similarity": 1.0, "edges": 0.0, "distance": 0.0})


def test_another_question_keeps_other_tokens_and_another_answer_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llava_onevision", ONLY_TEXT)
    batch = batch_of(rows=1)
    first = chosen_with(model, monkeypatch, **batch)
    other_answer = {**batch, "input_ids": batch["input_ids"].clone()}
    other_answer["input_ids"][:, -3:] = torch.tensor([[90, 91, 92]])
    assert torch.equal(first, chosen_with(model, monkeypatch, **other_answer))
    others = []
    for word in range(40, 50):
        asked = {**batch, "input_ids": batch["input_ids"].clone()}
        asked["input_ids"][:, -7:-3] = word
        others.append(chosen_with(model, monkeypatch, **asked))
    assert any(not torch.equal(first, other) for other in others)


def test_a_callers_question_mask_stands_in_for_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llava_onevision", ONLY_TEXT)
    batch = batch_of(rows=2)
    mask = (batch["labels"] == -100).long()
    expected = chosen_with(model, monkeypatch, **batch)
    labels = batch.pop("labels")
    masked = {**batch, "input_ids": torch.where(labels != -100, 77, batch["input_ids"])}
    assert torch.equal(expected, chosen_with(model, monkeypatch, **masked, question_mask=mask))


def test_each_picture_is_asked_the_question_of_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llava_onevision", ONLY_TEXT)
    batch = batch_of(rows=2, pictures=2)
    together = chosen_with(model, monkeypatch, **batch)
    for row in range(2):
        alone = {key: value[row : row + 1] for key, value in batch.items() if key != "pixel_values"}
        pixels = batch["pixel_values"][2 * row : 2 * row + 2]
        assert torch.equal(
            together[2 * row : 2 * row + 2], chosen_with(model, monkeypatch, **alone, pixel_values=pixels)
        )


def test_padding_does_not_speak_for_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llava_onevision", ONLY_TEXT)
    batch = batch_of(rows=1)
    del batch["labels"]
    left = torch.full((1, 5), 33)
    padded = {
        "input_ids": torch.cat([left, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.zeros_like(left), batch["attention_mask"]], 1),
        "pixel_values": batch["pixel_values"],
    }
    assert torch.equal(chosen_with(model, monkeypatch, **batch), chosen_with(model, monkeypatch, **padded))


def test_embedded_text_is_as_good_as_its_ids() -> None:
    model = model_of("llava_onevision", SMALL)
    batch = batch_of(rows=2)
    expected = model(**batch).logits
    embedded = model.get_input_embeddings()(batch.pop("input_ids"))
    assert torch.allclose(model(inputs_embeds=embedded, **batch).logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"noise": 0.05}, "noise"),
        ({"merge": 0.2}, "merge"),
        ({"radial": "inward"}, "radial"),
        ({"radial": "outward", "noise": 0.1, "merge": 0.9}, "all"),
    ],
)
def test_every_setting_keeps_the_number_of_tokens(more: dict[str, Any], says: str) -> None:
    model = model_of("llava_onevision", SMALL.model_copy(update=more))
    model(**batch_of()).loss.backward()
    pixels = batch_of()["pixel_values"]
    question = torch.randn(2, TEXT["hidden_size"])
    found = look(model.base_model, model.shirg.settings, model.shirg.grid, pixels, question)
    assert found.tokens.shape == (2, TOKENS, TEXT["hidden_size"]), says


def test_dropped_tokens_are_zero_in_training_alone() -> None:
    model = model_of("llava_onevision", SMALL.model_copy(update={"token_dropout": 0.5, "similarity": 0.0}))
    pixels = batch_of(rows=8)["pixel_values"]
    shirg = model.shirg
    whole = look(model.base_model, shirg.settings, shirg.grid, pixels, None).tokens
    assert whole.abs().sum(-1).min() > 0
    torch.manual_seed(0)
    dropped = look(model.train().base_model, shirg.settings, shirg.grid, pixels, None).tokens
    gone = dropped.abs().sum(-1) == 0
    assert not gone[:, :4].any()  # the whole view is never thinned
    assert 20 < gone.sum().item() < 52
    assert torch.allclose(dropped[~gone], whole[~gone], atol=1e-5)


def test_five_views_where_two_are_expected() -> None:
    model = model_of("llava_onevision")
    with pytest.raises(RequestError, match=r"5 views a picture .* expects 2 views of 56 × 56"):
        model(**batch_of(views=5))
    batch = batch_of()
    batch["pixel_values"] = batch["pixel_values"][:, 0]
    with pytest.raises(RequestError, match=r"1 view a picture .* expects 2 views"):
        model(**batch)
    with pytest.raises(RequestError, match=r"5 views a picture .* expects 2 views"):
        model.generate(input_ids=batch["input_ids"], pixel_values=batch_of(views=5)["pixel_values"])


def test_a_text_with_another_number_of_image_tokens() -> None:
    model = model_of("llava_onevision")
    batch = batch_of(rows=2)
    batch["input_ids"][0, 3] = 7
    with pytest.raises(
        RequestError, match=r"25 image tokens for 2 pictures.* puts 26 there \(13 a picture\)"
    ):
        model(**batch)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 60}, r"shirg.size=60: .* patches of 14 pixels[\s\S]*such as 56 or 70"),
        ({"pool": 3}, r"shirg.pool=3: .* 4 × 4 patches[\s\S]*one of 1, 2, 4"),
        ({"keep": 17}, r"shirg.keep=17: .* 16 patches[\s\S]*16 or less"),
    ],
)
def test_settings_that_do_not_fit_the_tower(settings: dict[str, Any], says: str) -> None:
    model = skeleton("llava_onevision")
    with pytest.raises(RequestError, match=says):
        attach_shirg(model, SMALL.model_copy(update=settings))
    assert not hasattr(model, "shirg")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("idefics3", "pixel shuffle"),
        ("gemma3", "pools the whole grid"),
        ("qwen2_5_vl", "at their own size"),
        ("qwen3_vl", "at their own size"),
    ],
)
def test_other_models_are_refused_with_the_reason(kind: str, why: str) -> None:
    with pytest.raises(RequestError, match=f"the model is {kind}[\\s\\S]*{why}[\\s\\S]*llava_onevision"):
        attach_shirg(skeleton(kind), SMALL)


def test_a_tower_with_a_class_token_is_refused() -> None:
    clip = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **SIGLIP},
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(clip)
    with pytest.raises(RequestError, match=r"clip_vision_model[\s\S]*class token"):
        attach_shirg(model, SMALL)


def test_a_copy_of_the_model_sees_with_its_own_weights() -> None:
    model = model_of("llava_onevision")
    other = copy.deepcopy(model)
    batch = batch_of()
    before = model(**batch).loss
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    assert torch.equal(model(**batch).loss, before)
    assert not torch.equal(other(**batch).loss, before)


def test_an_image_token_outside_the_vocabulary() -> None:
    """As PaliGemma's may be: it is never looked up among the words."""
    model = attach_shirg(skeleton("paligemma", "cpu", image_token_index=200).eval(), SMALL)
    batch = batch_of()
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["input_ids"] == 100, 200)
    assert torch.isfinite(model(**batch, token_type_ids=(batch["labels"] != -100).long()).loss)
