"""Weights in 16 bits: what a step writes is rounded by chance, right in the mean, and by the counter alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zeroth_helpers import batch, by_chance, halves, same_weights, tiny

from trimtab.errors import RequestError
from trimtab.zeroth import ZerothOrder, ZerothSettings, read_trajectory, replay, tuned_parameters
from trimtab.zeroth.noise import NoiseMaker, Stream
from trimtab.zeroth.steps import step_update
from trimtab.zeroth.sweep import UPDATE, Directions, Sweep

STREAM = Stream(0x0123_4567_89AB_CDEF, 5, 3, UPDATE)
NARROW = [torch.bfloat16, torch.float16]


class Weights(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)


def moved(
    values: torch.Tensor, coefficient: float, step: int = 0, *, stochastic: bool = True
) -> torch.Tensor:
    """The values after an update along the signs of one query."""
    model = Weights(values.clone())
    tuned = tuned_parameters(model)
    Sweep(tuned, stochastic).update_(tuned, Directions(7, step, "signs", (1,), (coefficient,)))
    return model.weight.detach()


def test_the_bits_are_those_of_the_counter_wherever_one_begins() -> None:
    maker, expected = NoiseMaker(torch.device("cpu")), halves(STREAM, 400)
    assert maker.draw_bits(STREAM, 0, 400).tolist() == expected
    assert maker.draw_bits(STREAM, 37, 203).tolist() == expected[37:240]
    assert min(expected) < 1000
    assert max(expected) > 64_500


@pytest.mark.parametrize("dtype", NARROW)
def test_the_mean_of_many_roundings_is_the_value(dtype: torch.dtype) -> None:
    """A step of a fiftieth of a unit: never seen by the nearest, and by chance in one of fifty."""
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    values = torch.ones(200_000, dtype=dtype)
    step = unit / 50
    assert torch.equal(moved(values, step, stochastic=False)[:10], torch.ones(10, dtype=dtype))
    change = moved(values, step).double() - 1
    signs = torch.sign(change[change != 0])
    up, down = int((signs > 0).sum()), int((signs < 0).sum())
    # Binomial: half of them tries for each side, one in fifty (below 1 the unit is half as large: one in twenty-five).
    assert abs(up - 2000) < 5 * 44
    assert abs(down - 4000) < 5 * 62
    assert set(change.tolist()) == {0.0, unit, -unit / 2}


@pytest.mark.parametrize("dtype", NARROW)
def test_a_value_that_the_type_holds_is_kept(dtype: torch.dtype) -> None:
    values = torch.randn(4096).to(dtype)
    far = moved(values, 2.0**-3)
    exact = values.double() - (values.double() - far.double()).sign() * 2.0**-3
    held = exact.to(dtype).double() == exact
    assert held.float().mean() > 0.2
    assert torch.equal(far.double()[held], exact[held])


def test_negative_values_are_rounded_as_their_mirror() -> None:
    wide = torch.linspace(0.1, 3.0, 999)
    assert torch.equal(by_chance(-wide, torch.bfloat16, STREAM), -by_chance(wide, torch.bfloat16, STREAM))


def test_chunks_do_not_matter() -> None:
    values = torch.randn(300_007).to(torch.bfloat16)
    whole = moved(values, 1e-5)
    model = Weights(values.clone())
    tuned = tuned_parameters(model)
    sweep = Sweep(tuned)
    sweep._makers[torch.device("cpu")] = NoiseMaker(torch.device("cpu"), 1000)
    sweep.update_(tuned, Directions(7, 0, "signs", (1,), (1e-5,)))
    assert torch.equal(model.weight.detach(), whole)
    assert not torch.equal(whole, values)
    assert not torch.equal(moved(values, 1e-5, step=1), whole)


@pytest.mark.parametrize(("stochastic", "end"), [(True, (1 - 2.0**-14) ** 1000), (False, 1.0)])
def test_small_steps_add_up(stochastic: bool, end: float) -> None:
    """A thousand steps of a hundredth of a unit: by chance their sum arrives, by the nearest nothing does."""
    model = Weights(torch.ones(40, 100, dtype=torch.bfloat16))
    tuned = tuned_parameters(model)
    sweep = Sweep(tuned, stochastic)
    for step in range(1000):
        # Hardly more than decay: every element moves down by the same share.
        sweep.update_(tuned, Directions(1, step, "signs", (1,), (1e-30,)), shrink=1 - 2.0**-14)
    assert float(model.weight.detach().float().mean()) == pytest.approx(end, abs=0.002)


def test_a_bf16_run_follows_the_fp32_run(tmp_path: Path) -> None:
    """With steps below bf16's unit: the nearest stays at the start, chance goes where fp32 goes."""
    options: dict[str, Any] = {"learning_rate": 1e-6, "eps": 1e-2, "seed": 3, "schedule": "given"}
    start = tiny("llama", torch.bfloat16, layers=1)
    wide, narrow, nearest = copy.deepcopy(start).float(), copy.deepcopy(start), copy.deepcopy(start)
    reference = ZerothOrder(wide, ZerothSettings(**options))
    reference.record(tmp_path / "trajectory.bin")
    for step in range(60):
        reference.step([batch(step)], 1e-6)
    trajectory = read_trajectory(tmp_path / "trajectory.bin")
    # The same losses make the same steps; only the rounding differs.
    for model, rounding in ((narrow, "stochastic"), (nearest, "nearest")):
        tuned = tuned_parameters(model)
        sweep = Sweep(tuned, rounding == "stochastic")
        for record in trajectory.records:
            directions = step_update(trajectory.settings, record.step, record.losses, record.learning_rate)
            assert directions is not None
            sweep.update_(tuned, directions)
    goal = _difference(wide, start)
    # The projection of each run's way on fp32's way: all of it for chance, hardly any for the nearest.
    assert float(_difference(narrow, start) @ goal / (goal @ goal)) == pytest.approx(1.0, abs=0.2)
    assert float(_difference(nearest, start) @ goal / (goal @ goal)) < 0.5


def _difference(model: nn.Module, start: nn.Module) -> torch.Tensor:
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return torch.cat([(a.detach().float() - b.detach().float()).flatten() for a, b in pairs])


def test_a_run_says_how_it_rounds_and_is_replayed_so(tmp_path: Path) -> None:
    start = tiny("llama", torch.bfloat16, layers=1)
    ends = []
    for rounding in ("stochastic", "nearest"):
        model = copy.deepcopy(start)
        optimizer = ZerothOrder(model, ZerothSettings(learning_rate=1e-3, eps=1e-2, rounding=rounding))  # type: ignore[arg-type]
        assert any(
            ("by chance" if rounding == "stochastic" else "rounded away") in line
            for line in optimizer.describe()
        )
        optimizer.record(tmp_path / rounding)
        for step in range(3):
            optimizer.step([batch(step)])
        again = copy.deepcopy(start)
        replay(again, read_trajectory(tmp_path / rounding))
        assert same_weights(model, again)
        ends.append(model)
    assert not same_weights(*ends)


def test_a_trajectory_from_before_there_was_a_choice_was_rounded_to_the_nearest(tmp_path: Path) -> None:
    optimizer = ZerothOrder(tiny("llama", torch.bfloat16, layers=1), ZerothSettings(rounding="nearest"))
    optimizer.record(tmp_path / "t.bin")
    optimizer.step([batch(0)])
    content = (tmp_path / "t.bin").read_bytes()
    assert b'"rounding": "nearest", ' in content
    (tmp_path / "old.bin").write_bytes(content.replace(b'"rounding": "nearest", ', b""))
    assert read_trajectory(tmp_path / "old.bin").settings.rounding == "nearest"


def test_fp32_knows_no_rounding() -> None:
    values = torch.randn(100)
    assert torch.equal(moved(values, 1e-9), moved(values, 1e-9, stochastic=False))
    model = tiny("llama", layers=1)
    assert not any("chance" in line for line in ZerothOrder(model, ZerothSettings()).describe())


def test_another_word_is_refused() -> None:
    with pytest.raises(RequestError, match="stochastic or nearest"):
        ZerothSettings(rounding="down")  # type: ignore[arg-type]
