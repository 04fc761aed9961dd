"""Whether rows lie end to end as the plan says, for every strategy, GPU and precision. On virtual GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab.config import load_config
from trimtab.fast.rows import Means, lay_rows
from trimtab.hardware import probe
from trimtab.recipes.plan_text import speed_rows
from trimtab.recipes.planning import know_model, resolve_for
from trimtab.recipes.sft import means_of, told_against
from trimtab.virtual import virtual_gpus

STRATEGIES: dict[str, tuple[int, dict[str, object]]] = {
    "single": (1, {}),
    "split": (2, {"model_parallel": True}),
    "data_parallel": (2, {"processes": 2}),
    "sharded": (2, {"sharding": True}),
}
HANDED: dict[str, Any] = {
    "capped": lambda _, args, kwargs: (args, {**kwargs, "softcap": 5.0}),
    "untold": lambda _, args, kwargs: (
        args,
        {name: value for name, value in kwargs.items() if "seq_lens" not in name},
    ),
}
"""What a layer hands on to its attention, as some models do."""
H100, T4 = ("NVIDIA H100 80GB HBM3", (9, 0)), ("Tesla T4", (7, 5))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder that has a config and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("gpu", "precision"), [(H100, "bf16"), (H100, "fp16"), (H100, "fp32"), (T4, "fp16"), (T4, "fp32")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_are_laid_as_the_plan_says(
    bare: Path, strategy: str, gpu: tuple[str, tuple[int, int]], precision: str
) -> None:
    count, asked = STRATEGIES[strategy]
    words = {"recipe": "sft", "model": str(bare), "data": "rows.jsonl", "precision": precision, **asked}
    config = load_config(None, [f"{key}={json.dumps(value)}" for key, value in words.items()])
    with virtual_gpus(count, name=gpu[0], capability=gpu[1], shapes=True):
        plan = resolve_for(config, probe(), know_model(config))
        assert plan.strategy == strategy
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(bare)).to(plan.load_device)
        laid = lay_rows(model, means_of(plan), packing=False, longest=64, against=told_against(plan))
        said = [row[-1] for row in speed_rows(plan) if "padd" in row[-1]]
        assert (laid.layout == "rows") == any("without padding" in text for text in said), (laid.reason, said)
        fits = strategy != "split" and precision != "fp32" and gpu[1] >= (8, 0)
        assert (laid.layout == "rows") == fits, laid.reason


@pytest.mark.parametrize(
    ("hands_on", "why"),
    [("capped", "softcap"), ("untold", "layer 0 does not tell its attention where rows end")],
)
def test_what_a_model_refuses_shows_by_shapes_too(bare: Path, hands_on: str, why: str) -> None:
    """Capped scores, and layers that keep the rows' bounds to themselves: also where nothing has values."""
    with virtual_gpus(1, name=H100[0], capability=H100[1], shapes=True):
        gpu = torch.device("cuda:0")
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(bare)).to(gpu)
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(HANDED[hands_on], with_kwargs=True)
        means = Means(gpu, gpu, torch.bfloat16, tried=False, rehearsed=True)
        laid = lay_rows(model, means, packing=False, longest=64)
    assert laid.layout == "padded"
    assert why in laid.reason
