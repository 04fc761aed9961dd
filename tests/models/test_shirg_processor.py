"""SHIRG's two views on the CPU, and the image tokens that stand for them in the text."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ProcessorMixin

from tiny_models import SIGLIP
from tiny_processors import tiny_config, tiny_processor
from tiny_shirg import SMALL, TOKENS
from trimtab.errors import RequestError
from trimtab.models.shirg import attach_shirg, shirg_processor
from trimtab.models.shirg_grid import MODELS
from trimtab.models.shirg_processor import foveal_box, two_views

TOWER = {"model_type": "siglip_vision_model", **SIGLIP}


def config_of(kind: str) -> Any:
    return tiny_config(kind, tiny_processor(kind))


def config_and_processor(kind: str) -> tuple[Any, Any]:
    from transformers import AutoConfig

    plain = tiny_processor(kind)
    made = tiny_config(kind, plain)
    if kind == "llava":
        made = AutoConfig.for_model(**{**made.to_dict(), "vision_config": TOWER})
    return made, shirg_processor(plain, SMALL, made)


def quarters() -> Image.Image:
    """120 × 80: red, green, blue and white quarters, and a black square of 20 in the middle."""
    pixels = np.zeros((80, 120, 3), np.uint8)
    pixels[:40, :60], pixels[:40, 60:], pixels[40:, :60], pixels[40:, 60:] = (
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
        (255, 255, 255),
    )
    pixels[30:50, 50:70] = 0
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("size", "crop", "centre", "box"),
    [
        ((120, 80), 20, (0.5, 0.5), (50, 30, 70, 50)),
        ((120, 80), 20, (0.0, 0.0), (0, 0, 20, 20)),
        ((120, 80), 20, (1.0, 1.0), (100, 60, 120, 80)),
        ((120, 80), 448, (0.5, 0.5), (20, 0, 100, 80)),
        ((120, 80), 448, (1.0, 0.5), (40, 0, 120, 80)),
        ((1000, 2000), 448, (0.25, 0.75), (26, 1276, 474, 1724)),
        ((1, 1), 448, (0.5, 0.5), (0, 0, 1, 1)),
    ],
)
def test_the_fovea_is_a_square_inside_the_picture(
    size: tuple[int, int], crop: int, centre: tuple[float, float], box: tuple[int, ...]
) -> None:
    assert foveal_box(*size, crop, centre) == box


def test_one_view_is_the_whole_picture_and_one_its_middle() -> None:
    whole, fovea = (np.asarray(view) for view in two_views(quarters(), 56, 20, (0.5, 0.5)))
    assert whole.shape == fovea.shape == (56, 56, 3)
    corners = [whole[0, 0], whole[0, -1], whole[-1, 0], whole[-1, -1]]
    assert [tuple(map(int, c)) for c in corners] == [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert not whole[28, 28].any()
    assert not fovea.any()  # the black square alone, though it was smaller than the view
    _, red = (np.asarray(view) for view in two_views(quarters(), 56, 20, (0.1, 0.1)))
    assert (red == (255, 0, 0)).all()


@pytest.mark.parametrize("kind", MODELS)
def test_pixels_and_tokens_of_a_batch(kind: str) -> None:
    made, processor = config_and_processor(kind)
    rows = [[quarters()], [quarters(), quarters().resize((30, 200))]]
    texts = ["<image> What is it?", "<image><image> And these two?"]
    batch = processor(text=texts, images=rows, return_tensors="pt", padding=True)
    assert batch["pixel_values"].shape == (3, 2, 3, 56, 56)
    assert batch["pixel_values"].dtype == torch.float32
    assert (batch["input_ids"] == made.image_token_id).sum(1).tolist() == [TOKENS, 2 * TOKENS]
    assert not {"image_sizes", "batch_num_images"} & set(batch)


@pytest.mark.parametrize("kind", MODELS)
def test_the_tower_gets_its_own_mean_and_deviation(kind: str) -> None:
    _, processor = config_and_processor(kind)
    square = Image.new("RGB", (56, 56), (10, 200, 90))
    views = processor(text=["<image>"], images=[[square]], return_tensors="pt")["pixel_values"][0]
    own = processor.image_processor
    expected = [
        (value / 255 - mean) / deviation
        for value, mean, deviation in zip((10, 200, 90), own.image_mean, own.image_std, strict=True)
    ]
    for view in views:
        assert torch.allclose(view.mean((1, 2)), torch.tensor(expected), atol=1e-5)


def test_a_row_without_a_picture_has_no_image_token() -> None:
    made, processor = config_and_processor("llava_onevision")
    rows = [[], [quarters()]]
    batch = processor(text=["Hello?", "<image> And this?"], images=rows, return_tensors="pt", padding=True)
    assert (batch["input_ids"] == made.image_token_id).sum(1).tolist() == [0, TOKENS]
    assert batch["pixel_values"].shape[0] == 1
    words = processor(text=["Hello?"], return_tensors="pt")
    assert "pixel_values" not in words


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_models_own_processor_in_all_else(kind: str, tmp_path: Path) -> None:
    _, processor = config_and_processor(kind)
    plain = tiny_processor(kind)
    assert isinstance(processor, ProcessorMixin)
    assert (processor.image_token, processor.chat_template) == (plain.image_token, plain.chat_template)
    assert processor.tokenizer.get_vocab() == plain.tokenizer.get_vocab()
    if processor.chat_template:
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        assert processor.apply_chat_template(asked) == plain.apply_chat_template(asked)
    processor.save_pretrained(tmp_path / "with")
    plain.save_pretrained(tmp_path / "without")
    for file in sorted((tmp_path / "without").iterdir()):
        assert (tmp_path / "with" / file.name).read_text() == file.read_text()


def test_the_plain_processor_stays_as_it_was() -> None:
    plain = tiny_processor("llava_onevision")
    before = plain(text=["<image>"], images=[[quarters()]], return_tensors="pt")
    shirg_processor(plain, SMALL, tiny_config("llava_onevision", plain))
    after = plain(text=["<image>"], images=[[quarters()]], return_tensors="pt")
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_it_travels_to_workers(kind: str, how: Any) -> None:
    _, processor = config_and_processor(kind)
    given = {"text": ["<image> What?"], "images": [[quarters()]], "return_tensors": "pt"}
    here, there = processor(**given), how(processor)(**given)
    assert all(torch.equal(here[key], there[key]) for key in here)


def test_what_is_no_picture_is_refused() -> None:
    _, processor = config_and_processor("llava_onevision")
    with pytest.raises(RequestError, match="a picture came as ndarray"):
        processor(text=["<image>"], images=[[np.zeros((8, 8, 3), np.uint8)]], return_tensors="pt")


def test_a_processor_of_other_views_is_found_when_the_model_is_built() -> None:
    from transformers import AutoModelForImageTextToText

    made, processor = config_and_processor("llava_onevision")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(made)
    with pytest.raises(RequestError, match=r"up to 5 views of a picture, and the model expects 2"):
        attach_shirg(model, SMALL, tiny_processor("llava_onevision"))
    more = SMALL.model_copy(update={"keep": 10})
    with pytest.raises(RequestError, match=r"56 pixels and writes 13 tokens .* expects 2 of 56 and 14"):
        attach_shirg(model, more, processor)
    assert attach_shirg(model, SMALL, processor) is model
    with pytest.raises(RequestError, match=r"writes 14 tokens a picture; the model expects 2 of 56 and 13"):
        shirg_processor(tiny_processor("llava_onevision"), more, model.config)


def test_a_processor_of_another_model_is_found_when_it_is_built() -> None:
    made = config_of("llava_onevision")
    made.image_token_id = made.image_token_index = 50
    with pytest.raises(RequestError, match=r"the model looks for token 50"):
        shirg_processor(tiny_processor("llava_onevision"), SMALL, made)


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_processor_makes_the_model_takes(kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    made, processor = config_and_processor(kind)
    torch.manual_seed(0)
    model = attach_shirg(AutoModelForImageTextToText.from_config(made).eval(), SMALL, processor)
    batch = processor(text=["<image> What?"], images=[[quarters()]], return_tensors="pt")
    batch.pop("labels", None)
    told = model.generate(**batch, max_new_tokens=2, do_sample=False)
    assert told.shape[1] <= batch["input_ids"].shape[1] + 2
    assert torch.isfinite(model(**batch).logits).all()
