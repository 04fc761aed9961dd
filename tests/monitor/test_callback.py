"""The callback on a real Trainer with a tiny model, on the CPU."""

from __future__ import annotations

import io
import math
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from trimtab.config.schema import MonitorSettings
from trimtab.monitor.callback import MonitorCallback
from trimtab.monitor.health import NonFiniteError
from trimtab.monitor.metrics import read_metrics


class Toy(nn.Module):
    """Linear regression that can be made to go wrong at its n-th forward pass in training, in one of two ways."""

    def __init__(self, fault: str = "", at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4))
        self.fault, self.at, self.calls = fault, at, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (self.layer(x * self.scale).squeeze(-1) - labels).square().mean()
        self.calls += self.training
        if self.training and self.calls == self.at:
            if self.fault == "loss":
                loss = loss * float("nan")
            elif self.fault == "logged loss":  # not finite in the log alone: the gradient knows nothing of it
                loss = loss + torch.tensor(float("inf"))
            elif self.fault == "scale":  # NaN in the gradient of `scale` alone
                loss = loss + (self.scale * 0).square().sum().sqrt()
        return {"loss": loss}


def rows(count: int = 32) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return Dataset.from_dict({"x": x.tolist(), "labels": x.sum(1).tolist()})


def trainer(
    run_dir: Path, monitor: MonitorCallback, model: nn.Module, data: Dataset | None = None, **more: Any
) -> Trainer:
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 0.01,
    } | more
    args = TrainingArguments(
        output_dir=str(run_dir / "checkpoints"),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        **settings,
    )
    data = rows() if data is None else data
    made = Trainer(model, args, train_dataset=data, eval_dataset=data.select(range(8)), callbacks=[monitor])
    made.remove_callback(PrinterCallback)
    return made


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


def callback(run_dir: Path, screen: io.StringIO, **settings: Any) -> MonitorCallback:
    return MonitorCallback(MonitorSettings(**settings), run_dir, "cpu", console=Console(file=screen))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def watchdogs() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "trimtab-watchdog"]


def test_a_language_model_is_shown_and_written_down(tmp_path: Path, screen: io.StringIO) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    data = Dataset.from_list([{"input_ids": [i % 32] * 8, "labels": [i % 32] * 8} for i in range(32)])
    with callback(tmp_path, screen) as monitor:
        made = trainer(
            tmp_path,
            monitor,
            LlamaForCausalLM(config),
            data,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            include_num_input_tokens_seen="all",
        )
        made.evaluate()
        made.train()
    assert watchdogs() == []

    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert Counter(entry["phase"] for entry in entries) == {"train": 8, "eval": 3, "save": 2, "summary": 1}
    assert entries[0]["phase"] == "eval"
    train = [entry for entry in entries if entry["phase"] == "train"]
    assert [entry["step"] for entry in train] == list(range(1, 9))
    for entry in train:
        assert math.isfinite(entry["loss"])
        assert entry["grad_norm"] > 0
        assert entry["tokens_per_second"] > 0
        assert entry["peak_memory_bytes"] >= entry["memory_bytes"] > 2**20

    lines = screen.getvalue().splitlines()
    assert re.fullmatch(r"evaluation after step 0: eval_loss \d\.\d+ \(.+\)", lines[0])
    assert lines[1] == "first step on cpu …"
    pattern = (
        r"step 1/8  loss [\d.]+  lr 1\.00e-02  grad norm [\d.]+  [\d,.]+ tokens/s  memory .+  elapsed 0:\d\d"
    )
    assert re.fullmatch(pattern, lines[2])
    assert re.fullmatch(r"first step on cpu: .+; then about .+ a step \(about .+ left\)", lines[3])
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [f"{n}/8" for n in range(1, 9)]
    assert sum(line.startswith("evaluation after step") for line in lines) == 3
    assert re.match(r"trained 8 steps in .+; loss .+ → .+; peak memory on cpu .+", lines[-1])


def test_steps_a_second_stand_in_where_tokens_are_not_counted(tmp_path: Path, screen: io.StringIO) -> None:
    with callback(tmp_path, screen, progress="plain") as monitor:
        trainer(tmp_path, monitor, Toy(), max_steps=2).train()
    assert "steps/s" in screen.getvalue()
    assert "tokens/s" not in screen.getvalue()


def test_lines_come_without_a_log_too(tmp_path: Path, screen: io.StringIO) -> None:
    with callback(tmp_path, screen) as monitor:
        trainer(
            tmp_path, monitor, Toy(), logging_steps=100, max_steps=3, gradient_accumulation_steps=2
        ).train()
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]


def test_no_progress_and_a_single_step(tmp_path: Path, screen: io.StringIO) -> None:
    with callback(tmp_path, screen, progress="none") as monitor:
        trainer(tmp_path, monitor, Toy(), max_steps=1).train()
    assert screen.getvalue() == ""
    with callback(tmp_path, screen) as monitor:
        trainer(tmp_path, monitor, Toy(), max_steps=1).train()
    assert re.search(r"^first step on cpu: [^;]+$", screen.getvalue(), re.MULTILINE)


def test_a_nan_loss_stops_the_run_and_leaves_the_weights_of_the_step_before(
    tmp_path: Path, screen: io.StringIO
) -> None:
    with callback(tmp_path / "short", screen) as monitor:
        sound = Toy()
        trainer(tmp_path / "short", monitor, sound, max_steps=2, lr_scheduler_type="constant").train()

    model = Toy("loss", at=3)
    with callback(tmp_path / "run", screen) as monitor:
        made = trainer(tmp_path / "run", monitor, model, lr_scheduler_type="constant")
        with pytest.raises(NonFiniteError) as caught:
            made.train()
        assert watchdogs() == [], "nothing is left running even before `close`"
    assert caught.value.step == 3
    assert set(caught.value.parameters) == {"layer.weight", "layer.bias", "scale"}
    text = str(caught.value)
    assert "step 3: the loss is nan" in text
    assert "the loss was nan already" in text
    assert re.search(r"learning rate 0\.01; last good loss: [\d.]+ at step 2", text)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(model), weights(sound), strict=True))

    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["step"], last["phase"], last["what"]) == (3, "nonfinite", "loss")


def test_a_nan_in_one_gradient_is_named_through_the_trainers_clipping(
    tmp_path: Path, screen: io.StringIO
) -> None:
    model = Toy("scale", at=4)
    with callback(tmp_path, screen) as monitor:
        made = trainer(tmp_path, monitor, model, gradient_accumulation_steps=2, max_grad_norm=1.0)
        with pytest.raises(NonFiniteError) as caught:
            made.train()
    assert (caught.value.step, caught.value.parameters) == (2, ["scale"])
    assert "backward pass overflowed" in str(caught.value)
    assert all(tensor.isfinite().all() for tensor in weights(model))


def test_an_infinite_loss_with_a_sound_gradient_stops_before_the_step(
    tmp_path: Path, screen: io.StringIO
) -> None:
    model = Toy("logged loss", at=2)
    with (
        callback(tmp_path, screen) as monitor,
        pytest.raises(NonFiniteError, match="step 2: the loss is inf"),
    ):
        trainer(tmp_path, monitor, model).train()
    assert all(tensor.isfinite().all() for tensor in weights(model))
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["phase"] for entry in entries] == ["train", "nonfinite"], "step 2 was not made"


def test_a_run_told_to_go_on_does_and_warns_once(tmp_path: Path, screen: io.StringIO) -> None:
    model = Toy("loss", at=3)
    with callback(tmp_path, screen, stop_on_nonfinite=False) as monitor:
        trainer(tmp_path, monitor, model).train()
    assert screen.getvalue().count("warning: step 3: the loss is nan") == 1
    train = [entry for entry in read_metrics(tmp_path / "metrics.jsonl") if entry["phase"] == "train"]
    assert len(train) == 8
    assert train[2]["loss"] == "nan"


def test_a_resumed_run_has_every_step_once(tmp_path: Path, screen: io.StringIO) -> None:
    with callback(tmp_path, screen) as monitor:
        trainer(tmp_path, monitor, Toy(), max_steps=6, save_strategy="steps", save_steps=4).train()
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    with callback(tmp_path, screen) as monitor:
        trainer(tmp_path, monitor, Toy(), max_steps=8).train(resume_from_checkpoint=str(checkpoint))
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [entry["step"] for entry in entries if entry["phase"] == "train"] == list(range(1, 9))
    assert [entry["step"] for entry in entries if entry["phase"] == "resume"] == [4]
    assert "going on after step 4 of 8" in screen.getvalue()


def test_a_failing_run_gives_terminal_and_threads_back(tmp_path: Path) -> None:
    class Broken(Toy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            raise RuntimeError("a fault of the model's own")

    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80)
    with (
        pytest.raises(RuntimeError, match="own"),
        MonitorCallback(MonitorSettings(progress="bar"), tmp_path, "cpu", console=console) as monitor,
    ):
        trainer(tmp_path, monitor, Broken()).train()
    assert text.getvalue().rstrip().endswith("\x1b[?25h")
    assert watchdogs() == []


def test_a_hanging_step_is_reported_from_inside_a_run(tmp_path: Path, screen: io.StringIO) -> None:
    stacks = tmp_path / "stacks.txt"

    class Hanging(Toy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.calls == 1:
                for _ in range(600):
                    # On a busy machine the first step may have been reported too.
                    if stacks.exists() and "(step 2;" in stacks.read_text():
                        break
                    threading.Event().wait(0.1)
            return super().forward(x, labels)

    with callback(tmp_path, screen, slow_after_seconds=0.3, stuck_after_seconds=0.6) as monitor:
        trainer(tmp_path, monitor, Hanging(), max_steps=3).train()
    assert "Hanging.forward" in screen.getvalue()
    assert "step 2" in screen.getvalue()
    assert "in forward" in stacks.read_text()


def test_a_held_out_loss_that_is_nan_is_said_but_does_not_lose_the_training(
    tmp_path: Path, screen: io.StringIO
) -> None:
    class NoLabels(Toy):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            result = super().forward(x, labels)
            return result if self.training else {"loss": result["loss"] * float("nan")}

    with callback(tmp_path, screen) as monitor:
        trainer(tmp_path, monitor, NoLabels(), eval_strategy="steps", eval_steps=4).train()
    assert screen.getvalue().count("warning: eval_loss is nan") == 2
    assert screen.getvalue().splitlines()[-1].startswith("trained 8 steps")
