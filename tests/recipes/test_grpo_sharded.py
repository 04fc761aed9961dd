"""GRPO with weights sharded over processes (FSDP2): the run that every process would make with the whole model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from many_processes import start, trained
from safetensors.torch import load_file


@pytest.fixture
def ends_early(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model with many tokens that end a completion, so that processes end theirs at different lengths."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": list(range(60))}))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", [["method=lora"], ["method=full", "grpo.beta=0.1"]], ids=["lora", "full"])
def test_sharded_is_data_parallel(ends_early: Path, tmp_path: Path, method: list[str]) -> None:
    settings = [
        *("recipe=grpo", f"model={ends_early}", "data=sums", "data.max_rows=16", "data.max_length=96"),
        *("reward=length", "grpo.target_length=2", "grpo.num_generations=4", "grpo.max_completion_length=30"),
        *("training.max_steps=2", "training.batch_size=4", "training.learning_rate=0.01"),
        *("device=cpu", "monitor.progress=none", *method),
    ]
    for strategy, run in (("data_parallel", tmp_path / "whole"), ("sharded", tmp_path / "sharded")):
        start(2, "grpo_sharded_run.py", [strategy, *settings, f"output_dir={run}"], run)
    whole, sharded = trained(tmp_path / "whole"), trained(tmp_path / "sharded")
    assert len(whole) == len(sharded) == 2
    for one, other in zip(whole, sharded, strict=True):
        for key in ("reward", "loss", "grad_norm", "completions/mean_length"):
            assert other[key] == pytest.approx(one[key], rel=1e-3), key
    kept = "adapter/adapter_model" if method == ["method=lora"] else "model/model"
    left, right = (load_file(tmp_path / run / f"{kept}.safetensors") for run in ("whole", "sharded"))
    assert left.keys() == right.keys()
    assert all((left[name] - right[name]).abs().max() < 1e-3 for name in left)

    ranks = [
        [
            tuple(map(int, line.split()))
            for line in (tmp_path / f"sharded-rank{r}.txt").read_text().splitlines()
        ]
        for r in range(2)
    ]
    for one_rank, other_rank in zip(*ranks, strict=True):
        assert one_rank[0] == other_rank[0] >= 4, "layers, embeddings and head were sharded while generating"
        assert one_rank[1] == other_rank[1], "a process that is done goes on with those that are not"
    assert any(a[2] != b[2] for a, b in zip(*ranks, strict=True)), "their lengths did differ"
