"""One trajectory on every placement: split over two virtual GPUs, and over two ranks, as on one CPU.

Bit for bit where the same products of the same shapes are computed: the same lanes in a forward, the same batches,
as many threads. Elsewhere losses agree within rounding, and what is made of them is a replay's, to the bit.
"""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zeroth_ranks
from torch import nn
from zeroth_helpers import batch, close_losses, same_weights, tiny, with_lora

import trimtab
from ranks import run_ranks
from trimtab.placement import PlacementPlan, place
from trimtab.zeroth import ZerothOrder, ZerothSettings, read_trajectory, replay

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.02,
    "eps": 0.01,
    "weight_decay": 0.1,
    "seed": 6,
    "interval": 2,
    "projection_iterations": 2,
    "queries": 3,
}
METHODS = ["mezo", "dizo", "fzoo"]


def go(optimizer: ZerothOrder, steps: int) -> list[Any]:
    seen: list[Any] = []
    for step in range(steps):
        seen.append(optimizer.step([batch(10 * step), batch(10 * step + 1, 2)]).losses)
        made = optimizer.project(lambda: [batch(500 + optimizer.forwards, 2)])
        seen.append(made and (made.losses, made.ratios))
    return seen


def split(model: nn.Module, head: int) -> nn.Module:
    """The embedding and the first layer on one GPU, the rest on the other; the head where it is said."""
    device_map = {
        "model.embed_tokens": "cuda:0",
        "model.rotary_emb": "cuda:0",
        "model.layers.0": "cuda:0",
        "model.layers.1": "cuda:1",
        "model.norm": "cuda:1",
        "lm_head": f"cuda:{head}",
    }
    plan = PlacementPlan(
        device="cuda:0",
        precision="fp32",
        weight_precision="fp32",
        scaler=False,
        strategy="split",
        device_map=device_map,
    )
    return place(model, plan)


# Every method, and every pair of a kind and a number of lanes.
QUICK = {("mezo", "llama", 1), ("dizo", "qwen3", 2), ("fzoo", "llama", 2), ("fzoo", "qwen3", 1)}


@pytest.mark.parametrize(
    ("method", "kind", "lanes"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(METHODS, ("llama", "qwen3"), (1, 2))
    ],
)
def test_split_over_two_virtual_gpus_is_the_cpu(method: Any, kind: str, lanes: int) -> None:
    plain = tiny(kind, tie=False)
    settings = ZerothSettings(method=method, **SETTINGS, lanes=lanes)
    expected = go(ZerothOrder(plain, settings), 2)
    with trimtab.virtual_gpus(2):
        model = split(tiny(kind, tie=False), head=1)
        optimizer = ZerothOrder(model, settings)
        assert {t.parameter.device.index for t in optimizer.tuned} == {0, 1}
        assert go(optimizer, 2) == expected
        assert same_weights(plain, model)
        hooked = [m for m in model.modules() if hasattr(m, "_hf_hook")]
        assert hooked
        assert all(m._old_forward.__func__ is type(m).forward for m in hooked)


@pytest.mark.parametrize("method", METHODS)
def test_with_other_lanes_and_a_tied_head_a_split_model_is_the_cpu_within_rounding(
    method: Any, tmp_path: Path
) -> None:
    """Two lanes in a forward by default, one on the CPU; and the head gets its rows in one piece from the other GPU."""
    plain, settings = tiny("llama"), ZerothSettings(method=method, **SETTINGS)
    base, here = copy.deepcopy(plain), ZerothOrder(plain, settings)
    with trimtab.virtual_gpus(2):
        optimizer = ZerothOrder(split(tiny("llama"), head=0), settings)
        assert (here.lanes, optimizer.lanes) == (1, 2)
        optimizer.record(tmp_path / "t.bin")
        there = go(optimizer, 2)
        assert close_losses([there[0]], [go(here, 1)[0]])
        replay(base, read_trajectory(tmp_path / "t.bin"))  # on the CPU, what ran elsewhere
        assert same_weights(base, optimizer.model)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_split_model_with_an_adapter_is_the_cpu(lanes: int, tmp_path: Path) -> None:
    settings = ZerothSettings(method="dizo", **SETTINGS, lanes=lanes)
    plain = with_lora(tiny("llama", tie=False))
    base = copy.deepcopy(plain)
    expected = go(ZerothOrder(plain, settings), 2)
    with trimtab.virtual_gpus(2):
        model = with_lora(split(tiny("llama", tie=False), head=1))
        optimizer = ZerothOrder(model, settings)
        assert {t.parameter.device.index for t in optimizer.tuned} == {0, 1}
        optimizer.record(tmp_path / "t.bin")
        assert go(optimizer, 2) == expected
        assert same_weights(plain, model)
    replay(base, read_trajectory(tmp_path / "t.bin"))  # on the CPU, what ran elsewhere
    assert same_weights(plain, base)


def test_bf16_on_one_virtual_gpu_is_the_cpu() -> None:
    settings = ZerothSettings(method="fzoo", **SETTINGS, lanes=2)
    plain = tiny("gpt2", torch.bfloat16)
    expected = go(ZerothOrder(plain, settings), 2)
    with trimtab.virtual_gpus(1):
        model = tiny("gpt2", torch.bfloat16).to("cuda")
        assert go(ZerothOrder(model, settings), 2) == expected
        assert same_weights(plain, model)


@pytest.mark.parametrize(("method", "parts"), [("dizo", 3), ("fzoo", 1)])
def test_two_ranks_are_one(method: Any, parts: int, tmp_path: Path) -> None:
    """Also with an odd number of micro-batches, and with a rank that has none."""
    settings = ZerothSettings(method=method, **SETTINGS)
    run_ranks(zeroth_ranks.run, 2, str(tmp_path), settings, parts)
    model = zeroth_ranks.model()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each rank has
    try:
        expected = zeroth_ranks.go(ZerothOrder(model, settings, zeroth_ranks.loss), parts)
    finally:
        torch.set_num_threads(threads)
    for rank in range(2):
        seen, weights = torch.load(tmp_path / f"rank{rank}.pt")
        assert seen == expected
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert (tmp_path / "rank0.bin").is_file()
    assert not (tmp_path / "rank1.bin").exists()


def test_what_fails_on_one_rank_ends_both(tmp_path: Path) -> None:
    """The rank that failed has its own traceback, the other one's error names it; nobody waits for a time-out."""
    run_ranks(zeroth_ranks.fail, 2, str(tmp_path), ZerothSettings(method="mezo", **SETTINGS))

    def told(how: str, rank: int) -> str:
        return (tmp_path / f"{how}, rank {rank}").read_text()

    for how, error in (
        ("raises", "IndexError: row 7 has no label"),
        ("out of memory", "OutOfMemoryError: tried to allocate 20.00 GiB"),
    ):
        assert "PeerFailed: rank 1 of 2 failed, computing the losses" in told(how, 0)
        assert f"rank 1: {error}" in told(how, 0)
        assert "in loss_fn" not in told(how, 0)
        assert error in told(how, 1)
        assert "in loss_fn" in told(how, 1), "the line that failed"
        assert "This was rank 1 of 2" in told(how, 1)
    for rank in range(2):
        assert "NotFinite: step 1: the losses are nan" in told("not finite", rank)
    assert "rank 1 of 2 failed, writing a file" in told("alone", 0)
    assert "FileNotFoundError" in told("alone", 1)
    assert "PeerFailed: rank 0 of 2 lost the others" in told("dies", 0)
    assert not (tmp_path / "dies, rank 1").exists()
