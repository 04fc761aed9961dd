"""Exports of whole runs: merged folders, what is refused, what stays on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_helpers import (
    PROMPTS,
    byte_level_tokenizer,
    reference_log_probs,
    tiny_model,
    write_full_run,
    write_lora_run,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from trimtab.errors import RequestError, TrimtabError
from trimtab.export import export_run
from trimtab.export.files import readable_size
from trimtab.files import whole_file

SIZES: dict[str, Any] = {
    "vocab_size": 480,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def full_run(tmp_path: Path) -> Path:
    return write_full_run(tmp_path / "base", tiny_model(LlamaConfig(**SIZES)), byte_level_tokenizer("smollm"))


@pytest.fixture
def lora_run(full_run: Path, tmp_path: Path) -> Path:
    tokenizer = byte_level_tokenizer("smollm")
    return write_lora_run(tmp_path / "run", full_run / "model", tokenizer, targets=["q_proj", "down_proj"])


def test_merged_model_computes_what_the_adapter_did(full_run: Path, lora_run: Path) -> None:
    result = export_run(lora_run, "merged")
    assert result.folder == lora_run / "export" / "merged"
    merged = AutoModelForCausalLM.from_pretrained(result.folder)
    base = AutoModelForCausalLM.from_pretrained(full_run / "model")
    tokenizer = AutoTokenizer.from_pretrained(result.folder)
    assert tokenizer.chat_template == byte_level_tokenizer("smollm").chat_template
    ids = tokenizer(PROMPTS[0]).input_ids
    untuned = reference_log_probs(base, ids)
    tuned = reference_log_probs(PeftModel.from_pretrained(base, lora_run / "adapter").eval(), ids)
    found = reference_log_probs(merged, ids)
    assert (found - tuned).abs().max() < 1e-4
    assert (found - untuned).abs().max() > 0.01


def test_tied_embeddings_stay_tied(lora_run: Path) -> None:
    folder = export_run(lora_run, "merged").folder
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(folder)
    assert merged.lm_head.weight.data_ptr() == merged.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("method", ["full_run", "lora_run"])
def test_number_format_of_a_merged_model(
    method: str, dtype: str | None, expected: torch.dtype, request: pytest.FixtureRequest
) -> None:
    folder = export_run(request.getfixturevalue(method), "merged", dtype=dtype).folder
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {expected}


def test_a_merged_export_keeps_a_16_bit_base_in_16_bits(full_run: Path, lora_run: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(full_run / "model", dtype=torch.bfloat16)
    base.save_pretrained(full_run / "model")
    folder = export_run(lora_run, "merged").folder
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_a_full_model_is_copied(full_run: Path, tmp_path: Path) -> None:
    result = export_run(full_run, "merged", out=tmp_path / "out")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (full_run / "model", tmp_path / "out")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(line.startswith(str(tmp_path / "out" / "model.safetensors")) for line in result.lines())


def test_exporting_again_replaces_what_an_export_wrote_and_nothing_else(lora_run: Path) -> None:
    export_run(lora_run, "merged")
    export_run(lora_run, "merged")
    made = lora_run / "export" / "merged"
    assert [path.name for path in made.parent.iterdir()] == ["merged"]
    (made / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="something else is there"):
        export_run(lora_run, "merged")
    assert (made / "notes.txt").read_text() == "mine"


def test_a_model_and_a_modelfile_of_the_users_own_are_not_replaced(full_run: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(full_run / "model", own)
    with pytest.raises(RequestError, match="something else is there"):
        export_run(full_run, "merged", out=own)
    assert (own / "config.json").read_bytes() == (full_run / "model" / "config.json").read_bytes()
    (tmp_path / "Modelfile").write_text("FROM mine")
    (tmp_path / "model-f16.gguf").write_text("mine")
    for kind in ("ollama", "gguf"):
        with pytest.raises(RequestError, match="no export is known to have written"):
            export_run(full_run, kind, out=tmp_path)
    assert (tmp_path / "Modelfile").read_text() == "FROM mine"
    assert (tmp_path / "model-f16.gguf").read_text() == "mine"


def test_a_folder_with_other_files_is_not_replaced(full_run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(RequestError, match="something else is there"):
        export_run(full_run, "merged", out=tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_an_adapter_on_tied_embeddings_is_not_merged(full_run: Path, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer("smollm")
    run = write_lora_run(tmp_path / "head", full_run / "model", tokenizer, targets=["lm_head", "q_proj"])
    with pytest.raises(RequestError, match="changes lm_head of a model with tied embeddings"):
        export_run(run, "merged")
    assert not (run / "export" / "merged").exists()


def test_a_diverged_adapter_is_not_merged(lora_run: Path) -> None:
    file = lora_run / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    weights[name][0, 0] = float("nan")
    save_file(weights, file)
    with pytest.raises(TrimtabError, match=f"{name} holds NaN"):
        export_run(lora_run, "merged")
    assert not (lora_run / "export" / "merged").exists()


def test_an_unfinished_run_names_what_is_missing(lora_run: Path) -> None:
    (lora_run / "summary.json").unlink()
    (lora_run / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError) as caught:
        export_run(lora_run, "gguf")
    assert "adapter/adapter_model.safetensors, summary.json" in str(caught.value)
    assert "training.resume=true" in str(caught.value)


def test_a_full_run_without_weights_is_unfinished(full_run: Path) -> None:
    (full_run / "model" / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"missing model/\*\.safetensors"):
        export_run(full_run, "merged")


@pytest.mark.parametrize(("place", "said"), [("nowhere", "no such run folder"), (".", "no config.yaml")])
def test_what_is_no_run_is_refused(place: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        export_run(tmp_path / place, "gguf")


def test_a_base_model_that_is_gone_is_named(full_run: Path, lora_run: Path) -> None:
    (full_run / "model" / "config.json").unlink()
    with pytest.raises(RequestError, match=r"config\.json"):
        export_run(lora_run, "merged")


@pytest.mark.parametrize(
    ("to", "dtype", "said"),
    [
        ("onnx", None, "merged, gguf, adapter-gguf, ollama"),
        ("merged", "q8_0", "f32, f16, bf16"),
        ("gguf", "q4_0", "q8_0"),
    ],
)
def test_an_unknown_kind_or_format_names_the_known_ones(
    to: str, dtype: str | None, said: str, full_run: Path
) -> None:
    with pytest.raises(RequestError, match=said):
        export_run(full_run, to, dtype=dtype)
    assert not (full_run / "export").exists()


def test_the_file_of_a_failed_write_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError), whole_file(tmp_path / "deep" / "a.bin") as scratch:
        scratch.write_text("half \ud800", encoding="utf-8")
    assert list((tmp_path / "deep").iterdir()) == []


def test_readable_size() -> None:
    assert [readable_size(n) for n in (12, 4200, 270_885_728, 5_000_000_000)] == [
        "12 B",
        "4.2 kB",
        "270.9 MB",
        "5.00 GB",
    ]
