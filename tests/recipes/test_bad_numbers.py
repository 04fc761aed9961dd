"""Faults of numbers, put in by hand, in whole runs: what is said, what is kept, and that no weight was touched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from trimtab.monitor.metrics import read_metrics
from trimtab.report.make import make_report

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
Edit = Callable[[dict[str, Any]], None]
KEY = "hf_" + "aB3" * 11
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def damaged(tiny_model: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    """The tiny model with other weights."""

    def make(edit: Edit) -> Path:
        folder = tmp_path / "damaged"
        folder.mkdir()
        for file in tiny_model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def one_nan(tensors: dict[str, Any]) -> None:
    tensors[DOWN][0, 0] = float("nan")


def too_large(tensors: dict[str, Any]) -> None:
    for name in ("up_proj", "gate_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"] *= 1e25


@pytest.fixture
def sft(trimtab: Trimtab, tiny_model: Path, tiny_rows: Path, tmp_path: Path) -> Trimtab:
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"model: {tiny_model}\ndata: {{source: {tiny_rows}, eval_fraction: 0}}\ndevice: cpu\n"
        f"training: {{max_steps: 6, batch_size: 4, lr_scheduler: constant}}\noutput_dir: {tmp_path / 'run'}\n"
    )
    return lambda *words: trimtab("train", str(config), *words)


def kept(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (about,) = (run / "nonfinite").glob("*.json")
    return json.loads(about.read_text()), load_file(about.with_suffix(".safetensors"))


def test_a_nan_in_the_file_is_named(sft: Trimtab, damaged: Callable[[Edit], Path], tmp_path: Path) -> None:
    done = sft(f"model={damaged(one_nan)}")
    assert done.returncode == 1
    assert "error: step 1: the loss is nan" in done.stderr
    assert f"why: {DOWN} holds 1 of 8,192 values that are not finite, as it was loaded" in done.stderr
    about, batch = kept(tmp_path / "run")
    assert about["cause"] == "weights"
    assert sum(batch["row_lengths"].tolist()) == batch["input_ids"].numel()
    assert len(about["rows"]) == 4
    assert all("What is" in row["input"] and row["trained_tokens"] for row in about["rows"])
    mark = json.loads((tmp_path / "run" / ".trimtab-run.json").read_text())
    assert "nonfinite" in mark["entries"], "a later run may move it aside"
    assert not list((tmp_path / "run").glob("adapter")), "nothing is kept as if it were trained"


@pytest.mark.parametrize("method", ["lora", "full"])
def test_an_overflow_is_blamed_on_its_module(
    sft: Trimtab, damaged: Callable[[Edit], Path], tmp_path: Path, method: str
) -> None:
    words = [f"method={method}", "training.gradient_accumulation_steps=2"]
    done = sft(f"model={damaged(too_large)}", *words)
    assert done.returncode == 1
    assert "step 1: the loss is nan (pass 1 of 2)" in done.stderr
    assert "why: model.layers.0.mlp gave the first value that is not finite (fp32" in done.stderr
    assert kept(tmp_path / "run")[0]["cause"] == "overflow"


def test_one_row_that_overflows_on_the_way_back(
    sft: Trimtab, damaged: Callable[[Edit], Path], tiny_model: Path, tiny_rows: Path, tmp_path: Path
) -> None:
    """The square of so large a number is infinite: zero going forward, NaN going back."""
    from transformers import AutoTokenizer

    (place,) = AutoTokenizer.from_pretrained(tiny_model)("~").input_ids
    rows = [json.loads(line) for line in tiny_rows.read_text().splitlines()]
    rows[11]["instruction"] = f"What is ~ plus {KEY}?"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = damaged(lambda tensors: tensors["model.embed_tokens.weight"][place].fill_(3e38))
    done = sft(f"model={model}", f"data={tmp_path / 'rows.jsonl'}", "training.max_steps=10")
    assert done.returncode == 1
    # The last norm is computed where answers are told alone, and the row's question is none.
    why = "the forward pass was finite; going back, model.layers.1.post_attention_layernorm gave the first gradient"
    assert f"why: {why}" in done.stderr
    about, _ = kept(tmp_path / "run")
    assert any("What is ~ plus (not shown)?" in row["input"] for row in about["rows"])
    assert KEY not in json.dumps(about)


def test_a_learning_rate_that_explodes_is_told_as_that(sft: Trimtab, tmp_path: Path) -> None:
    done = sft("training.learning_rate=10", "method=full")
    assert "the file is damaged" not in done.stdout + done.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (warned,) = [line for line in lines if line["phase"] == "warning"]
    assert warned["step"] <= 6
    assert "training diverged with learning rate 10: the trained weights are" in warned["message"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [w["kind"] for w in summary["warnings"]] == [warned["kind"]]
    assert done.stderr.count("warning: ") == 1


def test_a_healthy_run_warns_of_nothing(sft: Trimtab, tmp_path: Path) -> None:
    assert sft("training.max_steps=12").returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"] == []
    assert not (tmp_path / "run" / "nonfinite").exists()


@pytest.fixture
def grpo(trimtab: Trimtab, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trimtab:
    name = f"numbers_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(
        "def flat(completions):\n    return [1.0] * len(completions)\n\n"
        "def long(completions):\n    return [float(len(c[0]['content'])) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "grpo.yaml"
    config.write_text(
        f"recipe: grpo\nmodel: {tiny_model}\ndata: {{source: sums, max_rows: 16, max_length: 96}}\n"
        f"reward: {name}:long\ngrpo: {{num_generations: 4, max_completion_length: 4}}\ndevice: cpu\n"
        f"training: {{max_steps: 6, batch_size: 4}}\noutput_dir: {tmp_path / 'run'}\n"
    )
    return lambda *words: trimtab("train", str(config), *(w.replace("REWARDS", name) for w in words))


def test_nan_logits_of_a_generation(grpo: Trimtab, damaged: Callable[[Edit], Path], tmp_path: Path) -> None:
    done = grpo(f"model={damaged(one_nan)}")
    assert done.returncode == 1
    assert "error: step 1: the logits of a generation are NaN or infinite" in done.stderr
    assert f"why: {DOWN} holds 1 of 8,192" in done.stderr
    about, _ = kept(tmp_path / "run")
    assert "What is" in about["rows"][0]["input"]


def test_rewards_that_are_all_equal(grpo: Trimtab, tmp_path: Path) -> None:
    done = grpo("reward=REWARDS:flat")
    assert done.returncode == 0, done.stderr
    assert "✓ gradients arrive" not in done.stderr
    assert (
        "! gradients arrive: all 28 trainable tensors have one, and every one is exactly zero" in done.stderr
    )
    assert (
        done.stderr.count("warning: step 5: reward flat has given all completions of a prompt the same") == 1
    )
    (warned,) = json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]
    assert (warned["kind"], warned["step"]) == ("equal rewards", 5)
    told = [event["said"] for event in make_report(tmp_path / "run").facts["health"]]
    assert any(said.startswith("step 5: reward flat has given") for said in told)


def test_a_zeroth_order_step_is_blamed_too(
    trimtab: Trimtab, damaged: Callable[[Edit], Path], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"film {n}", "label": n % 2}) for n in range(16)))
    words = ["recipe=zeroth_order", f"model={damaged(too_large)}", f"data={rows}", "data.eval_fraction=0"]
    words += ["zeroth.template={text} was", 'zeroth.labels={0: " bad", 1: " good"}', "device=cpu"]
    (tmp_path / "config.yaml").write_text("")
    done = trimtab("train", str(tmp_path / "config.yaml"), *words, f"output_dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert "why: model.layers.0.mlp gave the first value that is not finite (fp32" in done.stderr
    assert "film" in kept(tmp_path / "run")[0]["rows"][0]["input"]


@pytest.mark.slow
def test_all_ranks_stop_with_the_message_of_the_one_that_had_it(
    damaged: Callable[[Edit], Path], tiny_model: Path, tiny_rows: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    (place,) = AutoTokenizer.from_pretrained(tiny_model)("~").input_ids
    rows = [json.loads(line) for line in tiny_rows.read_text().splitlines()]
    for row in rows[::9]:
        row["instruction"] = "What is ~?"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = damaged(lambda tensors: tensors["model.embed_tokens.weight"][place].fill_(3e38))
    words = [f"model={model}", f"data={tmp_path / 'rows.jsonl'}", "data.eval_fraction=0", "device=cpu"]
    words += [
        "processes=2",
        "training.batch_size=1",
        "training.max_steps=20",
        f"output_dir={tmp_path / 'run'}",
    ]
    (tmp_path / "config.yaml").write_text("recipe: sft\n")
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "train", str(tmp_path / "config.yaml"), *words],
        **{"capture_output": True, "text": True, "timeout": 280, "check": False},
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    message = json.loads((tmp_path / "run" / "summary.json").read_text())["error"]["message"]
    # Which of the norms is the first to overflow is the processor's rounding.
    assert re.search(r"going back, model\.\S*norm gave the first gradient", message)
    about, _ = kept(tmp_path / "run")
    assert f"(rank {about['rank']} of 2)" in message, "the rank that had it is the one whose batch is kept"
    assert any("~" in row["input"] for row in about["rows"])
