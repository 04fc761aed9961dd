"""GGUF files in real llama.cpp: the same tokens and the same log-probabilities as transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from export_helpers import PROMPTS, LlamaCpp, byte_level_tokenizer, largest_gap, tiny_model, write_full_run
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from trimtab.errors import RequestError, TrimtabError
from trimtab.export import export_run
from trimtab.export.gguf_model import gguf_name, interleave, write_model
from trimtab.export.gguf_vocab import read_vocab
from trimtab.export.weights import model_entries

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama, grouped heads, tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, wide heads, all biases": lambda: LlamaConfig(
        **SIZES, head_dim=32, attention_bias=True, mlp_bias=True
    ),
    "llama, llama3 rope": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama, linear rope": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    ),
    "llama, yarn rope": lambda: LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "qwen2, biases": lambda: Qwen2Config(**SIZES),
    "qwen3, wide heads": lambda: Qwen3Config(**SIZES, head_dim=32),
    "qwen3, yarn with its own factor": lambda: Qwen3Config(
        **SIZES, head_dim=32, rope_parameters={**YARN, "attention_factor": 1.5}
    ),
}


def export(folder: Path, config: Any, dtype: str = "f32") -> tuple[Any, Any, Path, list[str]]:
    model, tokenizer = tiny_model(config), byte_level_tokenizer("qwen2")
    result = export_run(write_full_run(folder, model, tokenizer), "gguf", dtype=dtype)
    return model, tokenizer, result.files[0], result.notes


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("name", MODELS)
def test_f32_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    model, tokenizer, file, _ = export(tmp_path, MODELS[name]())
    cpp = LlamaCpp(file)
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert [cpp.tokens(prompt) for prompt in PROMPTS] == ids
    assert largest_gap(model, cpp, ids, 512) < 1e-3


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 0.05), ("bf16", 0.25), ("q8_0", 0.5)])
def test_smaller_formats_stay_close(config: Any, dtype: str, tolerance: float, tmp_path: Path) -> None:
    model, tokenizer, file, notes = export(tmp_path, config(**SIZES, head_dim=32), dtype)
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert largest_gap(model, LlamaCpp(file), ids, 512) < tolerance
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.attn_q.weight"] == dtype.upper()
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert notes == []


def test_rows_that_q8_0_cannot_hold_become_f16_and_it_is_said(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    model, tokenizer, file, notes = export(tmp_path, LlamaConfig(**sizes), "q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_up.weight"] == "F16"
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert "are f16, not q8_0" in notes[0]
    assert largest_gap(model, LlamaCpp(file), [tokenizer(PROMPTS[0]).input_ids], 512) < 1.0


def test_metadata(tmp_path: Path) -> None:
    _, tokenizer, file, _ = export(tmp_path, Qwen3Config(**SIZES, head_dim=32))
    found = fields(file)
    assert found["general.architecture"] == "qwen3"
    assert found["general.name"] == tmp_path.name
    assert found["qwen3.attention.key_length"] == 32
    assert found["qwen3.attention.head_count_kv"] == 2
    assert found["qwen3.rope.freq_base"] == 10000.0
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert len(found["tokenizer.ggml.tokens"]) == 512
    assert found["tokenizer.ggml.token_type"][-1] == gguf.TokenType.UNUSED
    assert found["tokenizer.ggml.token_type"][tokenizer.eos_token_id] == gguf.TokenType.CONTROL


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_left_out(tied: bool, tmp_path: Path) -> None:
    _, _, file, _ = export(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=tied))
    names = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert ("output.weight" in names) is not tied


def test_interleave_turns_halves_into_pairs_per_head() -> None:
    rows = torch.tensor([[0.0], [1.0], [10.0], [11.0], [100.0], [101.0], [110.0], [111.0]])
    assert interleave(rows, 2).flatten().tolist() == [0, 10, 1, 11, 100, 110, 101, 111]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: GPT2Config(), "llama, mistral, qwen2, qwen3"),
        (lambda: LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
        (
            lambda: LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type 'dynamic'",
        ),
        (lambda: Qwen2Config(**SIZES, rope_parameters=LLAMA3), "rope_type 'llama3' in a qwen2 model"),
        (lambda: LlamaConfig(**SIZES, rope_parameters={**YARN, "truncate": False}), "truncate"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(config: Any, said: str, tmp_path: Path) -> None:
    made = config()
    entries = [] if made.model_type == "gpt2" else model_entries(tiny_model(made))
    with pytest.raises(RequestError, match=said) as caught:
        write_model(
            tmp_path / "m.gguf",
            made,
            entries,
            read_vocab(byte_level_tokenizer("qwen2")),
            dtype="f32",
            name="m",
        )
    assert "--to merged" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_sliding_window_is_said(tmp_path: Path) -> None:
    _, _, _, notes = export(tmp_path, MistralConfig(**SIZES, sliding_window=64))
    assert any("last 64 tokens" in note for note in notes)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(RequestError, match=r"mlp\.experts"):
        gguf_name("model.layers.0.mlp.experts.0.up_proj.weight")


def write(target: Path, change: dict[str, torch.Tensor], dtype: str = "f16") -> None:
    model = tiny_model(LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, value in change.items():
            model.get_parameter(name).copy_(value)
    vocab = read_vocab(byte_level_tokenizer("qwen2"))
    write_model(target, model.config, model_entries(model), vocab, dtype=dtype, name="m")


@pytest.mark.parametrize(
    ("value", "error", "said"), [(float("nan"), TrimtabError, "NaN"), (1e6, RequestError, "--dtype bf16")]
)
def test_a_failed_export_leaves_the_old_file(
    value: float, error: type[Exception], said: str, tmp_path: Path
) -> None:
    target = tmp_path / "m.gguf"
    target.write_text("old")
    # The last tensor of the file, so that most of it has been written when it fails.
    with pytest.raises(error, match=said):
        write(target, {"lm_head.weight": torch.full((512, 96), value)})
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 256})
    with pytest.raises(RequestError, match="256 rows"):
        export(tmp_path, config)
