"""Which faster ways a plan takes: on by default where they are proven, off with a reason, an error on demand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.config import load_config
from trimtab.hardware import Accelerator, Cpu, Hardware
from trimtab.placement import (
    ModelProfile,
    PlacementError,
    PlacementPlan,
    PlacementRequest,
    Workload,
    resolve,
)
from trimtab.placement.profile import Part
from trimtab.placement.speed import ANY_HEAD, PARTS, SpeedRequest
from trimtab.recipes.plan_text import speed_rows

GIB = 2**30
LAYERED = ModelProfile(
    parts=tuple(
        Part(name=f"layers.{n}", parameters=GIB // 8, trainable=1000, is_layer=True) for n in range(4)
    ),
    hidden=64,
    intermediate=128,
    attention=192,
    vocabulary=100,
)
ALL = frozenset(PARTS)


def machine(
    *capabilities: str, triton: str | None = "3.6.0", virtual: bool = False, shapes: bool = False
) -> Hardware:
    gpus = tuple(
        Accelerator(
            name=f"cuda:{n}",
            model="Test GPU",
            total_bytes=80 * GIB,
            free_bytes=80 * GIB,
            bf16=float(capability) >= 8,
            capability=capability,
        )
        for n, capability in enumerate(capabilities)
    )
    cpu = Cpu(model="Test CPU", cores=4, total_bytes=64 * GIB, free_bytes=64 * GIB, bf16=False)
    return Hardware(
        cpu=cpu, accelerators=gpus, triton=triton, virtual=virtual, shapes=shapes, cuda_build="13.0"
    )


def planned(hardware: Hardware, work: Workload | None = None, **asked: Any) -> PlacementPlan:
    placed = {key: asked.pop(key) for key in ("model_parallel", "precision") if key in asked}
    return resolve(
        PlacementRequest(**placed),
        hardware,
        LAYERED,
        work,
        full_tuning=asked.get("full_tuning", False),
        speed=SpeedRequest(**{"offered": ALL, **asked}),
    )


def test_all_of_it_is_on_where_it_is_proven() -> None:
    plan = planned(machine("9.0"))
    speed = plan.speed
    assert (speed.adapters, speed.head, speed.compile, speed.padding, speed.kernels) == (
        *("fused", "chunked", True, "none", "triton"),
    )
    assert speed.demanded == ()
    assert "triton 3.6.0 on Test GPU" in plan.reasons["speed.compile"]
    assert all(plan.reasons[f"speed.{part}"] for part in PARTS)


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        (machine("9.0", triton=None), "triton is not installed"),
        (machine("7.5"), "proven from compute capability 8.0"),
        (machine("9.0", "7.0"), "proven from compute capability 8.0"),
        (machine(), "on the CPU by request"),
    ],
)
def test_compiling_is_off_with_a_reason_elsewhere(hardware: Hardware, reason: str) -> None:
    plan = planned(hardware)
    assert not plan.speed.compile
    assert plan.speed.kernels == "plain"
    assert reason in plan.reasons["speed.compile"]
    assert plan.speed.adapters == "fused", "which needs none of it"


def test_the_cpu_compiles_by_request_and_an_older_gpu_tries() -> None:
    for hardware in (machine(), machine("7.5")):
        plan = planned(hardware, compile=True)
        assert plan.speed.compile
        assert plan.speed.demanded == ("compile",)
        assert plan.reasons["speed.compile"] == "asked for"


@pytest.mark.parametrize(
    ("hardware", "asked", "reason", "way_out"),
    [
        (machine("9.0", triton=None), {"compile": True}, "triton is not installed", "install triton"),
        (machine(), {"kernels": "triton"}, "run on GPUs", "speed.kernels: auto"),
        (machine("9.0", "9.0"), {"compile": True, "model_parallel": True}, "split", "model_parallel: false"),
        (machine("9.0"), {"adapters": "fused", "full_tuning": True}, "no adapters", "method: lora"),
        (machine("9.0"), {"kernels": "triton", "dora": True}, "DoRA", "lora.dora: false"),
        (
            machine("9.0"),
            {"kernels": "triton", "adapters": "plain"},
            "fused adapters",
            "speed.adapters: auto",
        ),
        (machine("9.0"), {"padding": "none", "attention": "eager"}, "eager", "model.attn_implementation"),
        (
            machine("9.0"),
            {"padding": "none", "offered": frozenset()},
            "has no such way",
            "speed.padding: auto",
        ),
        (machine(), {"activation_memory_budget": 0.5}, "the compiler", "gradient_checkpointing"),
    ],
)
def test_what_is_demanded_and_cannot_be_had_is_an_error(
    hardware: Hardware, asked: dict[str, Any], reason: str, way_out: str
) -> None:
    with pytest.raises(PlacementError, match=reason) as caught:
        planned(hardware, **asked)
    assert way_out in str(caught.value)


@pytest.mark.parametrize(
    ("hardware", "asked"),
    [(machine("9.0"), {"full_tuning": True}), (machine("9.0", "9.0"), {"model_parallel": True})],
    ids=["trained", "split"],
)
def test_a_head_that_is_trained_or_split_goes_in_chunks_where_the_recipe_can(
    hardware: Hardware, asked: dict[str, Any]
) -> None:
    assert planned(hardware, **asked).speed.head == "plain"
    able = planned(hardware, offered=ALL | {ANY_HEAD}, **asked)
    assert able.speed.head == "chunked"
    assert "no logits of a whole batch" in able.reasons["speed.head"]
    assert able.memory == planned(hardware, **asked).memory, "a tile was held before, too"


def test_a_rehearsal_of_shapes_chooses_what_the_run_would() -> None:
    assert planned(machine("9.0", virtual=True, shapes=True)).speed == planned(machine("9.0")).speed


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        (machine("9.0", virtual=True), "with values"),
        (machine("9.0", triton=None, virtual=True, shapes=True), "not installed where this is rehearsed"),
    ],
)
def test_a_rehearsal_counts_what_is_compiled_also_where_kernels_cannot_run(
    hardware: Hardware, reason: str
) -> None:
    plan = planned(hardware, compile=True, kernels="triton", activation_memory_budget=0.5)
    assert (plan.speed.compile, plan.speed.kernels, plan.speed.demanded) == (True, "plain", ("compile",))
    assert reason in plan.reasons["speed.kernels"]


def test_what_is_forbidden_is_off() -> None:
    plan = planned(
        machine("9.0"), compile=False, adapters="plain", head="plain", padding="padded", kernels="plain"
    )
    plain = planned(machine("9.0"), Workload(training=False))
    assert plan.speed == plain.speed
    assert plain.reasons["speed.compile"] == "there are no gradients"


def test_it_is_kept_with_the_plan_and_told_in_two_lines(tmp_path: Path) -> None:
    plan = planned(machine("9.0", triton=None), activation_memory_budget=None, head="chunked")
    plan.save(tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert saved["speed"]["head"] == "chunked"
    assert saved["speed"]["demanded"] == ["head"]
    assert saved["reasons"]["speed.compile"] == "triton is not installed"
    on, off = speed_rows(plan)
    assert on == ("✓", "speed", "fused adapters, chunked head, rows end to end without padding")
    assert off == ("-", "speed", "layers not compiled, no Triton kernels (triton is not installed)")


def test_the_settings_read_as_they_are_written() -> None:
    for word, value in (("auto", None), ("null", None), ("true", True), ("false", False)):
        assert load_config(None, [f"speed.compile={word}"]).speed.compile is value
    assert SpeedRequest.of(load_config(None, ["speed.padding=padded"]).speed).padding == "padded"
    assert load_config(None, ["use_dora=true", "use_rslora=true"]).lora.dora
