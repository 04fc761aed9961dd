"""Plans for zeroth-order steps: no gradients, no optimizer, weights in the format they compute in, nothing sharded."""

from __future__ import annotations

import pytest

from trimtab.config import load_config
from trimtab.hardware import Accelerator, Cpu, Hardware, Launcher
from trimtab.placement import ModelProfile, PlacementError, PlacementRequest, Workload, resolve
from trimtab.placement.profile import Part
from trimtab.recipes.table import recipe_of

GIB = 2**30
STEPS = Workload(batch_size=16, max_length=64, training=False, lanes=2)


def machine(gpus: int, capability: str = "9.0", launcher: Launcher | None = None) -> Hardware:
    return Hardware(
        cpu=Cpu(model="Test CPU", cores=4, total_bytes=64 * GIB, free_bytes=64 * GIB, bf16=False),
        accelerators=tuple(
            Accelerator(
                name=f"cuda:{i}",
                model="Test GPU",
                total_bytes=24 * GIB,
                free_bytes=24 * GIB,
                bf16=float(capability) >= 8,
                capability=capability,
            )
            for i in range(gpus)
        ),
        launcher=launcher or Launcher(name="none"),
        torch_version="2.13",
        cuda_build="13.0",
    )


def model(gigabytes: float, *, whole: bool = True) -> ModelProfile:
    """A model of so many GB in 16 bits; all of it tuned, or a small adapter in each of its 16 layers."""
    each = int(gigabytes * GIB / 2 / 16)
    parts = tuple(
        Part(name=f"model.layers.{i}", parameters=each, trainable=each if whole else 1000, is_layer=True)
        for i in range(16)
    )
    return ModelProfile(parts=parts, hidden=64, intermediate=256, vocabulary=1000, attention=48)


def test_all_weights_are_tuned_in_the_format_of_the_computation() -> None:
    plan = resolve(PlacementRequest(), machine(1), model(16), STEPS, full_tuning=True)
    assert (plan.precision, plan.weight_precision, plan.trainable_precision) == ("bf16", "bf16", "bf16")
    share = plan.memory["cuda:0"]
    assert share.gradients == share.optimizer == 0
    assert share.weights == 16 * GIB
    # The same model with gradients needs four times as much for its weights and their state alone.
    with pytest.raises(PlacementError, match="does not fit"):
        resolve(
            PlacementRequest(),
            machine(1),
            model(16),
            Workload(batch_size=16, max_length=64),
            full_tuning=True,
        )


def test_an_adapter_stays_fp32_over_a_16_bit_base() -> None:
    plan = resolve(PlacementRequest(), machine(1), model(16, whole=False), STEPS)
    assert (plan.weight_precision, plan.trainable_precision) == ("bf16", "fp32")
    assert plan.memory["cuda:0"].gradients == 0


def test_fp16_needs_no_scaler() -> None:
    plan = resolve(PlacementRequest(), machine(1, "7.5"), model(4), STEPS, full_tuning=True)
    assert (plan.precision, plan.scaler) == ("fp16", False)
    assert plan.reasons["scaler"] == "there are no gradients"


def test_lanes_and_anchors_are_counted() -> None:
    def share(**changes: object) -> tuple[int, int]:
        work = Workload(**({"batch_size": 16, "max_length": 64, "training": False} | changes))  # type: ignore[arg-type]
        plan = resolve(PlacementRequest(), machine(1), model(4), work, full_tuning=True)
        return plan.memory["cuda:0"].activations, plan.memory["cuda:0"].optimizer

    one, two = share(lanes=1), share(lanes=2)
    assert two[0] > one[0]
    assert one[1] == 0
    assert share(anchors=True)[1] == 16 * 64 * 48 * 2


def test_a_model_is_split_but_never_sharded() -> None:
    plan = resolve(PlacementRequest(), machine(2), model(36), STEPS, full_tuning=True)
    assert plan.strategy == "split"
    torchrun = Launcher(name="torchrun", rank=0, world_size=2, local_rank=0, local_world_size=2)
    with pytest.raises(PlacementError, match="whole weights"):
        resolve(PlacementRequest(), machine(2, launcher=torchrun), model(36), STEPS, full_tuning=True)


@pytest.mark.parametrize(
    ("settings", "lanes", "anchors"),
    [
        (["zeroth.method=mezo"], 2, False),
        (["zeroth.method=dizo"], 2, True),
        (["zeroth.method=fzoo", "method=full"], 2, False),
        (["zeroth.method=fzoo", "method=lora"], 9, False),
        (["zeroth.method=fzoo", "zeroth.lanes=4"], 4, False),
        (["zeroth.method=mezo", "zeroth.lanes=1"], 1, False),
    ],
)
def test_the_recipe_says_what_its_steps_need(settings: list[str], lanes: int, anchors: bool) -> None:
    config = load_config(None, ["recipe=zeroth_order", "zeroth.task=sst2", *settings])
    work = recipe_of(config).workload(config, False)
    assert (work.training, work.lanes, work.anchors, work.batch_size) == (False, lanes, anchors, 16)
    if not any(setting.startswith("zeroth.lanes") for setting in settings):
        assert recipe_of(config).workload(config, True).lanes == 1
    sft = recipe_of(load_config(None, [])).workload(load_config(None, []), False)
    assert (sft.training, sft.lanes, sft.anchors) == (True, 1, False)
