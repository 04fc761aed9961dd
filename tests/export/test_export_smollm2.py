"""The built-in model with a LoRA, exported and compared with transformers in real llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import PROMPTS, LlamaCpp, largest_gap, reference_log_probs, write_lora_run
from peft import PeftModel
from transformers import AutoModelForCausalLM

from trimtab.config import Config
from trimtab.export import export_run, gotemplate
from trimtab.export.gguf_model import write_model
from trimtab.export.gguf_vocab import read_vocab
from trimtab.export.weights import folder_entries
from trimtab.models import load_tokenizer, model_source

pytestmark = pytest.mark.slow
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIKELIEST = 3000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(Config().model)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return write_lora_run(tmp_path_factory.mktemp("smollm2") / "run", "smollm2", tokenizer, targets=TARGETS)


@pytest.fixture(scope="module")
def tuned(run: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model_source(Config().model), dtype=torch.float32)
    return PeftModel.from_pretrained(base, run / "adapter").eval()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    chat = [{"role": "user", "content": "Why does my model hang on two GPUs?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return [tokenizer(prompt).input_ids for prompt in [*PROMPTS, text]]


def test_ollama_export_agrees_with_transformers(run: Path, tuned: Any, tokenizer: Any, prompts: Any) -> None:
    result = export_run(run, "ollama", create=False)
    cpp = LlamaCpp(result.files[0])
    assert [cpp.tokens(prompt) for prompt in PROMPTS] == prompts[: len(PROMPTS)]
    assert len(prompts) > 10
    assert largest_gap(tuned, cpp, prompts, LIKELIEST) < 0.05
    with tuned.disable_adapter():
        assert (
            reference_log_probs(tuned, prompts[0]) - reference_log_probs(tuned, prompts[0])
        ).abs().max() == 0
        changed = reference_log_probs(tuned, prompts[0])
    assert (changed - reference_log_probs(tuned, prompts[0])).abs().max() > 0.5, "the LoRA must matter"

    text = (result.folder / "Modelfile").read_text(encoding="utf-8")
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    ):
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert gotemplate.render(template, messages) == wanted
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert 'LICENSE "apache-2.0"' in text


def test_q8_0_stays_close(run: Path, tuned: Any, prompts: Any) -> None:
    file = export_run(run, "gguf", dtype="q8_0").files[0]
    assert largest_gap(tuned, LlamaCpp(file), prompts, LIKELIEST) < 0.6


def test_adapter_over_the_base_agrees_with_peft(
    run: Path, tuned: Any, tokenizer: Any, prompts: Any, tmp_path: Path
) -> None:
    folder = Path(model_source(Config().model))
    config = tuned.get_base_model().config
    write_model(
        tmp_path / "b.gguf", config, folder_entries(folder), read_vocab(tokenizer), dtype="f16", name="b"
    )
    adapter = export_run(run, "adapter-gguf").files[0]
    assert largest_gap(tuned, LlamaCpp(tmp_path / "b.gguf", adapter), prompts, LIKELIEST) < 0.05
