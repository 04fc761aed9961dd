"""Samples are asked exactly as training rendered its rows."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from trimtab.config.schema import ModelSettings
from trimtab.models import load_model, load_tokenizer
from trimtab.models.sample import answer, prompt_ids
from trimtab.placement import PlacementPlan

PLAN = PlacementPlan(device="cpu", precision="fp32", scaler=False, weight_precision="fp32", strategy="single")


def test_a_tokenizer_that_adds_bos_gets_exactly_one(tiny_model: Path) -> None:
    from tokenizers import processors

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    eos = tokenizer.eos_token_id
    plain = prompt_ids(tokenizer, "Hello")
    assert plain[0] == start
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", eos)]
    )
    assert prompt_ids(tokenizer, "Hello") == [eos, *plain]
    tokenizer.chat_template = "<|im_end|>" + tokenizer.chat_template
    assert prompt_ids(tokenizer, "Hello") == [eos, *plain]


def test_answers_are_greedy_and_leave_the_mode_alone(tiny_model: Path) -> None:
    settings = ModelSettings(name=str(tiny_model))
    model, tokenizer = load_model(settings, PLAN), load_tokenizer(settings)
    model.train()
    first = answer(model, tokenizer, ["What is 1 plus 1?", "Hi"], PLAN, 8)
    assert answer(model, tokenizer, ["What is 1 plus 1?", "Hi"], PLAN, 8) == first
    assert len(first) == 2
    assert model.training
