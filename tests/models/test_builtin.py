"""The built-in model: converted once, whole, and cut into tokens as SmolLM2 was trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.config.schema import ModelSettings
from trimtab.models import load_tokenizer
from trimtab.models.builtin import builtin_folder


def test_numbers_are_cut_into_single_digits() -> None:
    tokenizer = load_tokenizer(ModelSettings())
    assert tokenizer.tokenize("in 1984") == ["in", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.model_max_length == 8192
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_the_folder_holds_safetensors_and_no_pickle() -> None:
    names = {file.name for file in builtin_folder().iterdir()}
    assert "model.safetensors" in names
    assert not [n for n in names if n.endswith((".bin", ".pt", ".pth", ".pkl"))]


@pytest.mark.slow
def test_its_preparation_is_told_in_plain_lines_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    before = (reader.tqdm, logging.is_progress_bar_enabled())
    folder = builtin_folder()
    said = capfd.readouterr()
    assert said.out == ""
    first, last = said.err.splitlines()
    assert first == "preparing the built-in model (once) …"
    assert re.fullmatch(r"preparing the built-in model \(once\) … done, \d+ s", last)
    assert (reader.tqdm, logging.is_progress_bar_enabled()) == before
    assert builtin_folder() == folder
    assert capfd.readouterr() == ("", ""), "silent when it is there"


@pytest.mark.slow
def test_it_answers_sensibly() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(ModelSettings())
    model = AutoModelForCausalLM.from_pretrained(builtin_folder())
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=2)
    assert "Paris" in tokenizer.decode(out[0])
