"""Every combination of model_parallel, GPU count and launcher: the strategy that is printed is the plan's."""

from __future__ import annotations

import dataclasses
import re
from itertools import product
from pathlib import Path

import pytest

from trimtab.config import load_config, load_request
from trimtab.hardware import Accelerator, Hardware, Launcher, probe
from trimtab.placement import PlacementError
from trimtab.recipes.plan_text import parts_table, plan_lines
from trimtab.recipes.planning import Planned, plan_run

GIB = 2**30
COUNTS = (0, 1, 2, 4)
LAUNCHERS = {
    "none": Launcher(name="none"),
    "stale": Launcher(name="none", stale=("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    "torchrun 1": Launcher(name="torchrun"),
    "torchrun 2": Launcher(name="torchrun", world_size=2, local_world_size=2),
    "torchrun 2, second": Launcher(name="torchrun", rank=1, local_rank=1, world_size=2, local_world_size=2),
}


def gpu(index: int, free: float = 80.0) -> Accelerator:
    return Accelerator(
        name=f"cuda:{index}",
        model="NVIDIA A100",
        total_bytes=80 * GIB,
        free_bytes=int(free * GIB),
        capability="8.0",
        bf16=True,
    )


def machine(count: int, launcher: Launcher, free: float = 80.0) -> Hardware:
    here = probe()
    gpus = tuple(gpu(i, free) for i in range(count))
    return dataclasses.replace(here, accelerators=gpus, launcher=launcher, cuda_build="12.8")


PLAIN = ("speed.compile=false", "speed.kernels=plain", "speed.head=plain")
"""As a split model is computed in any case."""


def planned(model: Path, value: bool | None, hardware: Hardware, *words: str) -> Planned:
    word = {True: "True", False: "False", None: "None"}[value]
    config = load_config(
        None,
        ["recipe=grpo", f"model={model}", "data=sums", "reward=answer", f"use_model_parallel={word}", *words],
    )
    return plan_run(config, hardware)


def printed(made: Planned) -> str:
    """The strategy as `plan` and `train` print it."""
    request = load_request(None, ["recipe=grpo", "reward=answer"])
    (line,) = [text for text in plan_lines(request, made) if re.match(r"\s*\d+ . strategy", text)]
    return line


@pytest.mark.parametrize(
    ("value", "count", "launcher"), list(product((True, False, None), COUNTS, LAUNCHERS))
)
def test_printed_strategy_and_plan_agree(
    four_layers: Path, value: bool | None, count: int, launcher: str
) -> None:
    started = LAUNCHERS[launcher]
    hardware = machine(count, started)
    # As the seed's table and the contract have it.
    refused = value is True and (count < 2 or started.multi_process)
    refused |= started.multi_process and count == 1 and started.local_rank == 1
    if refused:
        with pytest.raises(PlacementError) as wrong:
            planned(four_layers, value, hardware)
        assert "change:" in str(wrong.value)
        return
    made = planned(four_layers, value, hardware)
    plan, line = made.plan, printed(made)
    assert re.search(rf"strategy +{plan.strategy}, {plan.processes} process", line), line
    assert plan.reasons["strategy"] in line
    assert (plan.strategy == "split") == (len(plan.devices) > 1) == (plan.device_map is not None)
    if value is True:
        assert (plan.strategy, plan.processes, len(plan.devices)) == ("split", 1, count)
    else:
        assert len(plan.devices) == 1, "the model stays whole on one device"
    if started.multi_process:
        assert plan.processes == 2
        assert plan.strategy == "data_parallel"
    if launcher == "stale":
        assert any("ignoring RANK, WORLD_SIZE, LOCAL_RANK" in note for note in plan.notes)
        assert plan.launcher == "none"
    if count > 1 and plan.strategy == "split":
        table = parts_table(made)
        assert {row.rsplit(None, 1)[1] for row in table[1:]} == set(plan.devices)


@pytest.mark.parametrize("count", [2, 4])
def test_null_splits_when_one_gpu_is_too_small_and_says_why(four_layers: Path, count: int) -> None:
    """The small model needs little beside CUDA's own context: a GPU with less free than both has no room for it."""
    needs = (
        planned(four_layers, None, machine(1, LAUNCHERS["none"]), *PLAIN).plan.memory["cuda:0"].needed / GIB
    )
    hardware = machine(count, LAUNCHERS["none"], free=needs * 0.95)
    made = planned(four_layers, None, hardware, *PLAIN)
    assert made.plan.strategy == "split"
    assert "too small" in printed(made)
    assert "GiB" in printed(made)
    with pytest.raises(PlacementError, match="does not fit"):
        planned(four_layers, None, machine(1, LAUNCHERS["none"], free=needs * 0.95), *PLAIN)


def test_generation_counts_in_the_plan(four_layers: Path) -> None:
    """More sequences generated at once need more memory for keys and values; a reference needs its weights."""
    words = ["recipe=grpo", f"model={four_layers}", "reward=answer", "data.max_length=512"]
    hardware = machine(1, LAUNCHERS["none"])
    small, large = (
        plan_run(load_config(None, [*words, f"training.gradient_accumulation_steps={n}"]), hardware).plan
        for n in (1, 64)
    )
    assert large.memory["cuda:0"].cache == 64 * small.memory["cuda:0"].cache > 0
    assert large.memory["cuda:0"].needed > small.memory["cuda:0"].needed
    alone, beside = (
        plan_run(load_config(None, [*words, "method=full", f"beta={beta}"]), hardware).plan
        for beta in (0, 0.1)
    )
    assert beside.memory["cuda:0"].weights > 1.4 * alone.memory["cuda:0"].weights


def with_vllm(model: Path, hardware: Hardware, *words: str) -> Planned:
    more = ["data=sums", "reward=answer", "use_vllm=true", *words]
    return plan_run(load_config(None, ["recipe=grpo", f"model={model}", *more]), hardware)


def test_the_share_of_vllm_is_counted_on_each_gpu(four_layers: Path) -> None:
    """Its share is one of the whole device, whatever is free there."""
    hardware = machine(2, LAUNCHERS["none"], free=60.0)
    plan = with_vllm(four_layers, hardware, "grpo.vllm_memory=0.4").plan
    assert {name: share.reserved for name, share in plan.memory.items()} == {
        "cuda:0": 32 * GIB,
        "cuda:1": 32 * GIB,
    }
    alone = with_vllm(four_layers, hardware, "vllm_mode=server").plan
    assert all(share.reserved == 0 for share in alone.memory.values())
    assert plan.memory["cuda:0"].needed - alone.memory["cuda:0"].needed == 32 * GIB
    assert plan.as_dict()["memory"]["cuda:0"]["reserved"] == 32 * GIB


def test_a_gpu_that_holds_the_model_or_vllm_but_not_both(four_layers: Path) -> None:
    hardware = machine(1, LAUNCHERS["none"], free=40.0)
    assert with_vllm(four_layers, hardware, "grpo.vllm_memory=0.4").plan.strategy == "single"
    with pytest.raises(PlacementError) as wrong:
        with_vllm(four_layers, hardware, "grpo.vllm_memory=0.6")
    assert "48.0 GiB of it for vLLM (grpo.vllm_memory)" in str(wrong.value)
    assert "lower grpo.vllm_memory or set grpo.vllm_mode=server" in str(wrong.value)
