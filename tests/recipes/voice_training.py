"""A voice trainer around a tiny model and hand-made rows, held to a plan and watched as a recipe's driver does it.

`python voice_training.py STRATEGY OUT BATCH` trains it in this process, or in each of torchrun's, and writes
OUT-rankN.pt: what was logged, the gradients' norms of every step, and the adapters in the end. STRATEGY:
`data_parallel`, `sharded` (FSDP2), or `single`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback, TrainingArguments

from trimtab.config.schema import MonitorSettings
from trimtab.models.voice_loss import teach_voice
from trimtab.monitor.callback import MonitorCallback
from trimtab.placement import (
    PlacementGuard,
    PlacementPlan,
    bind_arguments,
    place,
    prepare_process,
    trainer_options,
)
from trimtab.recipes.voice_trainer import VoiceTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from voice_batches import Row, batch, rows, voice_model

TARGETS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "audio_lm_head",
    "text_lm_head",
]


def plan_for(device: str = "cpu", precision: Any = "fp32", **changes: Any) -> PlacementPlan:
    return PlacementPlan(
        device=device,
        precision=precision,
        scaler=precision == "fp16",
        weight_precision=precision,
        trainable_precision="fp32",
        strategy=changes.pop("strategy", "single"),
        **changes,
    )


def adapted_model(
    plan: PlacementPlan, targets: list[str] | str | None = None, books: int = 4, **changes: Any
) -> Any:
    """Taught, placed and with adapters in fp32, in the order of a run."""
    model = voice_model(books, **changes).to(plan.torch_weight_dtype)
    teach_voice(model)
    model.requires_grad_(False)
    model.config.use_cache = False
    model = place(model, plan)
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets or TARGETS))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


class Seen(TrainerCallback):
    """The gradients' norms of each step, by adapter, as the optimizer gets them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float | None]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = trained(kwargs["model"])
        self.steps.append(
            {name: None if p.grad is None else float(whole(p.grad).norm()) for name, p in named}
        )


def trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters() if p.requires_grad]


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def trainer_of(
    plan: PlacementPlan,
    out: Path,
    train: list[Row],
    held: list[Row] | None = None,
    *,
    model: Any = None,
    kind: type[VoiceTrainer] = VoiceTrainer,
    progress: Any = "none",
    **settings: Any,
) -> VoiceTrainer:
    """A trainer as the recipe's driver makes it."""
    prepare_process(plan)
    model = adapted_model(plan) if model is None else model
    given = {
        "output_dir": str(out),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "steps" if held else "no",
        "eval_steps": 2,
        "eval_on_start": bool(held),
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
        **trainer_options(plan, model),
        **settings,
    }
    arguments = TrainingArguments(**given)
    bind_arguments(arguments, plan)
    monitor = MonitorCallback(MonitorSettings(progress=progress), out, plan.device, devices=plan.devices)
    return kind(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held,
        data_collator=batch,
        callbacks=[monitor, PlacementGuard(plan), Seen()],
    )


def seen(trainer: VoiceTrainer) -> list[dict[str, float | None]]:
    return next(c.steps for c in trainer.callback_handler.callbacks if isinstance(c, Seen))


def train_watched(trainer: VoiceTrainer) -> None:
    """Train, and leave no watchdog behind where that fails."""
    with next(c for c in trainer.callback_handler.callbacks if isinstance(c, MonitorCallback)):
        trainer.train()


def guard_of(trainer: VoiceTrainer) -> PlacementGuard:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, PlacementGuard))


def logged(trainer: VoiceTrainer, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def _main(strategy: str, out: str, size: str) -> None:
    from many_processes import CPUsAsGPUs

    class Sharded(CPUsAsGPUs, VoiceTrainer):
        pass

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    plan = dataclasses.replace(plan_for(strategy=strategy), processes=processes)
    trainer = trainer_of(
        plan,
        Path(out),
        rows(16),
        rows(5, seed=7),
        kind=Sharded if strategy == "sharded" else VoiceTrainer,
        per_device_train_batch_size=int(size),
        per_device_eval_batch_size=int(size),
        gradient_accumulation_steps=2,
        max_steps=6,
    )
    trainer.train()
    told = {check.name: check.ok for check in guard_of(trainer).checks}
    assert told["trainable"], told
    assert told["optimizer"], told
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: whole(p.detach()).clone() for name, p in trained(model)}
    torch.save(
        (trainer.state.log_history, seen(trainer), weights), f"{out}-rank{os.environ.get('RANK', '0')}.pt"
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
