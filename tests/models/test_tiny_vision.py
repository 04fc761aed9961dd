"""The built-in model that sees: a folder like any other, made once, in the words of its own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from trimtab.config.schema import ModelSettings, ShirgSettings
from trimtab.data.drawn import SIZE, drawn_rows
from trimtab.data.picture_collate import PictureCollator
from trimtab.models import IMAGE_TEXT, load_processor, load_skeleton
from trimtab.models import tiny_vision as tiny
from trimtab.models.load import load_model_config, model_source
from trimtab.models.shirg import attach_shirg, shirg_processor

SETTINGS = ModelSettings(name="tiny-vision")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Path(model_source(SETTINGS))


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    return model


def test_it_is_made_once(folder: Path) -> None:
    made = (folder / "model.safetensors").stat()
    assert Path(model_source(SETTINGS)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no scratch folder is left"


def test_its_weights_follow_from_its_seed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.random.get_rng_state()
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    again = loaded(Path(model_source(SETTINGS)))
    assert torch.equal(torch.random.get_rng_state(), state), "the seed of whoever asks stays as it was"
    first = loaded(folder).state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.state_dict().items())


def test_plan_knows_its_shape_without_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "none"))
    skeleton = load_skeleton(SETTINGS, IMAGE_TEXT)
    assert not (tmp_path / "none").exists()
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}


def test_the_folder_has_the_shape_that_is_planned_with(folder: Path) -> None:
    skeleton, model = load_skeleton(SETTINGS, IMAGE_TEXT), loaded(folder)
    shapes = {name: tensor.shape for name, tensor in skeleton.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    "text",
    ["What colour is the shape at the top left?", "redo 42 Ünïcode\nx  y ", "<no token>", "bottom right"],
)
def test_any_text_comes_back(text: str) -> None:
    tokenizer = tiny.tiny_vision_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_every_word_of_the_drawn_pictures_is_one_token() -> None:
    tokenizer = tiny.tiny_vision_tokenizer()
    for row in drawn_rows("train", 60, 0):
        for text in (row.messages[0]["content"][1]["text"], row.answers[0]):
            words = text.replace("?", " ?").split()
            assert len(tokenizer(text)["input_ids"]) == len(words)


def test_labels_are_on_the_answer_and_its_end(folder: Path) -> None:
    processor: Any = load_processor(SETTINGS, IMAGE_TEXT)
    rows = [row for row in drawn_rows("train", 60, 0) if " " in row.answers[0]][:2]
    batch = PictureCollator(processor, max_length=64)(rows)
    told = [processor.tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    assert told == [row.answers[0] + tiny.END for row in rows]
    per_picture = (tiny.PICTURE_SIZE // tiny.PATCH_SIZE) ** 2
    assert (batch["input_ids"] == processor.image_token_id).sum(1).tolist() == [per_picture] * 2
    assert batch["pixel_values"].shape == (2, 3, SIZE, SIZE)


def test_white_paper_is_nought_to_the_tower(folder: Path) -> None:
    processor: Any = load_processor(SETTINGS, IMAGE_TEXT)
    paper = Image.new("RGB", (SIZE, SIZE), "white")
    assert processor.image_processor([paper], return_tensors="pt")["pixel_values"].abs().max() == 0


def test_it_takes_shirgs_views(folder: Path) -> None:
    settings = ShirgSettings(size=128, crop=48, keep=6)
    model = loaded(folder)
    attach_shirg(model, settings)
    processor = shirg_processor(load_processor(SETTINGS, IMAGE_TEXT), settings, load_model_config(SETTINGS))
    batch = PictureCollator(processor, max_length=64)(drawn_rows("train", 2, 0))
    # 4 × 4 tokens a view: 4 of the whole one pooled, and 6 of the other.
    assert (batch["input_ids"] == model.config.image_token_id).sum(1).tolist() == [10, 10]
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert model.base_model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum() > 0
