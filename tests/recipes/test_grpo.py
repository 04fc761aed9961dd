"""GRPO end to end on a tiny model: what is kept, what is measured, and the classes of runs that must agree."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trimtab.config import load_config
from trimtab.errors import RequestError
from trimtab.recipes.planning import plan_run
from trimtab.recipes.run import run_recipe
from trimtab.recipes.run_folder import open_run_folder
from trimtab.rewards import RewardError

REWARDS = """
def vowels(completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(ch in "aeiou" for ch in text) / 10 for text in texts]

def columns_seen(completions, answer, question, completion_ids):
    assert len(answer) == len(question) == len(completions) == len(completion_ids)
    return [float(a) / 100 for a in answer]

def raises(completions, answer):
    return [1 / (int(a) - 7) for a in answer]

def too_few(completions):
    return [1.0]

def never(completions):
    return [None] * len(completions)

def not_a_number(completions):
    return [float("nan")] * len(completions)
"""


@pytest.fixture
def rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of rewards in the folder that the run starts from; its name is its own in every test."""
    name = f"rewards_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def settings(tiny_model: Path, rewards_module: str, tmp_path: Path) -> list[str]:
    return [
        "recipe=grpo",
        f"model={tiny_model}",
        "data=sums",
        "data.max_rows=24",
        f"reward={rewards_module}:vowels",
        "device=cpu",
        f"output_dir={tmp_path / 'run'}",
        "training.max_steps=3",
        "training.learning_rate=0.01",
        "grpo.num_generations=4",
        "grpo.max_completion_length=8",
        "data.max_length=128",
        "training.batch_size=8",
        "monitor.progress=none",
    ]


def train(settings: list[str], *more: str) -> tuple[dict[str, Any], Path]:
    config = load_config(None, [*settings, *more])
    assert config.output_dir is not None
    said: list[str] = []
    summary = run_recipe(config, plan_run(config).plan, open_run_folder(config), said.append)
    return summary, Path(config.output_dir)


def lines(run: Path, phase: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["phase"] == phase]


def values(run: Path, key: str) -> list[float]:
    return [line[key] for line in lines(run)]


def weights_equal(a: Path, b: Path) -> bool:
    left, right = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_run_keeps_and_measures_what_it_promises(settings: list[str], rewards_module: str) -> None:
    rewards = f"reward={{{rewards_module}:vowels: 1.0, {rewards_module}:columns_seen: 0.5, length: 0.1}}"
    summary, run = train(settings, rewards, "grpo.beta=0.05", 'samples.prompts=["What is 1 + 1?"]')
    assert summary["status"] == "finished"
    assert summary["rewards"] == {"vowels": 1.0, "columns_seen": 0.5, "length": 0.1}
    assert summary["samples"][0]["prompt"] == "What is 1 + 1?"
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "adapter" / "tokenizer.json").is_file()
    # The reference was the model with its adapter off: nothing of it is kept.
    assert not (run / "adapter" / "ref").exists()
    card = (run / "adapter" / "README.md").read_text()
    assert "reinforcement learning (GRPO)" in card
    assert "mean reward" in card
    steps = lines(run)
    assert len(steps) == 3
    for key in (
        *("loss", "reward", "reward_std", "kl", "entropy", "clip_ratio/region_mean", "memory_bytes"),
        *(
            "completions/mean_length",
            "completions/clipped_ratio",
            "rewards/vowels/mean",
            "rewards/vowels/std",
        ),
        *("rewards/columns_seen/mean", "rewards/length/mean", "peak_memory_bytes"),
    ):
        assert all(math.isfinite(step[key]) for step in steps), key
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-5), "an untouched adapter is the reference itself"
    assert steps[-1]["kl"] > 0
    weighted = steps[0]["rewards/vowels/mean"] + 0.5 * steps[0]["rewards/columns_seen/mean"]
    assert steps[0]["reward"] == pytest.approx(weighted + 0.1 * steps[0]["rewards/length/mean"], abs=1e-5)
    (sample,) = lines(run, "completions")[0]["samples"]
    assert set(sample) == {"prompt", "completion", "rewards", "advantage"}
    assert "What is" in sample["prompt"]
    assert load_config(run / "config.yaml", []).grpo.beta == 0.05


def test_the_reward_rises(settings: list[str]) -> None:
    """A tiny random model learns to write vowels: the mean of the last steps is well above that of the first."""
    _, run = train(
        settings,
        "training.max_steps=25",
        "training.batch_size=32",
        "training.learning_rate=0.01",
        "method=full",
    )
    rewards = values(run, "reward")
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5


def test_the_same_seed_gives_the_same_rewards_and_bits(settings: list[str], tmp_path: Path) -> None:
    _, one = train(settings, f"output_dir={tmp_path / 'a'}")
    _, two = train(settings, f"output_dir={tmp_path / 'b'}")
    assert values(one, "reward") == values(two, "reward")
    assert values(one, "loss") == values(two, "loss")
    assert weights_equal(one, two)
    _, three = train(settings, f"output_dir={tmp_path / 'c'}", "seed=1")
    assert values(one, "reward") != values(three, "reward")


def test_a_resumed_run_equals_an_uninterrupted_one(settings: list[str], tmp_path: Path) -> None:
    """Stopped by SIGINT after step 1 and resumed, the run makes the same completions and ends at the same weights."""
    settings = [*settings, "data.eval_fraction=0.1", "training.keep_best=false"]
    _, whole = train(settings, f"output_dir={tmp_path / 'whole'}")
    broken = [*settings, f"output_dir={tmp_path / 'broken'}"]

    from trimtab.recipes import trainer_driver

    class Interrupt(trainer_driver.GracefulStop):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)
            super().on_step_end(args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_driver, "GracefulStop", Interrupt)
        summary, _ = train(broken)
    assert (summary["status"], summary["steps"]) == ("interrupted", 1)
    run = tmp_path / "broken"
    assert [line["step"] for line in lines(run, "eval")] == [0], "told to stop, it does not evaluate first"
    assert [line["step"] for line in lines(run, "save")] == [1]
    # Other prompts than those of the first start, and a copy that somebody set aside.
    shutil.copytree(run / "checkpoints" / "checkpoint-1", run / "checkpoints" / "checkpoint-1-good")
    resumed, run = train(broken, "training.resume=true", 'samples.prompts=["What is 1 + 1?"]')
    assert [sample["prompt"] for sample in resumed["samples"]] == ["What is 1 + 1?"]
    assert resumed["status"] == "finished"
    assert values(run, "reward") == values(whole, "reward")
    assert weights_equal(whole, run)


def test_several_steps_on_one_set_of_completions_survive_a_stop_and_a_resume(
    settings: list[str], tmp_path: Path
) -> None:
    settings = [*settings, "grpo.num_iterations=2", "training.max_steps=6"]
    _, whole = train(settings, f"output_dir={tmp_path / 'whole'}", "training.save_steps=3")

    from trimtab.recipes import trainer_driver

    class Interrupt(trainer_driver.GracefulStop):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.stopped = self.stopped or state.global_step == 3
            super().on_step_end(args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_driver, "GracefulStop", Interrupt)
        summary, _ = train(settings)
    assert (summary["status"], summary["steps"]) == ("interrupted", 4), "not amid the steps on one set"
    _, run = train(settings, "training.resume=true")
    assert weights_equal(whole, run)

    # None is saved amid them, for a power cut either.
    assert sorted(folder.name for folder in (whole / "checkpoints").iterdir()) == [
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert [line["step"] for line in lines(whole) if "reward" in line] == [1, 3, 5]


def test_told_to_stop_in_the_last_step_the_run_is_whole(settings: list[str]) -> None:
    from trimtab.recipes import trainer_driver

    class Interrupt(trainer_driver.GracefulStop):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == state.max_steps:
                os.kill(os.getpid(), signal.SIGTERM)
            super().on_step_end(args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_driver, "GracefulStop", Interrupt)
        summary, run = train(settings, "training.max_steps=1")
    assert summary["status"] == "finished"
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def test_a_reward_that_does_not_apply_is_none_wherever_it_is_told(
    settings: list[str], rewards_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards = f"reward=[{rewards_module}:vowels,{rewards_module}:never]"
    summary, run = train(settings, rewards, "training.max_steps=1", "monitor.progress=plain")
    assert summary["completions"][0]["rewards"]["never"] is None
    assert lines(run, "completions")[0]["samples"][0]["rewards"]["never"] is None
    assert "NaN" not in (run / "summary.json").read_text()
    assert "never none)" in capsys.readouterr().err


def test_full_tuning_against_a_reference(settings: list[str]) -> None:
    """Without an adapter to switch off, a frozen second model is the reference, on the plan's device."""
    _, run = train(
        settings, "method=full", "grpo.beta=0.1", "training.learning_rate=0.001", "training.max_steps=2"
    )
    assert values(run, "kl")[0] == pytest.approx(0, abs=1e-5)
    assert values(run, "kl")[1] > 0
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss_of_trl(settings: list[str], loss: str) -> None:
    _, run = train(settings, f"loss_type={loss}", "training.max_steps=1", "top_p=0.9", "temperature=0.8")
    assert all(math.isfinite(value) for value in values(run, "loss"))


def test_accumulation_and_held_out_prompts(settings: list[str]) -> None:
    summary, run = train(
        settings,
        "training.batch_size=4",
        "training.gradient_accumulation_steps=2",
        "data.eval_fraction=0.2",
        "training.eval_batch_size=8",
        "training.max_steps=2",
    )
    assert summary["eval_rows"] == 5
    assert summary["metrics"]["held-out reward"]["before"] is not None
    assert lines(run, "eval")[0]["eval_reward"] == summary["metrics"]["held-out reward"]["before"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raises", "raised ZeroDivisionError"),
        ("too_few", "gave 1 values for 2 completions"),
        ("not_a_number", "gave nan"),
    ],
)
def test_a_broken_reward_stops_before_training_with_its_sample(
    settings: list[str], rewards_module: str, tmp_path: Path, function: str, told: str
) -> None:
    rows = [{"question": "What is 3 + 4?", "answer": "7"}, {"question": "What is 1 + 1?", "answer": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(RequestError, match="the run cannot begin") as stopped:
        train(settings, f"data={file}", f"reward={rewards_module}:{function}")
    assert told in str(stopped.value)
    assert "What is 3 + 4?" in str(stopped.value)


def test_a_reward_that_breaks_while_training_stops_the_run_with_the_sample(
    settings: list[str], rewards_module: str
) -> None:
    with pytest.raises(RewardError, match="ZeroDivisionError") as stopped:
        train(settings, f"reward={rewards_module}:raises", "training.max_steps=50", "training.batch_size=24")
    assert "answer:     '7'" in str(stopped.value)
    assert "completion:" in str(stopped.value)
