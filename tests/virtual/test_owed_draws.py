"""By shapes the CPU's generators stand where the run with values has them, whatever was not drawn."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from trimtab.virtual import mersenne
from trimtab.virtual.context import virtual_gpus
from trimtab.virtual.unknown import is_unknown

BIG = 1025, 1031
"""More than has values on the host, and no multiple of 16."""


def place(run: Callable[[], Any]) -> torch.Tensor:
    """Where the default generator stands after a program."""
    torch.manual_seed(7)
    run()
    return torch.get_rng_state()


def same_place(run: Callable[[], Any]) -> bool:
    """Whether it stands there by shapes too, and no number was drawn before that was asked."""
    real = place(run)
    with virtual_gpus(1, shapes=True):
        return torch.equal(place(run), real)


def filled(shape: tuple[int, ...], dtype: torch.dtype, fill: str) -> Callable[[], Any]:
    def run() -> None:
        big = torch.empty(2048, 1024, dtype=dtype)
        getattr(torch.empty(shape, dtype=dtype), fill)()
        getattr(big, fill)()
        getattr(big[:, :777], fill)()
        getattr(big[:3, :333], fill)()
        getattr(big[3, 3:10], fill)()
        getattr(big.t(), fill)()

    return run


@pytest.mark.parametrize("fill", ["normal_", "uniform_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_all_forms(dtype: torch.dtype, fill: str) -> None:
    run = filled(BIG, dtype, fill)
    assert same_place(run)


@pytest.mark.parametrize("like", [torch.randn_like, torch.rand_like])
def test_tensors_like_others(like: Any) -> None:
    assert same_place(lambda: (like(torch.empty(BIG)), like(torch.empty(BIG).t())))


MODULES: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(1031, 1025),
    "half": lambda: nn.Linear(1031, 1025, dtype=torch.bfloat16),
    "embedding": lambda: nn.Embedding(*BIG, padding_idx=0),
    "attention": lambda: nn.MultiheadAttention(1032, 8),
    "convolution": lambda: nn.Conv2d(256, 513, 3).to(memory_format=torch.channels_last),
    "layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 8), 2),
    "recurrent": lambda: nn.LSTM(520, 520),
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(BIG), std=0.02),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(BIG)),
    "kaiming": lambda: nn.init.kaiming_normal_(torch.empty(BIG)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    assert same_place(MODULES[name])


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=5000,
    )


def test_a_model_made_from_its_config() -> None:
    from transformers import LlamaForCausalLM

    assert same_place(lambda: LlamaForCausalLM(config()))


def test_a_model_that_is_read_draws_nothing(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    from trimtab.rehearse import loading

    LlamaForCausalLM(config()).save_pretrained(tmp_path)
    real = place(lambda: LlamaForCausalLM.from_pretrained(tmp_path))
    with virtual_gpus(1, shapes=True):
        torch.manual_seed(7)
        torch.empty(BIG).normal_()
        # As a rehearsal puts it in the place of from_pretrained.
        found = loading._built(LlamaForCausalLM, str(tmp_path), (), None, {})
        assert is_unknown(found.model.embed_tokens.weight)
        shown = torch.get_rng_state()
        torch.manual_seed(7)
        loading._built(LlamaForCausalLM, str(tmp_path), (), None, {})
        assert torch.equal(torch.get_rng_state(), real)
    assert torch.equal(shown, place(lambda: torch.empty(BIG).normal_()))


def rows() -> list[int]:
    """The order of rows in two epochs behind a model made on the host, with dropout on the GPU in between."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1024, 1031), nn.Dropout(0.5), nn.Linear(1031, 64), nn.Dropout(0.5))
    return [order for _ in range(2) for order in _epoch(model)]


def _epoch(model: nn.Module) -> list[int]:
    loader = DataLoader(range(64), batch_size=8, shuffle=True)
    return [row for batch in loader for row in batch.tolist()]


def test_the_order_of_shuffled_rows() -> None:
    real = rows()
    with virtual_gpus(1, shapes=True):
        assert rows() == real


def test_what_a_gpu_draws_is_its_own() -> None:
    def run(device: str) -> list[float]:
        torch.manual_seed(3)
        torch.empty(BIG).normal_()
        drawn = [torch.rand((), device=device) for _ in range(2 * (device == "cuda"))]
        nn.functional.dropout(torch.ones(64, device=device), training=device == "cuda")
        assert not drawn or drawn[0] != drawn[1]
        return torch.rand(4).tolist()

    real = run("cpu")
    with virtual_gpus(1, shapes=True):
        assert run("cuda") == real
        state = torch.cuda.get_rng_state()
        again = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), again)


def test_a_generator_of_its_own() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(5)
        torch.empty(BIG).normal_(generator=generator)
        nn.init.uniform_(torch.empty(BIG), generator=generator)
        twins = [copy.deepcopy(generator), pickle.loads(pickle.dumps(generator)), generator.clone_state()]
        order = torch.randperm(9, generator=generator)
        assert all(torch.equal(torch.randperm(9, generator=twin), order) for twin in twins)
        return generator.get_state(), torch.get_rng_state(), order.tolist()

    real = run()
    with virtual_gpus(1, shapes=True):
        by_shapes = run()
    assert all(map(torch.equal, by_shapes[:2], real[:2]))
    assert by_shapes[2] == real[2]


def test_the_default_generator_by_its_name() -> None:
    def run() -> None:
        torch.empty(BIG).normal_(generator=torch.default_generator)
        torch.rand(3, generator=torch.default_generator)

    assert same_place(run)


def test_nothing_is_drawn_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = mersenne.set_forward
    monkeypatch.setattr(mersenne, "set_forward", lambda *given: (drawn.append(given[1]), real(*given)))
    with virtual_gpus(1, shapes=True):
        torch.manual_seed(1)
        layers = [nn.Linear(1024, 1040) for _ in range(3)]
        assert torch.initial_seed() == 1
        assert drawn == []
        first = torch.get_rng_state()
        x = torch.ones(2, 1024, device="cuda", requires_grad=True)
        for layer in layers:
            checkpoint(layer.cuda(), x, use_reentrant=False).sum().backward()
        assert drawn == [3 * 1024 * 1040]
        assert torch.equal(torch.get_rng_state(), first)
        torch.empty(BIG).normal_()
        torch.set_rng_state(first)
        assert torch.equal(torch.get_rng_state(), first)
        torch.empty(BIG).normal_()
        torch.manual_seed(1)
        after = torch.get_rng_state()
        with torch.random.fork_rng():
            torch.empty(BIG).normal_()
        assert torch.equal(torch.get_rng_state(), after)
        assert len(drawn) == 1
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("before", [0, 3, 624, 700])
@pytest.mark.parametrize("draws", [0, 1, 700, 3_000_001])
def test_set_forward(monkeypatch: pytest.MonkeyPatch, before: int, draws: int) -> None:
    left, right = (torch.Generator().manual_seed(9) for _ in range(2))
    for generator in (left, right):
        torch.randperm(before + 1, generator=generator)
    torch.empty(draws).uniform_(generator=left)
    monkeypatch.setattr(mersenne, "_DRAWN", 2000)
    mersenne.set_forward(right, draws)
    assert torch.equal(left.get_state(), right.get_state())
    assert torch.equal(torch.randn(5, generator=left), torch.randn(5, generator=right))
