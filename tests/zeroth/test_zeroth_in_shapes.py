"""Zeroth-order steps rehearsed in shapes: the captured way, its memory as a GPU's, and no work on every element."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from zeroth_helpers import tiny

from trimtab.recipes.rehearsed_rows import heaviest
from trimtab.virtual import virtual_gpus
from trimtab.zeroth import ZerothOrder, ZerothSettings
from trimtab.zeroth import sweep as sweep_module
from trimtab.zeroth.batches import by_length
from trimtab.zeroth.noise import NoiseMaker
from trimtab.zeroth.objective import Example, ScoreBatch, build_batch
from trimtab.zeroth.parameters import tuned_parameters
from trimtab.zeroth.sweep import Directions, Sweep

pytest.importorskip("triton")


def qwen3(hidden: int, layers: int, heads: int, ffn: int, vocabulary: int) -> Any:
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("cuda"):
        return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)


def rows(count: int, length: int) -> ScoreBatch:
    return build_batch([Example([7] * length, [[5]], 0)] * count, pad_id=0, max_length=length + 1)


def peak_of(optimizer: ZerothOrder, batch: ScoreBatch) -> int:
    torch.cuda.reset_peak_memory_stats()
    optimizer.step([batch], more=True)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("method", ["mezo", "fzoo", "dizo"])
def test_passes_are_captured_in_shapes(method: Any) -> None:
    with virtual_gpus(1, shapes=True):
        model = qwen3(512, 2, 8, 1024, 4096)
        made = ZerothOrder(model, ZerothSettings(method=method, learning_rate=1e-6, eps=1e-3, interval=1))
        assert any("captured as one CUDA graph" in line for line in made.describe())
        before = torch.cuda.memory_allocated()
        first = peak_of(made, rows(4, 32)) - before
        made.project(lambda: [rows(4, 32)])
        ring = made._captured._ring
        assert ring.is_cuda
        held = torch.cuda.memory_allocated()
        # The ring stays; activations of the stacked lanes were there beside it, and no copy of all weights.
        assert held - before >= ring.numel()
        assert first > ring.numel() + made.lanes * 4 * 32 * (2 * 1024 + 512) * 2
        # A replay asks for nothing; where a step has several passes, the losses of each are kept.
        assert held <= peak_of(made, rows(4, 32)) <= held + (8 << 10)
        made.settle()
        assert not made._passes_reason.startswith("uncaptured")


def test_stacked_lanes_take_the_activations_of_each() -> None:
    grown = []
    for lanes in (1, 2):
        with virtual_gpus(1, shapes=True):
            model = qwen3(512, 2, 8, 4096, 4096)
            made = ZerothOrder(model, ZerothSettings(learning_rate=1e-6, eps=1e-3, lanes=lanes))
            few = peak_of(made, rows(8, 64)) - torch.cuda.memory_allocated()
            grown.append(peak_of(made, rows(32, 64)) - torch.cuda.memory_allocated() - few)
    assert grown[1] == pytest.approx(2 * grown[0], rel=0.1)


def test_a_plain_pass_draws_once_for_a_tensor_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = NoiseMaker.draw

    def draw(self: NoiseMaker, stream: Any, start: int, count: int, scale: float = 1.0) -> Any:
        drawn.append(count)
        return real(self, stream, start, count, scale)

    monkeypatch.setattr(NoiseMaker, "draw", draw)
    peaks = []
    for height in (1 << 14, 1 << 16):
        with virtual_gpus(1, shapes=True):
            tuned = tuned_parameters(nn.Linear(2048, height, bias=False, device="cuda", dtype=torch.bfloat16))
            sweep = Sweep(tuned)
            directions = Directions(1, 2, "normal", (0, 0), (1e-3, -1e-3))
            sweep.copies(tuned[0], directions, (0, 1), slice(0, 4096))
            peaks.append(torch.cuda.max_memory_allocated() - 2048 * height * 2)
            sweep.copies(tuned[0], directions, (0, 1))
    assert len(drawn) == 4
    assert drawn[0] == drawn[1]  # a whole chunk: what the scratch memory of the others would be
    assert peaks[0] == peaks[1]


def test_tensors_with_values_are_drawn_whole() -> None:
    settings = ZerothSettings(learning_rate=1e-6, eps=1e-3)
    with virtual_gpus(1):
        model = tiny("qwen3").to("cuda")
        assert not Sweep(tuned_parameters(model)).shapes
        assert ZerothOrder(model, settings).plain_in_rehearsal == "tensors have values here"
    assert not Sweep(tuned_parameters(tiny("qwen3"))).shapes
    assert not ZerothOrder(tiny("qwen3"), settings).plain_in_rehearsal


def test_without_triton_it_is_said_that_passes_run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "_triton", lambda: False)
    with virtual_gpus(1, shapes=True):
        made = ZerothOrder(qwen3(512, 2, 8, 1024, 4096), ZerothSettings(learning_rate=1e-6, eps=1e-3))
        assert made.plain_in_rehearsal == "Triton is not installed here"
        assert "uncaptured: Triton is not installed here" in made.describe()
        made.step([rows(4, 32)])
        assert made._captured is None


def test_the_heaviest_batches_are_those_of_the_whole_evaluation() -> None:
    long = [Example([1] * 90, [[1], [2]], 0) for _ in range(4)]
    wide = [Example([1] * 50, [[1, 2], [2, 3], [3, 4]], 0) for _ in range(4)]
    answers = [Example([1] * 2, [[1] * 9, [2] * 9], 0) for _ in range(4)]
    short = [Example([1] * 5, [[1], [2]], 0) for _ in range(8)]
    examples = [*short[:3], *wide, *answers, *long, *short[3:]]
    places = heaviest(examples, 4, 1)
    kept = [examples[place] for place in places]
    assert kept == [*wide, *answers]  # the most tokens in a forward, though not the longest; the most logits
    again = [[places[i] for i in batch] for batch in by_length(kept, 4)]
    whole = by_length(examples, 4)
    assert all(batch in whole for batch in again)
    assert len(heaviest(examples, 4, 2)) == 12  # those of the second process
    assert sorted(heaviest(short, 64, 1)) == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_memory_of_a_step_is_that_of_an_h200(repository: Path, compiled: bool) -> None:
    """What `benchmarks/zeroth_speed.py --compile` measured on one; uncompiled layers take a little more."""
    found = json.loads((repository / "benchmarks/results/zeroth-speed-h200.json").read_text())
    parts = next(size["parts"] for size in found["sizes"] if size["size"] == "1.7B")
    with virtual_gpus(1, name="NVIDIA H200", shapes=True):
        model = qwen3(2048, 28, 16, 6144, 151936)
        settings = ZerothSettings(learning_rate=1e-6, eps=1e-3, compile=compiled)
        peak = peak_of(ZerothOrder(model, settings), rows(found["rows"], found["length"]))
    assert peak == pytest.approx(parts["our step"]["peak_bytes"], rel=0.03)
