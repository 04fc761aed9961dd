"""A LoRA alone as GGUF, loaded by real llama.cpp over the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from export_helpers import (
    PROMPTS,
    LlamaCpp,
    byte_level_tokenizer,
    largest_gap,
    tiny_model,
    write_full_run,
    write_lora_run,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from trimtab.errors import RequestError
from trimtab.export import export_run

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base(folder: Path, config: Any) -> Path:
    return write_full_run(folder / "base", tiny_model(config), byte_level_tokenizer("qwen2"))


@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True, "r": 4},
        {"rank_pattern": {"k_proj": 4}, "alpha_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 64}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_adapter_over_its_base_agrees_with_peft(config: Any, lora: dict[str, Any], tmp_path: Path) -> None:
    base_run = base(tmp_path, config(**SIZES))
    tokenizer = byte_level_tokenizer("qwen2")
    run = write_lora_run(tmp_path / "run", base_run / "model", tokenizer, targets=ALL, **lora)
    adapter = export_run(run, "adapter-gguf", dtype="f32").files[0]
    whole = export_run(base_run, "gguf", dtype="f32").files[0]
    model = AutoModelForCausalLM.from_pretrained(base_run / "model")
    tuned = PeftModel.from_pretrained(model, run / "adapter").eval()
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    assert largest_gap(tuned, LlamaCpp(whole, adapter), ids, 512) < 1e-3
    assert largest_gap(tuned, LlamaCpp(whole), ids, 512) > 0.1


def test_adapter_metadata(tmp_path: Path) -> None:
    base_run = base(tmp_path, LlamaConfig(**SIZES))
    tokenizer = byte_level_tokenizer("qwen2")
    run = write_lora_run(tmp_path / "run", base_run / "model", tokenizer, targets=["q_proj"])
    result = export_run(run, "adapter-gguf")
    reader = gguf.GGUFReader(result.files[0])
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["adapter.type"].contents() == "lora"
    assert reader.fields["adapter.lora.alpha"].contents() == 16.0
    assert {t.name: tuple(t.shape) for t in reader.tensors if t.name.startswith("blk.0.")} == {
        "blk.0.attn_q.weight.lora_a": (64, 8),
        "blk.0.attn_q.weight.lora_b": (8, 128),
    }
    assert any("--lora adapter-f16.gguf" in note for note in result.notes)


def test_what_a_gguf_adapter_cannot_hold_is_refused(tmp_path: Path) -> None:
    base_run = base(tmp_path, LlamaConfig(**SIZES))
    tokenizer = byte_level_tokenizer("qwen2")
    dora = write_lora_run(tmp_path / "dora", base_run / "model", tokenizer, targets=["q_proj"], use_dora=True)
    with pytest.raises(RequestError, match="use_dora"):
        export_run(dora, "adapter-gguf")
    with pytest.raises(RequestError, match="method full has no adapter"):
        export_run(base_run, "adapter-gguf")
