"""The order of rows follows from seed and epoch, so that a run goes on with the rows that it would have had."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from trimtab.recipes.row_order import (
    ByEpoch,
    end_after,
    heaviest_first,
    is_longer,
    look_at_the_end,
    order_by_epoch,
)

Trimtab = Callable[..., subprocess.CompletedProcess[str]]
LENGTHS = [7, 3, 9, 9, 2, 5, 8, 1, 4, 6, 3, 2]


def order(seed: int, epoch: int) -> list[int]:
    torch.rand(seed + epoch + 1)
    rows = ByEpoch(LengthGroupedSampler(2, lengths=LENGTHS), seed)
    rows.set_epoch(epoch)
    return list(rows)


def test_it_depends_on_seed_and_epoch_alone() -> None:
    assert order(3, 1) == order(3, 1)
    assert sorted(order(3, 1)) == list(range(12))
    assert len({tuple(order(seed, epoch)) for seed in (3, 40) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("padded", "weight"), [(True, lambda taken: max(taken) * len(taken)), (False, sum)])
def test_a_rehearsal_of_shapes_begins_with_the_heaviest_batch_of_the_run(
    tmp_path: Path, grouped: bool, padded: bool, weight: Callable[[list[int]], int]
) -> None:
    def trainer(max_steps: int = -1) -> Trainer:
        made = Trainer(
            model=torch.nn.Linear(1, 1),
            args=TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4,
                num_train_epochs=3,
                max_steps=max_steps,
                seed=5,
                use_cpu=True,
                report_to="none",
                train_sampling_strategy="group_by_length" if grouped else "random",
            ),
            train_dataset=[{"input_ids": [0] * length, "place": i} for i, length in enumerate(LENGTHS)],
        )
        order_by_epoch(made)
        return made

    # What the run itself takes, epoch after epoch.
    loader, taken = trainer().get_train_dataloader(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        taken += [list(batch) for batch in loader.batch_sampler]
    weights = [weight([LENGTHS[place] for place in batch]) for batch in taken]
    assert len(set(weights)) > 1

    for steps in (None, 1):
        rehearsed = trainer()
        heaviest_first(rehearsed, lambda row: len(row["input_ids"]), padded=padded, steps=steps)
        assert rehearsed.accelerator._dataloaders == []
        first, second, *_ = list(rehearsed.get_train_dataloader().batch_sampler)
        heavy = first if steps == 1 else second
        assert weight([LENGTHS[place] for place in heavy]) == max(weights)
        assert sorted(heavy) in [sorted(batch) for batch in taken]
        assert steps == 1 or first == taken[0]

    for steps, changed in ((None, False), (4, False), (2, True)):
        few = trainer(max_steps=4)
        told = heaviest_first(few, lambda row: len(row["input_ids"]), padded=padded, steps=steps)
        assert told is changed
        assert changed or list(few.get_train_dataloader().batch_sampler) == taken[:3]


@pytest.mark.parametrize(("steps", "ranks"), [(None, 1), (3, 1), (2, 1), (None, 2)])
def test_gathered_passes_are_those_of_the_run_around_its_heaviest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, ranks: int
) -> None:
    """Batches of one row, three passes a step: the heaviest (3) begins its step, the next one (7) comes second."""
    lengths = [4, 4, 4, 9, 4, 4, 4, 8, 3, 3, 3, 3] * 3
    made = Trainer(
        model=torch.nn.Linear(1, 1),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=3,
            num_train_epochs=1,
            use_cpu=True,
            report_to="none",
            train_sampling_strategy="sequential",
        ),
        train_dataset=[{"input_ids": [0] * length} for length in lengths],
    )
    monkeypatch.setattr(TrainingArguments, "world_size", ranks)
    assert heaviest_first(made, lambda row: len(row["input_ids"]), padded=True, steps=steps)
    laid = [batch[0] for batch in made.get_train_dataloader().batch_sampler]
    if steps == 2:  # only one more step is made: the heaviest in each of its passes
        assert laid[:6] == [0, 1, 2, 3, 3, 3]
    elif ranks == 1:
        # The heaviest begins its step; the heaviest that comes when gradients are there is another's.
        assert laid[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert laid[9:12] == [3, 4, 5]
    else:
        # Of two ranks the second has it, in the second pass: both are given what that rank takes.
        assert laid[:6] == [0, 1, 2, 3, 4, 5]
        assert laid[6:12] == [1, 1, 3, 3, 5, 5]


REWARD = (
    "def score(completions, **columns):\n    return [sum(map(ord, str(c))) % 97 / 97 for c in completions]\n"
)
GRPO = ["recipe=grpo", "data.source=sums", "grpo.num_generations=2", "grpo.max_completion_length=4"]
JOBS = {
    "grouped": ["data.max_rows=9", "data.eval_fraction=0", "training.group_by_length=true"],
    "grpo": [*GRPO, "data.max_rows=3"],
    "twice": [*GRPO, "data.max_rows=3", "grpo.num_iterations=2"],
}


@pytest.mark.parametrize("job", JOBS)
def test_a_run_goes_on_inside_a_later_epoch_with_the_same_rows(
    job: str, trimtab: Trimtab, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = f"judge_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{judge}.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        *JOBS[job],
        *([f"reward={judge}:score"] if job != "grouped" else []),
        *(
            f"model={tiny_model}",
            "device=cpu",
            "data.max_length=96",
            "monitor.progress=none",
            "samples.prompts=[]",
        ),
        *(
            "training.batch_size=2",
            "training.max_steps=8",
            "training.save_steps=1",
            "training.learning_rate=0.01",
        ),
        *("training.save_total_limit=null", f"output_dir={tmp_path / 'run'}"),
    ]
    done = trimtab("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    weights = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    whole = load_file(weights)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [int(c.name.removeprefix("checkpoint-")) for c in checkpoints] == (
        [2, 4, 6, 8] if job == "twice" else list(range(1, 9))
    )
    for folder in checkpoints[-1:] if job == "twice" else checkpoints[-2:]:
        shutil.rmtree(folder)
    done = trimtab("train", f"{tmp_path / 'run' / 'config.yaml'}", "training.resume=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = load_file(weights)
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
    assert any(tensor.abs().max() > 0 for name, tensor in whole.items() if "lora_B" in name)


def test_a_run_without_a_checkpoint_begins_again(trimtab: Trimtab, tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [
        *(
            f"model={tiny_model}",
            "device=cpu",
            "data.max_rows=8",
            "data.max_length=200",
            "data.eval_fraction=0",
        ),
        *("training.batch_size=4", "training.max_steps=1", "samples.prompts=[]", "monitor.progress=none"),
        f"output_dir={run}",
    ]
    assert trimtab("train", *words, cwd=tmp_path).returncode == 0
    weights = load_file(run / "adapter" / "adapter_model.safetensors")
    for left in ("checkpoints", "adapter"):
        shutil.rmtree(run / left)
    done = trimtab("train", str(run / "config.yaml"), "training.resume=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ended before its first checkpoint: beginning again" in done.stdout
    again = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.scale * x).pow(2).mean()}


@pytest.mark.parametrize("rhythm", ["steps", "epoch"])
@pytest.mark.parametrize(
    ("epochs", "max_steps", "longer"), [(3, -1, True), (1, -1, False), (1, 50, True), (9, 4, False)]
)
def test_a_long_run_ends_after_a_few_steps_with_its_evaluation_and_its_checkpoint(
    tmp_path: Path, rhythm: str, epochs: int, max_steps: int, longer: bool
) -> None:
    """Twelve rows, four in a step: three steps an epoch."""
    rows = [{"x": [float(number)]} for number in range(12)]
    made = Trainer(
        model=_Scaled(),
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=epochs,
            max_steps=max_steps,
            eval_strategy=rhythm,
            save_strategy=rhythm,
            eval_steps=20,
            save_steps=20,
            use_cpu=True,
            report_to="none",
        ),
        train_dataset=rows,
        eval_dataset=rows[:2],
    )
    assert is_longer(made, 4) is longer
    if longer:
        end_after(made, 4)
        made.train()
        assert made.state.global_step == 4
        assert (tmp_path / "checkpoint-4").is_dir()
        assert [entry["step"] for entry in made.state.log_history if "eval_runtime" in entry][-1] == 4


@pytest.mark.parametrize("rhythm", ["epoch", "steps"])
def test_a_rehearsal_may_look_at_the_end_alone(tmp_path: Path, rhythm: str) -> None:
    def trainer(steps: int, every: int) -> SimpleNamespace:
        strategies = {"eval_strategy": rhythm, "save_strategy": rhythm}
        often = {"eval_steps": every, "save_steps": every}
        return SimpleNamespace(
            args=TrainingArguments(str(tmp_path), max_steps=steps, use_cpu=True, **strategies, **often)
        )

    made = trainer(6, 2)
    assert look_at_the_end(made)
    assert (made.args.eval_strategy, made.args.save_strategy) == ("steps", "steps")
    assert (made.args.eval_steps, made.args.save_steps) == (6, 6)
    assert not look_at_the_end(made)
    assert not look_at_the_end(trainer(-1, 2))
