"""Draws the pictures of docs/vision.md: SHIRG's two views of a chart, each score, and what is kept by it.

    python docs/figures/shirg_views.py [folder]

The model is of the real classes and goes the real way, but small: the script trains its tower for a minute, on charts
that it draws, to tell which colours are there. So attention and similarity mean something, and no more than that.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from transformers import LlavaConfig, LlavaForConditionalGeneration

from trimtab.config.vision import ShirgSettings
from trimtab.models.shirg import attach_shirg
from trimtab.models.shirg_processor import foveal_box, two_views
from trimtab.models.shirg_scores import radial, steady, unit_range
from trimtab.models.shirg_tokens import Look, look, through_tower

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 205, 40),
    "purple": (150, 60, 190),
    "orange": (250, 130, 20),
}
QUESTION = "how high is the {} bar"
WORDS = [*COLOURS, *QUESTION.replace("{} ", "").split()]
PARTS = ("attention", "similarity", "edges", "distance")
FEW, NOISE, MERGE = 256, 0.2, 0.98
TITLES = {"similarity": "similarity, asked for green"}
PANEL = 224
HEAT = np.array([(20, 24, 82), (40, 110, 142), (60, 170, 110), (180, 220, 45), (253, 231, 37)], float)


def ids_of(colour: str) -> torch.Tensor:
    return torch.tensor([WORDS.index(word) for word in QUESTION.format(colour).split()])


def chart(size: tuple[int, int], bars: list[tuple[str, float]], words: bool = True) -> Image.Image:
    """A bar chart: colours with heights from 0 to 1."""
    width, height = size
    picture = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(max(8, height // 32))
    left, foot, top = width // 10, height - height // 9, height // 8
    for step in range(6):
        y = foot - (foot - top) * step // 5
        draw.line([(left, y), (width - left // 2, y)], fill=(225, 225, 225), width=max(1, height // 350))
        if words:
            draw.text((left - 12, y), str(20 * step), fill=(70, 70, 70), font=font, anchor="rm")
    pitch = (width - 1.5 * left) / len(bars)
    for place, (colour, value) in enumerate(bars):
        x = left + pitch * (place + 0.5)
        box = [x - 0.3 * pitch, foot - (foot - top) * value, x + 0.3 * pitch, foot]
        draw.rectangle(box, fill=COLOURS[colour])
        if words:
            draw.text((x, box[1] - 6), f"{100 * value:.0f}", fill=(40, 40, 40), font=font, anchor="mb")
            draw.text((x, foot + 8), colour, fill=(70, 70, 70), font=font, anchor="ma")
    draw.line([(left, foot), (width - left // 2, foot)], fill=(60, 60, 60), width=max(1, height // 230))
    if words:
        title = ImageFont.load_default(height // 22)
        draw.text(
            (width / 2, height // 40), "Sales by colour, 2025", fill=(30, 30, 30), font=title, anchor="ma"
        )
    return picture


def pixels_of(view: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(view, np.float32)).permute(2, 0, 1) / 127.5 - 1


def small_model(size: int = 112) -> Any:
    """LLaVA's classes with a SigLIP tower of four layers and its pooling head; the language model only has words."""
    text = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlavaConfig(
        text_config={"model_type": "llama", **text, "num_key_value_heads": 4, "vocab_size": 64},
        vision_config={"model_type": "siglip_vision_model", **tower, "image_size": size, "patch_size": 14},
        image_token_index=63,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config)


def train_a_little(model: Any, steps: int, rows: int = 32) -> float:
    """Is there a bar of this colour? Asked of the most similar token, and of the pooling head. The last accuracy."""
    chance = random.Random(0)
    inner, words = model.base_model, model.get_input_embeddings()
    asked = torch.stack([ids_of(colour) for colour in COLOURS])
    scale = torch.nn.Parameter(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=2e-3)
    right = 0.0
    for _ in range(steps):
        drawn = [chance.sample(list(COLOURS), chance.randint(1, 4)) for _ in range(rows)]
        charts = [chart((112, 112), [(c, chance.uniform(0.2, 1)) for c in one], words=False) for one in drawn]
        there = torch.tensor([[float(colour in one) for colour in COLOURS] for one in drawn])
        out = inner.vision_tower(torch.stack([pixels_of(one) for one in charts]))
        project = inner.multi_modal_projector
        questions = F.normalize(words(asked).mean(1), dim=-1)
        tokens = F.normalize(project(out.last_hidden_state), dim=-1) @ questions.T
        pooled = F.normalize(project(out.pooler_output), dim=-1) @ questions.T
        closest = torch.logsumexp(10 * tokens, 1) / 10
        guess = scale[0] * closest + scale[2]
        loss = F.binary_cross_entropy_with_logits(guess, there)
        loss = loss + F.binary_cross_entropy_with_logits(scale[1] * pooled + scale[3], there)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = ((guess > 0) == there.bool()).float().mean().item()
    return right


def heat(view: Image.Image, values: torch.Tensor) -> Image.Image:
    """A score over the picture that it is of: dark is low, yellow is high."""
    side = int(len(values) ** 0.5)
    at = unit_range(values[None])[0].view(side, side).numpy() * (len(HEAT) - 1)
    low = np.minimum(at.astype(int), len(HEAT) - 2)
    colours = HEAT[low] + (HEAT[low + 1] - HEAT[low]) * (at - low)[..., None]
    over = Image.fromarray(colours.astype(np.uint8)).resize((PANEL, PANEL), Image.Resampling.NEAREST)
    grey = view.convert("L").convert("RGB").resize((PANEL, PANEL))
    return Image.blend(grey, over, 0.72)


def chosen(view: Image.Image, kept: torch.Tensor, side: int) -> Image.Image:
    """The view with everything that is not kept darkened."""
    mask = np.zeros(side * side, np.uint8)
    mask[kept.numpy()] = 255
    mask = mask.reshape(side, side)
    stays = Image.fromarray(mask).resize((PANEL, PANEL), Image.Resampling.NEAREST)
    seen = view.resize((PANEL, PANEL))
    return Image.composite(seen, Image.blend(seen, Image.new("RGB", seen.size, (35, 38, 48)), 0.88), stays)


def sheet(rows: list[list[tuple[str, Image.Image]]], file: Path) -> None:
    """Panels with their titles, in rows; few enough colours for a small file."""
    gap, line = 10, 22
    width = max(sum(p.width + gap for _, p in row) for row in rows) + gap
    height = sum(max(p.height for _, p in row) + line + gap for row in rows) + gap
    page, y = Image.new("RGB", (width, height), "white"), gap
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(14)
    for row in rows:
        x = gap
        for title, panel in row:
            draw.text((x, y), title, fill=(20, 20, 20), font=font)
            page.paste(panel, (x, y + line))
            draw.rectangle(
                [x, y + line, x + panel.width - 1, y + line + panel.height - 1], outline=(150, 150, 150)
            )
            x += panel.width + gap
        y += max(p.height for _, p in row) + line + gap
    page.quantize(96, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def main(folder: Path, steps: int = 500) -> None:
    settings = ShirgSettings()
    model = small_model()
    print(f"colours told right after {steps} steps: {train_a_little(model, steps):.0%}")
    attach_shirg(model.eval(), settings)
    grid = model.shirg.grid
    bars = [("red", 0.45), ("yellow", 0.8), ("green", 0.62), ("purple", 0.3), ("blue", 0.94), ("orange", 0.5)]
    picture = chart((1000, 700), bars)
    whole, fovea = two_views(picture, grid.size, settings.crop, (settings.centre_x, settings.centre_y))
    pixels = torch.stack([pixels_of(whole), pixels_of(fovea)])[None]

    def looked(colour: str = "green", keep: int = grid.keep, **changes: Any) -> Look:
        asked = model.get_input_embeddings()(ids_of(colour)).mean(0, keepdim=True)
        wanted = settings.model_copy(update=changes)
        return look(model.base_model, wanted, replace(grid, keep=keep), pixels, asked)

    with torch.no_grad():
        _draw(folder, model, picture, (whole, fovea), pixels, looked)


def _draw(
    folder: Path,
    model: Any,
    picture: Image.Image,
    views: tuple[Image.Image, Image.Image],
    pixels: torch.Tensor,
    looked: Any,
) -> None:
    grid, settings, (whole, fovea) = model.shirg.grid, model.shirg.settings, views
    marked = picture.copy()
    box = foveal_box(*picture.size, settings.crop, (settings.centre_x, settings.centre_y))
    ImageDraw.Draw(marked).rectangle(box, outline=(220, 0, 120), width=6)
    marked = marked.resize((320, PANEL), Image.Resampling.LANCZOS)
    pooled = whole.resize((PANEL, PANEL))
    lines, step = ImageDraw.Draw(pooled), PANEL / (grid.side // grid.pool)
    for place in range(1, grid.side // grid.pool):
        lines.line([(place * step, 0), (place * step, PANEL)], fill=(170, 200, 230))
        lines.line([(0, place * step), (PANEL, place * step)], fill=(170, 200, 230))
    result = looked()
    sheet(
        [
            [
                ("the picture, and where the fovea looks", marked),
                (f"whole view: {grid.pooled} tokens", pooled),
                (f"foveal view: {grid.keep} of {grid.patches}", chosen(fovea, result.kept[0], grid.side)),
            ]
        ],
        folder / "shirg-views.png",
    )
    alone = {name: looked(keep=FEW, **only(name)) for name in PARTS}
    rows = [
        [(TITLES.get(name, name), heat(fovea, result.parts[name][0])) for name in PARTS],
        [(f"its best {FEW}", chosen(fovea, alone[name].kept[0], grid.side)) for name in PARTS],
    ]
    sheet(rows, folder / "shirg-scores.png")
    readings = through_tower(model.base_model, pixels).readings
    inward = radial(grid.side, settings.radial_sigma, "inward", readings)
    agreed = steady(readings, NOISE)[0].nonzero().flatten()

    def kept(**changes: Any) -> Image.Image:
        return chosen(fovea, looked(**changes).kept[0], grid.side)

    blue = looked("blue").parts["similarity"][0]
    columns = [
        [("score, default weights", heat(fovea, result.score[0])), (f"{grid.keep} kept by it", kept())],
        [
            ("similarity, asked for blue", heat(fovea, blue)),
            (f"its best {FEW}", kept(colour="blue", keep=FEW, **only("similarity"))),
        ],
        [("radial: inward", heat(fovea, inward)), (f"{grid.keep} kept with it", kept(radial="inward"))],
        [
            (f"noise: {NOISE} lets these pass", chosen(fovea, agreed, grid.side)),
            (f"{grid.keep} kept with it", kept(noise=NOISE)),
        ],
        [
            (f"the best {FEW}", kept(keep=FEW)),
            (f"the best {FEW}, merge: {MERGE}", kept(keep=FEW, merge=MERGE)),
        ],
    ]
    sheet([list(row) for row in zip(*columns, strict=True)], folder / "shirg-choice.png")


def only(name: str) -> dict[str, float]:
    """The weights that leave one score alone."""
    return {other: float(other == name) for other in PARTS}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
