"""Every combination of request and machine gives a sound plan or an error that names the way out."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path

import pytest

from trimtab.hardware import Accelerator, Cpu, Hardware, Launcher
from trimtab.placement import (
    ModelProfile,
    PlacementError,
    PlacementPlan,
    PlacementRequest,
    Workload,
    check_request,
    resolve,
)
from trimtab.placement.profile import Part

GIB = 2**30
SETTINGS = ("device=", "precision=", "model_parallel", "sharding", "processes=", "training.batch_size")


def gpu(index: int, *, free: float = 24, total: float = 24, capability: str = "8.6") -> Accelerator:
    return Accelerator(
        name=f"cuda:{index}",
        model=f"Test GPU {capability}",
        total_bytes=int(total * GIB),
        free_bytes=int(free * GIB),
        bf16=float(capability) >= 8,
        capability=capability,
    )


MPS = Accelerator(name="mps", model="Apple arm64", total_bytes=16 * GIB, free_bytes=16 * GIB, bf16=True)


def machine(
    *accelerators: Accelerator, cpu_bf16: bool = False, launcher: Launcher | None = None, free: float = 64
) -> Hardware:
    return Hardware(
        cpu=Cpu(model="Test CPU", cores=4, total_bytes=64 * GIB, free_bytes=int(free * GIB), bf16=cpu_bf16),
        accelerators=accelerators,
        launcher=launcher or Launcher(name="none"),
        torch_version="2.13",
        cuda_build="12.9" if accelerators else None,
    )


def launched(name: str, world: int, rank: int = 0) -> Launcher:
    return Launcher(name=name, rank=rank, world_size=world, local_rank=rank, local_world_size=world)


def model(gigabytes: float, layers: int = 16) -> ModelProfile:
    """A frozen model of about this many GB in 16 bits, with small activations and a small head."""
    each = int(gigabytes * GIB / 2 / layers)
    parts = [Part(name="model.embed_tokens", parameters=1000, trainable=0, is_layer=False)]
    parts += [
        Part(name=f"model.layers.{i}", parameters=each, trainable=1000, is_layer=True) for i in range(layers)
    ]
    parts.append(Part(name="lm_head", parameters=1000, trainable=0, is_layer=False))
    return ModelProfile(parts=tuple(parts), hidden=64, intermediate=256, vocabulary=1000, attention=48)


SMALL, LARGE, HUGE = model(4), model(36), model(200)

MACHINES = {
    "cpu": machine(),
    "cpu with bf16": machine(cpu_bf16=True),
    "mps": machine(MPS),
    "1 gpu": machine(gpu(0)),
    "2 gpus": machine(gpu(0), gpu(1)),
    "4 gpus": machine(*(gpu(i) for i in range(4))),
    "2 turing": machine(gpu(0, capability="7.5"), gpu(1, capability="7.5")),
    "ampere and volta": machine(gpu(0), gpu(1, capability="7.0")),
    "pascal": machine(gpu(0, capability="6.1")),
    "one busy": machine(gpu(0), gpu(1, free=1)),
}
LAUNCHERS = {
    "none": Launcher(name="none"),
    "stale": Launcher(name="none", stale=("RANK", "WORLD_SIZE")),
    "torchrun 1": launched("torchrun", 1),
    "torchrun 2": launched("torchrun", 2, 1),
    "torchrun 4": launched("torchrun", 4, 3),
    "slurm 2": launched("slurm", 2, 1),
}
DEVICES = ("auto", "cpu", "mps", "cuda", "cuda:0", "cuda:1", "cuda:7")


def assert_sound(plan: PlacementPlan, request: PlacementRequest, hardware: Hardware) -> None:
    launcher = hardware.launcher
    # The device exists, and is the one asked for.
    assert plan.device == "cpu" or hardware.get(plan.device) is not None
    if request.device != "auto":
        assert plan.device == request.device or (request.device == "cuda" and plan.kind == "cuda")
    if plan.kind == "cuda" and launcher.multi_process and launcher.name == "torchrun":
        assert plan.device == f"cuda:{launcher.local_rank}"
    # The precision is the one asked for, and every device that the plan uses has it.
    assert request.precision in ("auto", plan.precision)
    assert plan.scaler == (plan.precision == "fp16")
    assert plan.trainable_precision == "fp32"
    if plan.precision == "fp16":
        assert plan.kind == "cuda"
    if plan.precision == "bf16":
        own_launch = plan.starts_launcher and plan.kind == "cuda"
        used = [g.name for g in hardware.gpus[: plan.processes]] if own_launch else plan.devices
        for name in used:
            found = hardware.get(name)
            assert found.bf16 if found else hardware.cpu.bf16
    # Strategy, processes and device map say the same.
    assert (plan.strategy in ("single", "split")) == (plan.processes == 1)
    assert (plan.strategy == "split") == (plan.device_map is not None)
    if launcher.name != "none":
        assert plan.processes == launcher.world_size
        assert not plan.starts_launcher
    elif plan.kind == "cuda":
        assert plan.processes <= len(hardware.gpus)
    assert request.processes in (None, plan.processes)
    if plan.device_map is not None:
        assert len(plan.devices) > 1
        assert set(plan.devices) <= {g.name for g in hardware.gpus}
        assert not launcher.multi_process
        assert ":" not in request.device
    # What was demanded is done, what was forbidden is not.
    if request.model_parallel is not None:
        assert (plan.strategy == "split") == request.model_parallel
    if request.model_parallel is False and launcher.name == "none" and not request.sharding:
        assert plan.processes == (request.processes or 1)
    if request.sharding is not None:
        assert (plan.strategy == "sharded") == request.sharding
    if plan.strategy == "sharded":
        assert plan.kind == "cuda"
        assert ":" not in request.device
    # Each decision has a reason; no GPU is given more than it has.
    decisions = ["device", "precision", "scaler", "weights", "strategy"]
    assert all(plan.reasons[name] for name in decisions + ["device_map"] * (plan.device_map is not None))
    assert bool(launcher.stale) == any("RANK" in note for note in plan.notes)
    if plan.kind == "cuda":
        assert all(share.fits for share in plan.memory.values())
    json.dumps(plan.as_dict())


def assert_clear(error: PlacementError) -> None:
    """What was found, why it cannot work, what to change, and the setting by name."""
    found, why, change = str(error).split("\n")
    assert any(setting in found + change for setting in SETTINGS), error
    assert why.startswith("  why: ")
    assert change.startswith("  change: ")
    assert error.exit_code == 2


@pytest.mark.parametrize("profile", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", MACHINES)
def test_every_combination(name: str, launcher: str, profile: ModelProfile) -> None:
    hardware = dataclasses.replace(MACHINES[name], launcher=LAUNCHERS[launcher])
    planned = refused = 0
    for device, precision, parallel, sharding, processes in product(
        DEVICES, ("auto", "fp32", "bf16", "fp16"), (None, True, False), (None, True, False), (None, 1, 2, 4)
    ):
        request = PlacementRequest(
            device=device,
            precision=precision,
            model_parallel=parallel,
            sharding=sharding,
            processes=processes,
        )
        try:
            plan = resolve(request, hardware, profile)
        except PlacementError as error:
            refused += 1
            assert_clear(error)
        else:
            planned += 1
            check_request(request, hardware)  # what can be planned is never refused beforehand
            assert_sound(plan, request, hardware)
    assert planned
    assert refused


def plan_for(
    hardware: Hardware, profile: ModelProfile | None = SMALL, *, full_tuning: bool = False, **request: object
) -> PlacementPlan:
    asked = PlacementRequest(**request)  # type: ignore[arg-type]
    plan = resolve(asked, hardware, profile, full_tuning=full_tuning)
    assert_sound(plan, asked, hardware)
    return plan


REFUSED = {
    "cuda without CUDA": (machine(), {"device": "cuda"}, "device=cuda: there is no CUDA device"),
    "cuda index without CUDA": (machine(), {"device": "cuda:0"}, "built without CUDA"),
    "an index that is not there": (machine(gpu(0)), {"device": "cuda:1"}, "visible here: cuda:0"),
    "mps without mps": (machine(gpu(0)), {"device": "mps"}, "device=mps: there is no Apple GPU"),
    "not a device": (machine(gpu(0)), {"device": "cudax"}, "device=cudax: not a device"),
    "not a precision": (machine(), {"precision": "fp8"}, "precision=fp8: not a precision"),
    "fp16 on cpu": (machine(), {"precision": "fp16"}, "precision=fp16 on cpu"),
    "fp16 on mps": (machine(MPS), {"precision": "fp16"}, "precision=fp16 on mps"),
    "bf16 on cpu without it": (machine(), {"precision": "bf16"}, "does not compute bf16 natively"),
    "bf16 on turing": (
        MACHINES["2 turing"],
        {"precision": "bf16"},
        "(compute capability 7.5) has no native bf16",
    ),
    "bf16 on one of two": (MACHINES["ampere and volta"], {"precision": "bf16"}, "precision=bf16 on cuda:1"),
    "two GPUs demanded, one there": (
        machine(gpu(0)),
        {"model_parallel": True},
        "model_parallel=true with 1 GPU",
    ),
    "a split on the cpu": (
        MACHINES["2 gpus"],
        {"model_parallel": True, "device": "cpu"},
        "model_parallel=true with device=cpu",
    ),
    "a split on one named GPU": (
        MACHINES["2 gpus"],
        {"model_parallel": True, "device": "cuda:1"},
        "model_parallel=true with device=cuda:1",
    ),
    "a split and shards": (
        MACHINES["2 gpus"],
        {"model_parallel": True, "sharding": True},
        "model_parallel=true together with sharding=true",
    ),
    "a split and processes": (
        MACHINES["2 gpus"],
        {"model_parallel": True, "processes": 2},
        "model_parallel=true together with several processes",
    ),
    "a split under torchrun": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 2)),
        {"model_parallel": True},
        "model_parallel=true under torchrun with 2 processes",
    ),
    "one named GPU for two ranks": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 2)),
        {"device": "cuda:1"},
        "every process would use the same GPU",
    ),
    "more ranks than GPUs": (
        machine(gpu(0), launcher=launched("torchrun", 2, 1)),
        {},
        "local rank 1 has no GPU of its own",
    ),
    "two ranks on the Apple GPU": (
        machine(MPS, launcher=launched("torchrun", 2)),
        {},
        "one device for all of them",
    ),
    "processes against the launcher": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 2)),
        {"processes": 4},
        "processes=4, but torchrun started 2",
    ),
    "processes against a launcher of one": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 1)),
        {"processes": 2},
        "processes=2, but torchrun started 1",
    ),
    "more processes than GPUs": (machine(gpu(0)), {"processes": 2}, "processes=2 with 1 GPUs"),
    "several processes on one named GPU": (
        MACHINES["2 gpus"],
        {"processes": 2, "device": "cuda:1"},
        "processes=2 with device=cuda:1",
    ),
    "no process": (machine(), {"processes": 0}, "processes=0"),
    "shards on the cpu": (machine(), {"sharding": True, "processes": 2}, "sharding=true with device=cpu"),
    "shards on the cpu beside GPUs": (
        MACHINES["2 gpus"],
        {"sharding": True, "device": "cpu"},
        "sharding=true with device=cpu",
    ),
    "shards of one process": (
        MACHINES["2 gpus"],
        {"sharding": True, "processes": 1},
        "sharding=true with one process",
    ),
    "shards on one named GPU": (
        MACHINES["2 gpus"],
        {"sharding": True, "device": "cuda:1"},
        "sharding=true with one process",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_model_is_known(case: str) -> None:
    hardware, request, text = REFUSED[case]
    with pytest.raises(PlacementError) as error:
        check_request(PlacementRequest(**request), hardware)
    assert text in str(error.value)


TOO_LARGE = {
    "one GPU": (machine(gpu(0)), {}),
    "a named GPU": (MACHINES["2 gpus"], {"device": "cuda:1"}),
    "one process, no split": (MACHINES["2 gpus"], {"processes": 1, "model_parallel": False}),
    "no split": (MACHINES["2 gpus"], {"model_parallel": False}),
    "neither split nor shards": (MACHINES["2 gpus"], {"sharding": False, "model_parallel": False}),
    "two processes, no shards": (MACHINES["2 gpus"], {"sharding": False, "processes": 2}),
    "two ranks, no shards": (machine(gpu(0), gpu(1), launcher=launched("torchrun", 2)), {"sharding": False}),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_too_large_names_the_figures_and_a_change(case: str) -> None:
    hardware, request = TOO_LARGE[case]
    with pytest.raises(
        PlacementError, match=r"would need about 3\d\.\d GiB \(estimate\) and has 24\.0 GiB free"
    ):
        plan_for(hardware, LARGE, **request)


@pytest.mark.parametrize("request_", [{}, {"sharding": True}, {"model_parallel": True}])
def test_too_large_for_all_gpus_together(request_: dict[str, bool]) -> None:
    with pytest.raises(PlacementError, match="does not fit"):
        plan_for(MACHINES["2 gpus"], HUGE, **request_)


CHOSEN = {
    "cpu": (machine(), SMALL, {}, "cpu", "single", 1),
    "cpu asked for beside GPUs": (MACHINES["2 gpus"], SMALL, {"device": "cpu"}, "cpu", "single", 1),
    "cpu, two processes": (machine(), SMALL, {"processes": 2}, "cpu", "data_parallel", 2),
    "cpu under torchrun": (machine(launcher=launched("torchrun", 2)), SMALL, {}, "cpu", "data_parallel", 2),
    "cpu under torchrun, one rank": (
        machine(launcher=launched("torchrun", 1)),
        SMALL,
        {},
        "cpu",
        "single",
        1,
    ),
    "mps": (machine(MPS), SMALL, {}, "mps", "single", 1),
    "mps asked for": (machine(MPS), SMALL, {"device": "mps"}, "mps", "single", 1),
    "one GPU": (machine(gpu(0)), SMALL, {}, "cuda:0", "single", 1),
    "a named GPU": (MACHINES["2 gpus"], SMALL, {"device": "cuda:1"}, "cuda:1", "single", 1),
    "all GPUs": (MACHINES["4 gpus"], SMALL, {}, "cuda:0", "data_parallel", 4),
    "all GPUs, split forbidden": (
        MACHINES["4 gpus"],
        SMALL,
        {"model_parallel": False},
        "cuda:0",
        "single",
        1,
    ),
    "two of four, split forbidden": (
        MACHINES["4 gpus"],
        SMALL,
        {"model_parallel": False, "processes": 2},
        "cuda:0",
        "data_parallel",
        2,
    ),
    "two of four": (MACHINES["4 gpus"], SMALL, {"processes": 2}, "cuda:0", "data_parallel", 2),
    "one of four": (MACHINES["4 gpus"], SMALL, {"processes": 1}, "cuda:0", "single", 1),
    "shards asked for": (MACHINES["4 gpus"], SMALL, {"sharding": True}, "cuda:0", "sharded", 4),
    "two shards asked for": (
        MACHINES["4 gpus"],
        SMALL,
        {"sharding": True, "processes": 2},
        "cuda:0",
        "sharded",
        2,
    ),
    "split asked for": (MACHINES["4 gpus"], SMALL, {"model_parallel": True}, "cuda:0", "split", 1),
    "too large for one": (MACHINES["4 gpus"], LARGE, {}, "cuda:0", "split", 1),
    "too large for one process": (MACHINES["4 gpus"], LARGE, {"processes": 1}, "cuda:0", "split", 1),
    "too large, shards forbidden": (MACHINES["4 gpus"], LARGE, {"sharding": False}, "cuda:0", "split", 1),
    "too large for each of four, split forbidden": (
        MACHINES["4 gpus"],
        LARGE,
        {"model_parallel": False, "processes": 4},
        "cuda:0",
        "sharded",
        4,
    ),
    "shards over all, split forbidden": (
        MACHINES["4 gpus"],
        LARGE,
        {"model_parallel": False, "sharding": True},
        "cuda:0",
        "sharded",
        4,
    ),
    "too large for each of two": (MACHINES["4 gpus"], LARGE, {"processes": 2}, "cuda:0", "sharded", 2),
    "too large under torchrun": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 2, 1)),
        LARGE,
        {},
        "cuda:1",
        "sharded",
        2,
    ),
    "too large under torchrun, one rank": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 1)),
        LARGE,
        {},
        "cuda:0",
        "split",
        1,
    ),
    "all GPUs, but torchrun started one": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 1)),
        SMALL,
        {},
        "cuda:0",
        "single",
        1,
    ),
    "a second rank": (
        machine(gpu(0), gpu(1), launcher=launched("torchrun", 2, 1)),
        SMALL,
        {},
        "cuda:1",
        "data_parallel",
        2,
    ),
    "slurm with one visible GPU per task": (
        machine(gpu(0), launcher=launched("slurm", 4, 3)),
        SMALL,
        {},
        "cuda:0",
        "data_parallel",
        4,
    ),
    "the other GPU is busy": (MACHINES["one busy"], SMALL, {}, "cuda:0", "single", 1),
    "stale variables": (
        machine(launcher=Launcher(name="none", stale=("RANK",))),
        SMALL,
        {},
        "cpu",
        "single",
        1,
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_chosen(case: str) -> None:
    hardware, profile, request, device, strategy, processes = CHOSEN[case]
    plan = plan_for(hardware, profile, **request)
    assert (plan.device, plan.strategy, plan.processes) == (device, strategy, processes)


PRECISIONS = {
    "cpu": (machine(), {}, "fp32"),
    "cpu with bf16 stays fp32": (machine(cpu_bf16=True), {}, "fp32"),
    "cpu with bf16, asked for": (machine(cpu_bf16=True), {"precision": "bf16"}, "bf16"),
    "mps": (machine(MPS), {}, "fp32"),
    "mps, bf16 asked for": (machine(MPS), {"precision": "bf16"}, "bf16"),
    "ampere": (machine(gpu(0)), {}, "bf16"),
    "ampere, fp16 asked for": (machine(gpu(0)), {"precision": "fp16"}, "fp16"),
    "ampere, fp32 asked for": (machine(gpu(0)), {"precision": "fp32"}, "fp32"),
    "blackwell": (machine(gpu(0, capability="10.0")), {}, "bf16"),
    "turing": (MACHINES["2 turing"], {}, "fp16"),
    "pascal": (MACHINES["pascal"], {}, "fp32"),
    "two kinds agree on what both have": (MACHINES["ampere and volta"], {}, "fp16"),
    "one of two kinds": (MACHINES["ampere and volta"], {"device": "cuda:0"}, "bf16"),
}


@pytest.mark.parametrize("case", PRECISIONS)
def test_precision(case: str) -> None:
    hardware, request, precision = PRECISIONS[case]
    plan = plan_for(hardware, **request)
    assert plan.precision == precision
    assert plan.weight_precision == precision


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_on_two_kinds_of_gpu_agree(rank: int) -> None:
    hardware = dataclasses.replace(MACHINES["ampere and volta"], launcher=launched("torchrun", 2, rank))
    assert plan_for(hardware).precision == "fp16"


def test_ranks_agree_on_sharding_whatever_is_free() -> None:
    """One rank's GPU is nearly full: it fails by itself, it does not choose a strategy that the others do not."""
    launcher = launched("torchrun", 2, 0)
    assert plan_for(machine(gpu(0), gpu(1, free=1), launcher=launcher)).strategy == "data_parallel"
    with pytest.raises(PlacementError, match="does not fit on cuda:0"):
        plan_for(machine(gpu(0, free=1), gpu(1), launcher=launcher))


def test_shorter_rows_are_advised_where_they_can_help() -> None:
    """Not where weights, gradients and the optimizer's state alone are too much."""
    share = plan_for(machine(gpu(0))).memory["cuda:0"]
    standing = (share.weights + share.gradients + share.optimizer + share.overhead) / GIB
    with pytest.raises(PlacementError, match="however short the rows") as refused:
        plan_for(machine(gpu(0, free=standing - 0.1)))
    assert "data.max_length" not in str(refused.value)
    assert "or use more or larger GPUs" in str(refused.value)
    with pytest.raises(PlacementError, match=r"data\.max_length") as refused:
        plan_for(machine(gpu(0, free=(standing + share.needed / GIB) / 2)))
    assert "however short" not in str(refused.value)


def test_full_tuning_holds_weights_in_fp32() -> None:
    plan = plan_for(machine(gpu(0)), full_tuning=True)
    assert (plan.precision, plan.weight_precision) == ("bf16", "fp32")
    assert "stay fp32" in plan.reasons["weights"]


def test_without_a_profile_a_model_is_taken_to_fit() -> None:
    assert plan_for(MACHINES["2 gpus"], None).strategy == "data_parallel"
    assert plan_for(MACHINES["2 gpus"], None).memory == {}
    with pytest.raises(PlacementError, match="pass profile=profile_model"):
        plan_for(MACHINES["2 gpus"], None, model_parallel=True)


def test_a_model_without_layers_cannot_be_split() -> None:
    whole = ModelProfile(
        parts=(Part(name="", parameters=1000, trainable=1000, is_layer=False),),
        hidden=8,
        intermediate=32,
        vocabulary=0,
        attention=24,
    )
    with pytest.raises(PlacementError, match="without a known stack of layers"):
        plan_for(MACHINES["2 gpus"], whole, model_parallel=True)


def test_a_forbidden_split_keeps_one_device_and_says_how_to_have_more() -> None:
    plan = plan_for(MACHINES["2 gpus"], SMALL, model_parallel=False)
    assert (plan.devices, plan.processes, set(plan.memory)) == (("cuda:0",), 1, {"cuda:0"})
    assert plan.reasons["strategy"] == (
        "model_parallel=false forbids a split, and the model fits on cuda:0; processes asks for more"
    )


def test_a_split_needs_room_on_a_second_gpu() -> None:
    with pytest.raises(PlacementError, match="only cuda:0 would hold anything"):
        plan_for(machine(gpu(0), gpu(1, free=0.6)), SMALL, model_parallel=True)


@pytest.mark.parametrize("free", [0.6, 0.1])
def test_a_split_passes_a_full_gpu_over(free: float) -> None:
    plan = plan_for(machine(gpu(0), gpu(1, free=free), gpu(2)), LARGE)
    assert (plan.strategy, plan.devices) == ("split", ("cuda:0", "cuda:2"))


@pytest.mark.parametrize("request_", [{}, {"model_parallel": False}, {"processes": 1}, {"device": "cuda:0"}])
def test_a_full_first_gpu_is_refused_with_the_name_of_one_that_has_room(request_: dict[str, object]) -> None:
    with pytest.raises(PlacementError, match="change: set device=cuda:1, which has room for the whole model"):
        plan_for(machine(gpu(0, free=0.3), gpu(1)), SMALL, **request_)
    assert plan_for(machine(gpu(0, free=0.3), gpu(1)), SMALL, device="cuda:1").strategy == "single"


def test_the_reason_of_a_map_says_where_the_head_lies() -> None:
    def untied(gigabytes: float) -> ModelProfile:
        sizes = {"embed": gigabytes, "layers.0": 1, "layers.1": 1, "norm": 0, "head": gigabytes}
        parts = [
            Part(name=n, parameters=int(g * GIB / 2), trainable=0, is_layer=n.startswith("layers."))
            for n, g in sizes.items()
        ]
        return ModelProfile(parts=tuple(parts), hidden=16, intermediate=64, vocabulary=100, attention=48)

    together = plan_for(MACHINES["2 gpus"], untied(4), model_parallel=True)
    assert together.reasons["device_map"].endswith("; all else on cuda:0")
    apart = plan_for(MACHINES["2 gpus"], untied(14))
    assert apart.device_map is not None
    assert apart.device_map["head"] == "cuda:1"
    assert "head on cuda:1, for which cuda:0 has no room; all else on cuda:0" in apart.reasons["device_map"]


def test_a_model_too_large_for_the_cpu_is_noted_not_refused() -> None:
    plan = plan_for(machine(free=2), SMALL)
    assert not plan.memory["cpu"].fits
    assert "cpu would need about 8.1 GiB (estimate) and has 2.0 GiB free" in plan.notes[0]


def test_processes_on_the_cpu_share_its_memory() -> None:
    assert plan_for(machine(), SMALL, processes=2).memory["cpu"].capacity == 32 * GIB
    assert plan_for(machine(launcher=launched("torchrun", 4)), SMALL).memory["cpu"].capacity == 16 * GIB
    assert "it may swap" in plan_for(machine(), SMALL, processes=16).notes[0]


def test_ddps_flags_have_a_reason() -> None:
    plan = plan_for(MACHINES["4 gpus"], processes=2)
    assert not plan.unused_parameters
    assert plan.reasons["ddp"].startswith("find_unused_parameters off: every trained tensor takes part")
    routed = dataclasses.replace(SMALL, routed=True)
    plan = plan_for(MACHINES["4 gpus"], routed, processes=2)
    assert plan.unused_parameters
    assert plan.reasons["ddp"].startswith("find_unused_parameters on: no token may go to some of the experts")
    for other in (plan_for(MACHINES["4 gpus"], routed, model_parallel=True), plan_for(machine(), routed)):
        assert "ddp" not in other.reasons
        assert not other.unused_parameters


def test_memory_of_every_gpu_that_a_launch_uses() -> None:
    assert set(plan_for(MACHINES["4 gpus"], processes=2).memory) == {"cuda:0", "cuda:1"}
    assert set(plan_for(MACHINES["4 gpus"], model_parallel=True).memory) == {f"cuda:{i}" for i in range(4)}
    whole = plan_for(MACHINES["4 gpus"], processes=2).memory["cuda:0"]
    shard = plan_for(MACHINES["4 gpus"], processes=2, sharding=True).memory["cuda:0"]
    assert shard.weights == whole.weights // 2


def test_a_heavier_workload_no_longer_fits() -> None:
    light, heavy = Workload(batch_size=1), Workload(batch_size=20000)
    assert resolve(PlacementRequest(), machine(gpu(0)), SMALL, light).strategy == "single"
    with pytest.raises(PlacementError, match=r"lower training\.batch_size"):
        resolve(PlacementRequest(), machine(gpu(0)), SMALL, heavy)


def test_a_plan_cannot_be_changed_and_is_saved_whole(tmp_path: Path) -> None:
    plan = plan_for(MACHINES["2 gpus"], model_parallel=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.device = "cpu"  # type: ignore[misc]
    plan.save(tmp_path / "plan.json")
    saved = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert saved["device_map"] == plan.device_map
    assert saved["reasons"] == plan.reasons
    assert saved["memory"]["cuda:1"]["needed"] == plan.memory["cuda:1"].needed
    assert set(saved) == {field.name for field in dataclasses.fields(plan)}


def test_device_of_a_parameter() -> None:
    plan = PlacementPlan(
        device="cuda:0",
        precision="bf16",
        scaler=False,
        weight_precision="bf16",
        strategy="split",
        device_map={"model.layers.1": "cuda:0", "model.layers.10": "cuda:1", "model.norm": "cuda:0"},
    )
    assert plan.device_of("model.layers.10.mlp.up_proj.lora_A.default.weight") == "cuda:1"
    assert plan.device_of("model.layers.1.mlp.up_proj.weight") == "cuda:0"
    assert plan.device_of("something.new") == "cuda:0"
    assert plan.devices == ("cuda:0", "cuda:1")
    assert plan.load_device_map() == plan.device_map


def test_a_sharded_model_is_loaded_on_the_cpu() -> None:
    plan = plan_for(MACHINES["2 gpus"], sharding=True)
    assert plan.load_device_map() == {"": "cpu"}
    assert plan.device_of("model.norm.weight") == "cuda:0"
