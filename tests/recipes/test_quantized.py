"""A run over four-bit base weights: trained, resumed to the bit, exported, and its adapter on the plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab.config import load_config
from trimtab.errors import RequestError
from trimtab.models.nf4_linear import Nf4Linear
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder


def train(settings: list[str], *more: str) -> tuple[dict[str, Any], Path]:
    config = load_config(None, [*settings, *more])
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), lambda _: None)
    return summary, Path(config.output_dir or "")


@pytest.fixture(scope="module")
def settings(tiny_model: Path, tiny_rows: Path) -> list[str]:
    return [
        f"model={tiny_model}",
        "model.quantize=nf4",
        f"data={tiny_rows}",
        "device=cpu",
        "training.batch_size=8",
        "training.learning_rate=0.01",
        "training.keep_best=false",
        "training.save_steps=2",
        "training.lr_scheduler=constant",
        "training.warmup_ratio=0",
        "monitor.progress=none",
    ]


@pytest.fixture(scope="module")
def finished(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("quantized") / "run"
    return train(settings, "training.max_steps=4", f"output_dir={folder}")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def test_it_trains_and_resumes_to_the_bit(
    settings: list[str], finished: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    summary, run = finished
    assert summary["status"] == "finished"
    assert summary["eval_loss"]["after"] < summary["eval_loss"]["before"]
    folder = f"output_dir={tmp_path / 'run'}"
    train(settings, "training.max_steps=2", folder)
    resumed, again = train(settings, "training.max_steps=4", folder, "training.resume=true")
    assert resumed["status"] == "finished"
    one, other = weights(run), weights(again)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_adapter_loads_in_plain_peft_on_the_unquantised_model(
    finished: tuple[dict[str, Any], Path], tiny_model: Path
) -> None:
    _, run = finished
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        before = base(ids).logits
        tuned = PeftModel.from_pretrained(base, run / "adapter")
        after = tuned(ids).logits
    assert not torch.equal(before, after)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert "base weights in four bits (NF4)" in (run / "adapter" / "README.md").read_text()


def test_export_merges_into_the_unquantised_weights(
    trimtab: Any, finished: tuple[dict[str, Any], Path], tiny_model: Path
) -> None:
    _, run = finished
    assert trimtab("export", str(run), "--to", "merged", "--dtype", "f32").returncode == 0
    merged = AutoModelForCausalLM.from_pretrained(run / "export" / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert not any(isinstance(module, Nf4Linear) for module in merged.modules())
    assert getattr(merged.config, "quantization_config", None) is None
    expected = PeftModel.from_pretrained(base, run / "adapter").merge_and_unload()
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-5)
    AutoTokenizer.from_pretrained(run / "export" / "merged")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["method=full"], "method: full trains them all"),
        (["recipe=zeroth_order"], "zeroth-order"),
        (["device=mps"], "Apple"),
        (["lora.dora=true"], "DoRA"),
        (["device=cuda", "sharding=true"], "packed weights are bytes"),
        (["recipe=grpo", "grpo.reward=exact_match", "grpo.use_vllm=true"], "vLLM"),
    ],
)
def test_what_cannot_go_with_it_is_refused(more: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load_config(None, ["model.quantize=nf4", *more])


@pytest.mark.parametrize("word", ["load_in_4bit=true", "adapter=qlora"])
def test_other_tools_names_for_it_are_known(word: str) -> None:
    config = load_config(None, [word])
    assert (config.model.quantize, config.method) == ("nf4", "lora")
