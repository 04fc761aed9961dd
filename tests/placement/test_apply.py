"""A plan carried out: the process's environment, the trainer's arguments, the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from trimtab.config.schema import LoraSettings
from trimtab.hardware import Launcher, detect_launcher, probe
from trimtab.models.adapters import add_lora
from trimtab.placement import (
    PlacementPlan,
    PlacementRequest,
    bind_arguments,
    place,
    prepare_process,
    profile_model,
    resolve,
    trainer_options,
    verify,
)
from trimtab.virtual import virtual_gpus


def plan(**changes: Any) -> PlacementPlan:
    basics: dict[str, Any] = {
        "device": "cpu",
        "precision": "fp32",
        "scaler": False,
        "weight_precision": "fp32",
    }
    return PlacementPlan(**(basics | {"strategy": "single"} | changes))


def cuda_plan(**changes: Any) -> PlacementPlan:
    return plan(**({"device": "cuda:1", "precision": "bf16", "weight_precision": "bf16"} | changes))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy of the environment that the test may change at will."""
    copy = dict(os.environ)
    monkeypatch.setattr(os, "environ", copy)
    return copy


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Any:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_stale_rank_variables_are_removed(environment: dict[str, str]) -> None:
    environment |= {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "1",
    }
    launcher = detect_launcher(environment)
    assert set(launcher.stale) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    prepare_process(plan(), launcher)
    assert not set(launcher.stale) & set(environment)


def test_a_launcher_of_one_process_makes_no_distributed_run(environment: dict[str, str]) -> None:
    """Accelerate would start a process group for any LOCAL_RANK, and refuse a split model in it."""
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    launcher = detect_launcher(environment)
    assert (launcher.name, launcher.world_size) == ("torchrun", 1)
    prepare_process(plan(launcher="torchrun"), launcher)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(environment)


def test_slurm_variables_become_those_of_torch(environment: dict[str, str]) -> None:
    environment |= {
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    launcher = detect_launcher(environment)
    prepare_process(plan(strategy="data_parallel", processes=2, launcher="slurm"), launcher)
    named = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert named == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert environment["MASTER_ADDR"]
    assert environment["MASTER_PORT"].isdecimal()


def test_torchruns_variables_are_left_alone(environment: dict[str, str]) -> None:
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    environment |= ranks
    prepare_process(plan(strategy="data_parallel", processes=2, launcher="torchrun"))
    assert {name: environment[name] for name in ranks} == ranks


def test_what_would_choose_past_the_plan_is_removed_and_said(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environment |= {
        "ACCELERATE_TORCH_DEVICE": "cuda:3",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "false",
    }
    prepare_process(plan(), Launcher(name="none"))
    assert not any(name.startswith("ACCELERATE_") for name in environment)
    assert caplog.messages == [
        "ignoring ACCELERATE_TORCH_DEVICE, ACCELERATE_MIXED_PRECISION: the plan decides"
    ]


def test_a_quiet_environment_is_left_as_it_is(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(environment)
    prepare_process(plan(), Launcher(name="none"))
    assert environment == before
    assert not caplog.messages


OPTIONS = {
    "cpu": (plan(), {"use_cpu": True, "bf16": False, "fp16": False, "dataloader_pin_memory": False}),
    "cpu bf16": (plan(precision="bf16"), {"use_cpu": True, "bf16": True, "fp16": False}),
    "cpu ranks": (plan(strategy="data_parallel", processes=2), {"use_cpu": True, "bf16": False}),
    "mps": (
        plan(device="mps"),
        {"use_cpu": False, "bf16": False, "fp16": False, "dataloader_pin_memory": False},
    ),
    "mps bf16": (plan(device="mps", precision="bf16"), {"use_cpu": False, "bf16": True, "fp16": False}),
    "cuda bf16": (
        cuda_plan(),
        {"use_cpu": False, "bf16": True, "fp16": False, "dataloader_pin_memory": True},
    ),
    "cuda fp16": (cuda_plan(precision="fp16", scaler=True), {"use_cpu": False, "bf16": False, "fp16": True}),
    "split": (
        cuda_plan(strategy="split", device_map={"a": "cuda:0", "b": "cuda:1"}),
        {"use_cpu": False, "bf16": True},
    ),
    "sharded": (
        cuda_plan(strategy="sharded", processes=2),
        {"use_cpu": False, "fsdp": True, "fsdp_config": {"version": 2}},
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_trainer_options(case: str) -> None:
    given, expected = OPTIONS[case]
    options = trainer_options(given)
    assert {name: options.get(name) for name in expected} == expected
    assert ("fsdp" in options) == (given.strategy == "sharded")
    assert options["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert options["ddp_find_unused_parameters"] is False


def test_unused_parameters_are_looked_for_where_the_plan_says() -> None:
    options = trainer_options(plan(strategy="data_parallel", processes=2, unused_parameters=True))
    assert options["ddp_find_unused_parameters"] is True


VALID_HERE = {
    "cpu": plan(),
    "cpu bf16": plan(precision="bf16"),
    "cpu ranks": plan(strategy="data_parallel", processes=2),
    "cuda fp32 sharded": cuda_plan(precision="fp32", strategy="sharded", processes=2),
    "cuda fp16": cuda_plan(precision="fp16", scaler=True),
    "mps": plan(device="mps"),
}


@pytest.mark.parametrize("case", VALID_HERE)
def test_trainer_options_are_valid_arguments(case: str, tmp_path: Path) -> None:
    """All but bf16 on a GPU, which transformers refuses where there is none."""
    given = VALID_HERE[case]
    options = trainer_options(given)
    if given.kind == "cuda":
        options["dataloader_pin_memory"] = False
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", **options)
    assert arguments.bf16 == (given.precision == "bf16")
    assert arguments.fp16 == given.scaler
    assert arguments.mixed_precision == {"fp32": "no"}.get(given.precision, given.precision)
    assert bool(arguments.fsdp) == (given.strategy == "sharded")
    if given.strategy == "sharded":
        assert arguments.fsdp_plugin_args["fsdp_version"] == 2


def test_arguments_take_the_plans_device(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", **trainer_options(plan()))
    bind_arguments(arguments, plan())
    assert arguments.device == torch.device("cpu")
    assert arguments.n_gpu == 0
    assert Accelerator().device == torch.device("cpu")


def test_a_binding_holds_for_accelerate_too_and_ends_with_the_next_arguments(tmp_path: Path) -> None:
    """`meta` stands in for a GPU: a device that neither library would choose by itself."""
    before = dict(os.environ)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    bind_arguments(arguments, plan(device="meta"))
    assert arguments.device == torch.device("meta")
    assert arguments.n_gpu == 1
    assert Accelerator().device == torch.device("meta")
    again = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    assert again.device == torch.device("cpu")
    assert PartialState().device == torch.device("cpu")
    assert dict(os.environ) == before


def test_ranks_find_their_own_device(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    bind_arguments(arguments, plan(device="meta", strategy="data_parallel", processes=2))
    assert arguments.device == torch.device("cpu")


def test_place_on_one_device() -> None:
    model = nn.Linear(2, 2)
    assert place(model, plan(device="meta")) is model
    assert model.weight.device.type == "meta"


def test_a_model_to_be_sharded_is_placed_on_the_cpu() -> None:
    model = place(nn.Linear(2, 2), cuda_plan(strategy="sharded", processes=2))
    assert model.weight.device.type == "cpu"


def test_a_map_with_one_device_places_the_whole_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    placed = place(model, plan(strategy="split", device_map={"0": "cpu", "1": "cpu"}))
    assert {p.device.type for p in placed.parameters()} == {"cpu"}
    assert placed(torch.ones(1, 2)).shape == (1, 2)


def test_a_model_with_adapters_is_split_by_its_own_names() -> None:
    """The plan is made from the model inside PEFT, and placed through PEFT."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    bare = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **shape))
    model = add_lora(bare, LoraSettings(r=2, targets="attention"))
    rows = torch.arange(8).reshape(2, 4)
    expected = model(input_ids=rows).logits
    with virtual_gpus(2):
        split = resolve(
            PlacementRequest(model_parallel=True, precision="fp32"), probe(), profile_model(model)
        )
        assert place(model, split) is model
        assert verify(model, split)
        torch.testing.assert_close(model(input_ids=rows.to("cuda:0")).logits.cpu(), expected)
