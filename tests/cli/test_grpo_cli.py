"""GRPO from the command line: the report before training, the shipped example, a rehearsal, and two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

Trimtab = Callable[..., subprocess.CompletedProcess[str]]


def start(*words: str, cwd: Path, timeout: float = 280, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **more},
    )


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    file = tmp_path / "grpo.yaml"
    file.write_text(
        f"""
recipe: grpo
model: {tiny_model}
data: {{source: sums, max_rows: 16, max_length: 96}}
reward: length
grpo: {{num_generations: 4, max_completion_length: 6, target_length: 2}}
training: {{max_steps: 2, batch_size: 4, learning_rate: 0.01}}
monitor: {{progress: none}}
"""
    )
    return file


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"]


def test_one_report_names_everything_that_is_wrong(trimtab: Trimtab, config: Path, tmp_path: Path) -> None:
    done = trimtab(
        *("plan", str(config), "training.batch_size=6", "max_completion_length=600"),
        *("data.max_length=1000", "reward=[answer, nowhere:score]", "use_vllm=true", "device=cpu"),
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    for told in (
        "checks failed",
        "grpo.num_generations 4 does not divide",
        "the model's context is 512",
        "grpo.reward=nowhere:score: the module could not be imported",
        "vLLM generates on CUDA, and the run is on cpu",
    ):
        assert told in done.stdout


def test_the_plan_as_json_has_the_checks(trimtab: Trimtab, config: Path, tmp_path: Path) -> None:
    done = trimtab("plan", str(config), "device=cpu", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert checks["batch"] is True
    assert checks["rewards"] is True
    assert checks["generation"] is None


def test_train_shows_the_report_with_a_dry_generation(trimtab: Trimtab, config: Path, tmp_path: Path) -> None:
    done = trimtab("train", str(config), "device=cpu", "output_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "before training: all clear" in done.stdout
    assert "check ✓ generation" in done.stdout
    assert "mean reward" in done.stdout
    assert len(metrics(tmp_path / "run")) == 2


def test_gsm8k_rows_need_no_setting_beyond_data_and_reward(
    trimtab: Trimtab, shared_data: Path, tmp_path: Path
) -> None:
    source = shared_data / "gsm8k"
    file = tmp_path / "gsm8k.yaml"
    file.write_text(f"recipe: grpo\ndata: {source}\nreward: answer\n")
    done = trimtab("plan", str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prompts, column `question`" in done.stdout
    assert "answer 1, 0" in done.stdout, "the row's own solution is right, an empty completion is not"
    assert "#### N" in done.stdout, "the model is told the form of an answer, and the plan says so"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["true", "null"])
def test_a_rehearsal_is_clean(config: Path, tmp_path: Path, parallel: str) -> None:
    """Split over two GPUs, and as two ranks, whose weights and collectives the rehearsal compares."""
    done = start(
        *("rehearse", "--gpus", "2", "--json", "report.json"),
        *(str(config), f"model_parallel={parallel}"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "clean"


STOCK = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

split = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0}
split |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=split)
rows = Dataset.from_dict({"prompt": [f"What is {n} plus {n}?" for n in range(8)]})
options = GRPOConfig(
    output_dir="stock", max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
    gradient_checkpointing=False, bf16=False, report_to="none", save_strategy="no",
)
GRPOTrainer(
    model, lambda completions, **_: [float(len(c)) for c in completions], options, rows,
    processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
).train()
"""


@pytest.mark.slow
def test_a_rehearsal_of_stock_trl_on_the_same_split_reports_its_faults(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "stock.py").write_text(STOCK)
    done = start(
        *("rehearse", "--gpus", "2", "--json", "report.json", "stock.py", str(tiny_model)), cwd=tmp_path
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    faults = [finding for finding in report["findings"] if finding["severity"] == "fault"]
    assert len(faults) >= 2
    assert {finding["kind"] for finding in faults} == {"device-mismatch"}


PER_RANK = """
import os, pathlib
def score(completions, completion_ids):
    scores = [float(len(ids)) + int(os.environ["RANK"]) for ids in completion_ids]
    with open(f"rank{os.environ['RANK']}.txt", "a") as file:
        file.write(" ".join(map(str, scores)) + "\\n")
    return scores
"""


@pytest.mark.slow
def test_two_processes_gather_their_rewards(config: Path, tmp_path: Path) -> None:
    """Each process scores its own completions; the logged mean is that of both, and their weights stay one."""
    (tmp_path / "per_rank.py").write_text(PER_RANK)
    done = start(
        *("train", str(config), "device=cpu", "processes=2", "output_dir=run", "reward=per_rank:score"),
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (plan["strategy"], plan["processes"]) == ("data_parallel", 2)
    ranks = [(tmp_path / f"rank{n}.txt").read_text().splitlines() for n in (0, 1)]
    # The last calls are those of the steps; the checks before training score too.
    for step, line in enumerate(metrics(tmp_path / "run")):
        scores = [float(word) for rank in ranks for word in rank[len(rank) - 2 + step].split()]
        assert len(scores) == 8
        assert line["reward"] == pytest.approx(sum(scores) / 8, abs=1e-4)
        assert all(line[f"peak_memory_bytes/cpu, rank {rank}"] > 0 for rank in (0, 1))


def test_the_example_runs(trimtab: Trimtab, repository: Path, tmp_path: Path) -> None:
    """examples/grpo.yaml as it stands but for its steps, of which the slow case makes all."""
    example = str(repository / "examples" / "grpo.yaml")
    done = trimtab("train", example, "training.max_steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "example-grpo"
    assert json.loads((run / "summary.json").read_text())["rewards"] == {"answer": 1.0, "format": 0.5}
    assert len(metrics(run)) == 1
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_example_learns(repository: Path, tmp_path: Path) -> None:
    """examples/grpo.yaml as it stands, on the built-in model: the reward of the last steps is twice the first's."""
    done = start("train", str(repository / "examples" / "grpo.yaml"), cwd=tmp_path, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "example-grpo"
    rewards = [line["reward"] for line in metrics(run)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    weights = load_file(run / "adapter" / "adapter_model.safetensors")
    assert any(name.endswith("lora_B.weight") and bool(tensor.any()) for name, tensor in weights.items())
