"""`rehearse --shapes-only` of models that are loaded in four or eight bits, from their config alone."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rehearse = Callable[..., dict[str, Any]]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def folder(tmp_path: Path, **more: Any) -> str:
    """A model's folder that has a config and nothing else."""
    shape = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 32000}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        **shape,
        **more,
    }
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"intermediate_size": 8192, **config}))
    return str(tmp_path / "bare")


def written(tmp_path: Path, code: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(code))
    return str(path)


LOADED = """
    import sys, torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cuda:0")
    print("plain", hasattr(model.config, "quantization_config"), torch.cuda.memory_allocated(), model.num_parameters())
"""


def test_weights_that_are_taken_apart_while_they_are_loaded_are_plain_ones(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    model = folder(tmp_path, quantization_config={"quant_method": "fp8", "dequantize": True})
    report = rehearse_warm(written(tmp_path, LOADED), model, shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    kept, held, count = report["stdout"].split("plain ")[1].split()[:3]
    assert kept == "False"
    assert int(held) == pytest.approx(2 * int(count), rel=1e-3)


def test_what_another_method_has_quantized_is_said_to_be_unproven(
    rehearse_warm: Rehearse, tmp_path: Path
) -> None:
    model = folder(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    report = rehearse_warm(written(tmp_path, LOADED), model, shapes_only=True)
    assert report["verdict"] == "unproven", report["text"]
    assert "weights that gptq has quantized are not rehearsed by shapes alone" in report["text"]


TRAINED = """
    import sys, torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {} if len(sys.argv) > 3 else {"quantization_config": bits}
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=sys.argv[2], **options)
    linear = model.model.layers[0].mlp.up_proj
    print("held", torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1), "end")
    assert type(linear).__name__ == "Linear4bit" and type(linear.weight).__name__ == "Params4bit"
    assert linear.weight.is_cuda and tuple(linear.weight.shape) == (2048 * 8192 // 2, 1)
    model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(2):
        ids = torch.randint(0, 1000, (2, 512), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@needs_bitsandbytes
@pytest.mark.parametrize("device_map", ["cuda:0", "auto"])
def test_four_bits_of_bitsandbytes_are_loaded_and_trained(
    rehearse_warm: Rehearse, tmp_path: Path, device_map: str
) -> None:
    report = rehearse_warm(written(tmp_path, TRAINED), folder(tmp_path), device_map, shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
    held = [int(value) for value in report["stdout"].split("held ")[1].split(" end")[0].split()]
    linear = 4 * (4 * 2048 * 2048 + 3 * 2048 * 8192)
    wanted = linear // 2 + linear // 64 * 4 + 2 * 2 * 32000 * 2048
    assert sum(held) == pytest.approx(wanted, rel=0.01)
    assert (held[1] > 0) is (device_map == "auto")
    assert report["steps"] == 2


@needs_bitsandbytes
def test_what_was_stored_in_four_bits_takes_the_same_room(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
    model = folder(tmp_path, quantization_config={**stored, "bnb_4bit_quant_type": "nf4"})
    report = rehearse_warm(written(tmp_path, TRAINED), model, "cuda:0", "stored", shapes_only=True)
    assert report["verdict"] == "clean", report["text"]
