"""A step without memory, made again of smaller batches: the same rows, the same weights as a run begun with them.

What lacks memory is a layer that refuses many rows at once, in the words of CUDA or of the CPU's allocator; all else is
the real run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaModel

from trimtab.config import load_config
from trimtab.recipes.smaller_batches import Batch, with_batch

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
RUNS = {
    "sft": [
        "training.batch_size=8",
        "data.eval_fraction=0.1",
        "training.eval_steps=2",
        "training.keep_best=false",
        "training.lr_scheduler=constant",
    ],
    "grpo": [
        *("recipe=grpo", "data.source=sums", "data.max_rows=8", "data.max_length=64", "reward=length"),
        *("grpo.num_generations=4", "grpo.max_completion_length=4", "training.batch_size=8", "seed=3"),
    ],
    "zeroth_order": [
        *(
            "recipe=zeroth_order",
            "zeroth.task=sst2",
            "zeroth.method=mezo",
            "data=sample",
            "data.max_length=64",
        ),
        *("training.batch_size=8", "data.max_rows=24", "data.eval_fraction=0", "training.learning_rate=0.01"),
    ],
}


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Memory for so many rows of training in one pass, from the given pass on."""
    memory: dict[str, Any] = {"rows": 10**9, "from": 0, "passes": 0}
    forward = LlamaModel.forward

    def refusing(self: Any, *args: Any, **named: Any) -> Any:
        rows = next(
            v for v in (named.get("input_ids"), named.get("inputs_embeds"), *args) if v is not None
        ).shape[0]
        if (bounds := named.get("cu_seq_lens_q")) is not None:
            # Laid end to end, behind what they all begin with.
            rows = len(bounds) - 1 - bool(named.get("shared_start"))
        if torch.is_grad_enabled() or memory.get("always"):
            memory["passes"] += 1
            if rows > memory["rows"] and memory["passes"] > memory["from"]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has …")
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaModel, "forward", refusing)
    return memory


@pytest.fixture
def train(tiny_model: Path, tiny_rows: Path, trimtab: Trimtab, tmp_path: Path) -> Callable[..., Any]:
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {tiny_model}\ndata: {tiny_rows}\ndevice: cpu\nmonitor: {{progress: none}}\n")
    always = ["training.max_steps=3", "training.save_steps=2", "data.max_length=128"]

    def run(name: str, recipe: str, *words: str) -> subprocess.CompletedProcess[str]:
        return trimtab("train", str(config), f"output_dir={tmp_path / name}", *always, *RUNS[recipe], *words)

    return run


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


SMALLER = ("training.batch_size=2", "training.gradient_accumulation_steps=4")


@pytest.mark.parametrize(
    "recipe", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "zeroth_order"))]
)
def test_the_weights_are_those_of_a_run_begun_with_the_smaller_batch(
    recipe: str, train: Any, tmp_path: Path, scarce: dict[str, Any]
) -> None:
    if recipe == "grpo":
        begun = train("begun", recipe, *SMALLER, "training.eval_batch_size=8")
    else:
        begun = train("begun", recipe, *SMALLER)
    assert begun.returncode == 0, begun.stderr
    # Of a question both answers are rows; its passes have no gradients.
    scarce |= {"rows": 4, "always": True} if recipe == "zeroth_order" else {"rows": 2}
    done = train("run", recipe, "training.halve_batch_on_oom=true")
    assert done.returncode == 0, done.stderr
    assert "! out of memory in step 1 with training.batch_size=8 (CUDA out of memory." in done.stdout
    assert (
        "going on from the start with training.batch_size × gradient_accumulation_steps 2 × 4" in done.stdout
    )
    assert same(tmp_path / "run", tmp_path / "begun")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["halved"]["began_with"] == {"batch_size": 8, "gradient_accumulation_steps": 1}
    assert [h["to"]["batch_size"] for h in summary["halved"]["halvings"]] == [4, 2]
    kept = load_config(tmp_path / "run" / "config.yaml", []).training
    assert (kept.batch_size, kept.gradient_accumulation_steps) == (2, 4)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "train"] == [1, 2, 3]


def test_it_goes_on_from_the_last_checkpoint_and_can_be_resumed(
    train: Any, tmp_path: Path, scarce: dict[str, Any]
) -> None:
    whole = train("whole", "sft", "training.max_steps=5")
    assert whole.returncode == 0, whole.stderr
    scarce |= {"rows": 4, "from": scarce["passes"] + 2}  # the third step finds too little
    done = train("run", "sft", "training.halve_batch_on_oom=true", "training.group_by_length=false")
    assert done.returncode == 0, done.stderr
    assert "! out of memory in step 3 with training.batch_size=8" in done.stdout
    assert "going on from checkpoint-2 with" in done.stdout
    # The request as it first was, for more steps: still with the batch that fits.
    done = train(
        "run", "sft", "training.halve_batch_on_oom=true", "training.resume=true", "training.max_steps=5"
    )
    assert done.returncode == 0, done.stderr
    assert "4 × 2 in place of 8 × 1: more found no memory before" in done.stdout
    halved = json.loads((tmp_path / "run" / "summary.json").read_text())["halved"]
    assert [h["after_step"] for h in halved["halvings"]] == [2]
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.allclose(first[name], second[name], rtol=1e-3, atol=1e-5) for name in first)


def test_one_row_that_does_not_fit_ends_the_run(train: Any, tmp_path: Path, scarce: dict[str, Any]) -> None:
    scarce["rows"] = 0
    done = train("run", "sft", "training.halve_batch_on_oom=true", "training.batch_size=3")
    assert done.returncode == 1
    assert "1 × 3 in place of 3 × 1" in done.stdout
    assert "with training.batch_size=1" in done.stderr
    assert "halve training.batch_size" not in done.stderr
    assert "no checkpoint was saved before" in done.stderr
    assert "Traceback" not in done.stderr


def test_unasked_nothing_is_changed(train: Any, tmp_path: Path, scarce: dict[str, Any]) -> None:
    scarce |= {"rows": 4, "from": 2}
    done = train("run", "sft")
    assert done.returncode == 1
    assert "training.halve_batch_on_oom=true" in done.stderr
    assert "checkpoint-2 is whole" in done.stderr
    assert "config.yaml training.resume=true" in done.stderr
    assert not (tmp_path / "run" / "halved.json").exists()


def test_a_real_allocation_that_fails_on_the_cpu(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaModel.forward

    def greedy(self: Any, *args: Any, **named: Any) -> Any:
        if self.training:
            torch.empty(2**46)  # more than any machine has: the allocator's own error
        return forward(self, *args, **named)

    monkeypatch.setattr(LlamaModel, "forward", greedy)
    done = train("run", "sft")
    assert done.returncode == 1
    assert "out of memory on this machine (RAM, not a GPU) with training.batch_size=8" in done.stderr
    assert "DefaultCPUAllocator" in done.stderr
    assert "Traceback" not in done.stderr


def test_batches() -> None:
    assert [Batch(8, 1).smaller(), Batch(6, 2).smaller(), Batch(3, 2).smaller(), Batch(7, 1).smaller()] == [
        *(Batch(4, 2), Batch(3, 4), Batch(1, 6), Batch(1, 7)),
    ]
    assert Batch(1, 8).smaller() is None
    config = load_config(None, ["recipe=grpo", "reward=length", "training.batch_size=8"])
    smaller = with_batch(config, Batch(2, 4)).training
    # An evaluation takes whole groups of completions; the rows of a step stay a multiple of them by themselves.
    assert (smaller.batch_size, smaller.gradient_accumulation_steps, smaller.eval_batch_size) == (2, 4, 8)
    assert config.training.batch_size == 8


LAYER = """
import os

import torch
from transformers.models.llama.modeling_llama import LlamaModel

forward = LlamaModel.forward


def refusing(self, *args, **named):
    rows = next(v for v in (named.get("input_ids"), named.get("inputs_embeds"), *args) if v is not None).shape[0]
    if torch.is_grad_enabled() and rows > 2 and os.environ.get("RANK") == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(self, *args, **named)


LlamaModel.forward = refusing
"""


@pytest.mark.slow
def test_of_two_processes_one_without_memory_is_enough(
    tiny_model: Path, tiny_rows: Path, tmp_path: Path
) -> None:
    """Only rank 1 lacks memory; both begin again with the smaller batch, by the record in the run's folder."""
    (tmp_path / "sitecustomize.py").write_text(LAYER)
    run = tmp_path / "run"
    words = [f"model={tiny_model}", f"data={tiny_rows}", "device=cpu", "processes=2", f"output_dir={run}"]
    words += ["training.batch_size=4", "training.max_steps=2", "training.halve_batch_on_oom=true"]
    words += ["data.eval_fraction=0", "samples.held_out=0", "samples.prompts=[]", "training.eval_steps=null"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", *words],
        **{"capture_output": True, "text": True, "timeout": 280, "cwd": tmp_path, "check": False},
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert summary["halved"]["now"] == {"batch_size": 2, "gradient_accumulation_steps": 2}
    assert summary["halved"]["halvings"][0]["rank"] == 1
