"""SHIRG's views through the collator that every model has: labels, lengths and answers, on LLaVA-OneVision's shape."""

from __future__ import annotations

import pickle

import torch

from picture_rows import drawn, question, turns
from tiny_processors import tiny_pair
from tiny_shirg import SMALL, TOKENS
from trimtab.data.picture_collate import PictureCollator
from trimtab.data.render import IGNORED
from trimtab.models.see import answer_pictures
from trimtab.models.shirg import attach_shirg
from trimtab.models.shirg_processor import shirg_processor
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def test_two_views_are_collated_trained_on_and_answered() -> None:
    model, plain = tiny_pair("llava_onevision")
    processor = shirg_processor(plain, SMALL, model.config)
    model = attach_shirg(model, SMALL)
    made = pickle.loads(pickle.dumps(PictureCollator(processor)))
    said = (("user", "<image>What?"), ("assistant", "a line"), ("user", "<image>And?"), ("assistant", "red"))
    rows = [
        question("How many bars?", "14", drawn(90, 60)),
        question("What is three and four?", "seven"),
        turns(*said, pictures=(drawn(60, 60), drawn(40, 70, "green"))),
    ]
    batch = made(rows)
    mark = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert (batch["input_ids"] == mark).sum(1).tolist() == [TOKENS, 0, 2 * TOKENS]
    assert batch["pixel_values"].shape == (3, 2, 3, 56, 56)
    labels = batch["labels"]
    learnt = [processor.tokenizer.decode(row[row != IGNORED]) for row in labels]
    assert learnt == ["14<|im_end|>", "seven<|im_end|>", "a line<|im_end|>red<|im_end|>"]
    loss = model(**batch).loss
    loss.backward()
    assert loss.isfinite()
    tower = model.model.vision_tower.encoder.layers[0].self_attn.q_proj.weight.grad
    assert tower is not None
    assert tower.abs().sum() > 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(4)
    together = answer_pictures(model, processor, made, rows, PLAN, 5)
    assert together == [answer_pictures(model, processor, made, [row], PLAN, 5)[0] for row in rows]
