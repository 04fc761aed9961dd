"""How many rows a step takes is shown, and held to `training.effective_batch_size`."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

from trimtab.config import ConfigError, load_config
from trimtab.errors import RequestError
from trimtab.placement import PlacementPlan
from trimtab.recipes.effective_batch import check_effective_batch, effective_batch


def plan(processes: int) -> PlacementPlan:
    return PlacementPlan(
        device="cpu",
        precision="fp32",
        scaler=False,
        weight_precision="fp32",
        strategy="data_parallel" if processes > 1 else "single",
        processes=processes,
    )


def config(per_device: int, accumulation: int, wanted: int | None = None) -> Any:
    settings = [
        f"training.batch_size={per_device}",
        f"training.gradient_accumulation_steps={accumulation}",
    ]
    return load_config(None, settings + [f"training.effective_batch_size={wanted}"] * (wanted is not None))


def test_the_seeds_eight_gpus() -> None:
    assert str(effective_batch(config(2, 32), plan(8))) == "2 × 8 × 32 = 512"
    check_effective_batch(config(2, 32, 512), plan(8))
    check_effective_batch(config(2, 32), plan(3))


@pytest.mark.parametrize(
    ("per_device", "processes", "accumulation", "wanted", "ways"),
    [
        (
            *(2, 4, 32, 512),
            [
                "training.gradient_accumulation_steps=64",
                "training.batch_size=4",
                "start 8 processes (processes=8, or by the launcher)",
            ],
        ),
        (2, 1, 1, 512, ["training.gradient_accumulation_steps=256", "training.batch_size=512", "start 256"]),
        (4, 4, 1, 4, ["training.batch_size=1", "start 1 process ("]),
        # 3 processes make no 512 of batches of 2: 510 and 516 are what is near.
        (
            *(2, 3, 32, 512),
            [
                "start 8 processes",
                "training.effective_batch_size=510 with training.gradient_accumulation_steps=85",
                "training.effective_batch_size=516 with training.gradient_accumulation_steps=86",
            ],
        ),
    ],
)
def test_another_product_is_refused_with_the_settings_that_make_it_right(
    per_device: int, processes: int, accumulation: int, wanted: int, ways: list[str]
) -> None:
    asked = config(per_device, accumulation, wanted)
    with pytest.raises(RequestError) as refused:
        check_effective_batch(asked, plan(processes))
    text = str(refused.value)
    product = per_device * processes * accumulation
    assert f"={wanted}, but a step takes {per_device} × {processes} × {accumulation} = {product}" in text
    for way in ways:
        assert way in text


def test_what_no_number_of_processes_makes_is_refused_before_any_launch() -> None:
    with pytest.raises(ConfigError, match="no number of processes"):
        config(3, 2, 512)


def test_global_batch_size_is_another_name_for_it() -> None:
    assert load_config(None, ["global_batch_size=8"]).training.effective_batch_size == 8


def test_the_plan_shows_it_and_refuses_another(trimtab: Callable[..., CompletedProcess[str]]) -> None:
    asked = ["plan", "device=cpu", "training.batch_size=2", "training.gradient_accumulation_steps=3"]
    done = trimtab(*asked, "processes=2")
    assert done.returncode == 0, done.stderr
    assert "batch      2 × 2 × 3 = 12:" in done.stdout
    done = trimtab(*asked, "processes=2", "training.effective_batch_size=24")
    assert done.returncode == 2
    assert "a step takes 2 × 2 × 3 = 12 rows" in done.stderr
    assert "training.gradient_accumulation_steps=6" in done.stderr


def test_under_a_launcher_its_processes_count(trimtab: Callable[..., CompletedProcess[str]]) -> None:
    """Two machines of two: what the config alone cannot know."""
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    torchrun = ranks | {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    done = trimtab("plan", "device=cpu", "training.batch_size=2", "effective_batch_size=8", **torchrun)
    assert done.returncode == 0, done.stderr
    assert "2 × 4 × 1 = 8:" in done.stdout
    done = trimtab("plan", "device=cpu", "training.batch_size=2", "effective_batch_size=4", **torchrun)
    assert done.returncode == 2
    assert "2 × 4 × 1 = 8 rows" in done.stderr
