"""Trajectories: a few bytes a step, readable when cut off anywhere, and enough to rebuild the weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zeroth_helpers import batch, same_weights, tiny, with_lora

from trimtab.errors import RequestError
from trimtab.zeroth import NotFinite, ZerothOrder, ZerothSettings, parameters, read_trajectory, replay

COMMON: dict[str, Any] = {
    "learning_rate": 0.02,
    "eps": 0.01,
    "weight_decay": 0.1,
    "seed": 2**40 + 3,
    "interval": 2,
    "projection_iterations": 2,
    "queries": 3,
}


def run(model: nn.Module, path: Path, steps: int = 5, **settings: Any) -> ZerothOrder:
    optimizer = ZerothOrder(model, ZerothSettings(**COMMON | settings))
    optimizer.record(path, base_model="tiny")
    go_on(optimizer, steps)
    return optimizer


def go_on(optimizer: ZerothOrder, until: int) -> None:
    while optimizer.step_number < until:
        optimizer.step([batch(optimizer.step_number)])
        optimizer.project(lambda: [batch(50 + optimizer.forwards)])


def header_size(path: Path) -> int:
    return path.read_bytes().index(b"\n") + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("method", ["mezo", "dizo", "fzoo"])
def test_a_replay_rebuilds_the_weights_bit_for_bit(method: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model, path = tiny("llama", dtype, layers=1), tmp_path / "run" / "trajectory.bin"
    base = copy.deepcopy(model)
    run(model, path, method=method)
    assert not same_weights(model, base)
    trajectory = read_trajectory(path)
    assert trajectory.header["about"] == {"base_model": "tiny"}
    seen: list[tuple[int, int]] = []
    assert replay(base, trajectory, lambda done, total: seen.append((done, total))) == 5
    assert seen[-1] == (5, 5)
    assert same_weights(model, base)
    numbers = (path.stat().st_size - header_size(path)) // 4
    assert numbers == {"mezo": 10, "dizo": 10 + 2 * 4, "fzoo": 20}[method]


def test_a_replay_of_an_adapter(tmp_path: Path) -> None:
    model = with_lora(tiny("qwen3", layers=1))
    base = copy.deepcopy(model)
    run(model, tmp_path / "t.bin", method="dizo")
    replay(base, read_trajectory(tmp_path / "t.bin"))
    assert same_weights(model, base)


def test_a_replay_projects_what_the_run_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever names for a role the program knows that replays it."""
    model = tiny("llama", layers=1)
    base = copy.deepcopy(model)
    run(model, tmp_path / "t.bin", method="dizo")
    monkeypatch.setitem(parameters._ROLE_OF, "v_proj", "output")
    replay(base, read_trajectory(tmp_path / "t.bin"))
    assert same_weights(model, base)


def test_a_replay_takes_weights_in_any_layout(tmp_path: Path) -> None:
    def transposed() -> nn.Module:
        model = nn.Linear(3, 4)
        model.weight.data = torch.arange(12.0).view(3, 4).t()
        model.bias.data.fill_(1)
        return model

    model, base = transposed(), transposed()
    optimizer = ZerothOrder(
        model, ZerothSettings(**COMMON), lambda m, b, lanes: m(b.repeat(lanes, 1)).sum(1).view(lanes, -1)
    )
    optimizer.record(tmp_path / "t.bin")
    optimizer.step([torch.ones(2, 3)])
    replay(base, read_trajectory(tmp_path / "t.bin"))
    assert same_weights(model, base)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_replay_follows_the_schedule(schedule: Any, tmp_path: Path) -> None:
    model = tiny("llama", layers=1)
    base = copy.deepcopy(model)
    run(model, tmp_path / "t.bin", schedule=schedule, warmup_steps=2, total_steps=5)
    replay(base, read_trajectory(tmp_path / "t.bin"))
    assert same_weights(model, base)


def test_given_learning_rates_are_stored(tmp_path: Path) -> None:
    model = tiny("llama", layers=1)
    base, rates = copy.deepcopy(model), [0.01, 0.003, 0.1]
    optimizer = ZerothOrder(model, ZerothSettings(**COMMON, schedule="given"))
    optimizer.record(tmp_path / "t.bin")
    for step, rate in enumerate(rates):
        optimizer.step([batch(step)], learning_rate=rate)
    trajectory = read_trajectory(tmp_path / "t.bin")
    assert [record.learning_rate for record in trajectory.records] == pytest.approx(rates)
    replay(base, trajectory)
    assert same_weights(model, base)


def test_a_rate_past_the_schedule_is_refused_while_recording(tmp_path: Path) -> None:
    optimizer = run(tiny("llama", layers=1), tmp_path / "t.bin", steps=1)
    with pytest.raises(RequestError, match="schedule: given"):
        optimizer.step([batch(1)], learning_rate=0.5)
    assert optimizer.step([batch(1)], learning_rate=0.02).step == 1


@pytest.mark.parametrize("method", ["mezo", "dizo", "fzoo"])
def test_cut_off_at_any_byte_the_records_before_remain(method: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    run(tiny("llama", layers=1), path, method=method)
    data, whole = path.read_bytes(), read_trajectory(path).records
    assert len(whole) == 5
    step, round_ = (16 if method == "fzoo" else 8), (16 if method == "dizo" else 0)
    ends = [header_size(path) + step * (n + 1) + round_ * (n // 2) for n in range(5)]
    for size in range(header_size(path), len(data) + 1):
        path.write_bytes(data[:size])
        got = read_trajectory(path).records
        assert len(got) == sum(size >= end for end in ends)
        assert [r.losses for r in got] == [r.losses for r in whole[: len(got)]]
        for one, two in zip(got, whole[: len(got)], strict=True):
            assert one.round == two.round or (one is got[-1] and one.round == ())
    for size in (0, 10, header_size(path) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(RequestError, match="is no trajectory"):
            read_trajectory(path)


@pytest.mark.parametrize("method", ["mezo", "dizo", "fzoo"])
def test_a_resumed_run_goes_on_in_its_file(method: Any, tmp_path: Path) -> None:
    """Steps after the checkpoint that the first process still wrote are cut off and made again."""
    whole, parts = tmp_path / "whole.bin", tmp_path / "parts.bin"
    run(tiny("llama", layers=1), whole, method=method, steps=6)
    model = tiny("llama", layers=1)
    optimizer = run(model, parts, method=method, steps=2)
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    go_on(optimizer, 5)
    parts.write_bytes(parts.read_bytes()[:-3])
    model.load_state_dict(weights)
    again = ZerothOrder(model, optimizer.settings)
    again.load_state_dict(state)
    again.record(parts, base_model="tiny")
    go_on(again, 6)
    assert parts.read_bytes() == whole.read_bytes()


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    model, path = tiny("llama", layers=1), tmp_path / "t.bin"
    state = run(model, path, steps=3).state_dict()
    other = ZerothOrder(model, ZerothSettings(**COMMON | {"eps": 0.5}))
    other.load_state_dict(state)
    with pytest.raises(RequestError, match=r"another run \(eps differ\)"):
        other.record(path)
    # How passes run, and where a constant schedule ends, decide nothing.
    free = ZerothOrder(model, ZerothSettings(**COMMON, lanes=2, compile=True, total_steps=99))
    free.load_state_dict(state)
    free.record(path)
    same = ZerothOrder(model, ZerothSettings(**COMMON))
    same.load_state_dict(state | {"step_number": 9})
    with pytest.raises(RequestError, match="ends before step 9"):
        same.record(path)
    with pytest.raises(RequestError, match="is not there"):
        same.record(tmp_path / "nowhere.bin")


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    run(tiny("llama", layers=1), path)
    trajectory = read_trajectory(path)
    with pytest.raises(RequestError, match="names, shapes or types differ"):
        replay(tiny("llama", torch.bfloat16, layers=1), trajectory)
    with pytest.raises(RequestError, match="not those that the run began with"):
        replay(tiny("llama", layers=1, seed=1), trajectory)
    header = json.loads(path.read_bytes().split(b"\n")[0])
    path.write_bytes(json.dumps(header | {"version": 2}).encode() + b"\n")
    with pytest.raises(RequestError, match="version 2"):
        read_trajectory(path)
    later = header | {"settings": header["settings"] | {"momentum": 0.9}}
    path.write_bytes(json.dumps(later).encode() + b"\n")
    with pytest.raises(RequestError, match="not known here: momentum"):
        read_trajectory(path)


def test_a_step_that_failed_is_not_in_the_file(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    base = copy.deepcopy(model)
    optimizer = ZerothOrder(
        model, ZerothSettings(**COMMON), lambda m, b, lanes: m(b.repeat(lanes, 1)).view(lanes, -1).square()
    )
    optimizer.record(tmp_path / "t.bin")
    optimizer.step([torch.ones(2, 3)])
    with pytest.raises(NotFinite):
        optimizer.step([torch.full((2, 3), torch.inf)])
    optimizer.step([torch.ones(2, 3)])
    assert replay(base, read_trajectory(tmp_path / "t.bin")) == 2
    assert same_weights(model, base)
