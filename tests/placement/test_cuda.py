"""The plan on a real GPU: trainer, batches and scaler follow it, and the memory estimate is near the truth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trimtab.config.schema import ModelSettings
from trimtab.hardware import probe
from trimtab.models import load_model
from trimtab.placement import (
    PlacementFault,
    PlacementGuard,
    PlacementPlan,
    PlacementRequest,
    Workload,
    bind_arguments,
    move,
    own_stream,
    place,
    prepare_process,
    profile_model,
    resolve,
    trainer_options,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not probe().gpus, reason="there is no CUDA device here"),
]

TOKENS = 512
ROWS = [{"input_ids": list(range(1, TOKENS + 1)), "labels": list(range(1, TOKENS + 1))}] * 8


def llama(layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=layers,
            num_attention_heads=16,
            vocab_size=16000,
        )
    )


def plan_of(model: LlamaForCausalLM, work: Workload, **request: Any) -> PlacementPlan:
    asked = PlacementRequest(device="cuda:0", **request)
    return resolve(asked, probe(), profile_model(model), work, full_tuning=True)


def train(model: LlamaForCausalLM, plan: PlacementPlan, folder: Path, **more: Any) -> PlacementGuard:
    prepare_process(plan)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **trainer_options(plan),
        **more,
    )
    bind_arguments(arguments, plan)
    guard = PlacementGuard(plan)
    trainer = Trainer(model=place(model, plan), args=arguments, train_dataset=ROWS, callbacks=[guard])
    assert (trainer.accelerator.scaler is not None) == plan.scaler
    trainer.train()
    assert str(arguments.device) == str(trainer.accelerator.device) == plan.device
    return guard


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_trainer_follows_the_plan(precision: str, tmp_path: Path) -> None:
    model = llama(1)
    plan = plan_of(model, Workload(), precision=precision)
    guard = train(model, plan, tmp_path)
    found = {check.name: check.detail for check in guard.checks}
    assert found["trainer device"] == found["batches"] == "cuda:0"
    assert found["parameters"].endswith("on cuda:0")
    assert found["trainable format"] == "fp32"
    assert ("gradients finite" in found) == (precision != "fp16")


def test_16_bit_weights_under_a_scaler_are_named_before_the_scaler_fails(tmp_path: Path) -> None:
    model = llama(1)
    plan = plan_of(model, Workload(), precision="fp16")
    with pytest.raises(PlacementFault, match="trainable tensors in fp16, planned in fp32"):
        train(model.to(torch.float16), plan, tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_the_estimate_is_near_what_a_step_takes(precision: str, checkpointing: bool, tmp_path: Path) -> None:
    model = llama(12)
    work = Workload(batch_size=2, max_length=TOKENS, gradient_checkpointing=checkpointing)
    plan = plan_of(model, work, precision=precision)
    held = torch.cuda.memory_allocated()
    train(model, plan, tmp_path, gradient_checkpointing=checkpointing)
    share = plan.memory["cuda:0"]
    measured, estimated = torch.cuda.max_memory_allocated() - held, share.needed - share.overhead
    print(
        f"{precision} {checkpointing=}: measured {measured / 2**30:.2f} GiB, estimated {estimated / 2**30:.2f} GiB"
    )
    assert 0.6 < estimated / measured < 1.8


def test_a_batch_moves() -> None:
    plan = plan_of(llama(1), Workload())
    batch = {"x": torch.arange(3), "text": "row"}
    assert str(move(batch, plan)["x"].device) == "cuda:0"
    assert str(batch["x"].device) == "cpu"  # type: ignore[attr-defined]


def test_weights_loaded_inside_another_stream_take_their_room_once(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    plan = plan_of(model, Workload(), precision="fp32")
    del model
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with own_stream(plan):
        loaded = load_model(ModelSettings(name=str(tmp_path)), plan)
        took = torch.cuda.memory_allocated() - held
        assert took >= sum(weight.nbytes for weight in loaded.parameters())
        assert torch.cuda.memory_reserved() - reserved < 1.25 * took
