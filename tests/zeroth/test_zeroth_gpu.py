"""On a real GPU: kernels against the plain code bit for bit, captured passes against plain ones, replay on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from zeroth_helpers import batch, tiny, with_lora

from trimtab.zeroth import ZerothOrder, ZerothSettings, read_trajectory, replay
from trimtab.zeroth.noise import Stream, noise

GPU = torch.cuda.device_count() > 0 and torch.version.cuda is not None
pytestmark = [
    pytest.mark.gpu(needs="CUDA graphs, and kernels as Triton compiles them"),
    pytest.mark.skipif(not GPU, reason="needs a CUDA device"),
]
SEED = 0x0123_4567_89AB_CDEF


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


def run(
    model: torch.nn.Module, steps: int = 4, **options: Any
) -> tuple[ZerothOrder, list[tuple[float, ...]]]:
    options = {"learning_rate": 1e-3, "eps": 1e-2, "seed": SEED, "queries": 3, "interval": 2, **options}
    optimizer = ZerothOrder(model, ZerothSettings(**options))
    losses = []
    for step in range(steps):
        losses.append(optimizer.step([batch(step)]).losses)
        if optimizer.due():
            optimizer.project(lambda step=step: [batch(step)])
    return optimizer, losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(37, 24), (1000, 1032), (8,)])
def test_perturbed_weights_have_the_cpus_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from trimtab.zeroth.kernels import Launch, perturbed

    weight = torch.randn(shape).to(dtype)
    launch = Launch(2, torch.device("cuda"))
    launch.fill(SEED, 7, [0, 0], [1e-3, -1e-3])
    key = torch.tensor([5], dtype=torch.int32, device="cuda")
    made = perturbed(weight.cuda(), key, launch.state, launch.coefficients, True, False).cpu()
    moved = torch.tensor(1e-3) * noise(Stream(SEED, 7, 5), shape)
    assert torch.equal(made[0], (weight.float() + moved).to(dtype))
    assert torch.equal(made[1], (weight.float() - moved).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "updates wait"])
@pytest.mark.parametrize("method", ["mezo", "dizo", "fzoo"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2"])
def test_a_run_on_the_gpu_is_replayed_on_the_cpu(
    kind: str, method: str, waits: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny(kind, dtype, tie=kind != "llama")
    base = copy.deepcopy(model)
    model.cuda()
    options = {
        "learning_rate": 1e-3,
        "eps": 1e-2,
        "seed": SEED,
        "queries": 3,
        "interval": 2,
        "weight_decay": 0.1,
    }
    optimizer = ZerothOrder(model, ZerothSettings(method=method, **options))  # type: ignore[arg-type]
    assert any("CUDA graph" in line for line in optimizer.describe())
    optimizer.record(tmp_path / "trajectory.bin")
    for step in range(6):
        optimizer.step([batch(step % 3)], more=waits)
        if optimizer.due():
            optimizer.project(lambda step=step: [batch(step)])
    assert (optimizer._owed is not None) == (waits and method == "mezo")
    optimizer.settle()
    replay(base, read_trajectory(tmp_path / "trajectory.bin"))
    assert not same(tiny(kind, dtype, tie=kind != "llama"), base)
    assert same(model, base)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["mezo", "dizo", "fzoo"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_captured_losses_are_the_cpus(kind: str, method: str, lora: bool) -> None:
    model = with_lora(tiny(kind)) if lora else tiny(kind)
    other = copy.deepcopy(model).cuda()
    _, expected = run(model, method=method)
    optimizer, found = run(other, method=method)
    assert optimizer._captured is not None
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_compiled_losses_are_the_same() -> None:
    model = tiny("qwen3", layers=3).cuda()
    _, expected = run(copy.deepcopy(model))
    _, found = run(copy.deepcopy(model), compile=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_rate_zero_changes_no_bit(dtype: torch.dtype) -> None:
    model = tiny("qwen3", dtype).cuda()
    before = copy.deepcopy(model)
    run(model, steps=1000, learning_rate=0.0)
    assert same(model, before)


def test_what_cannot_be_captured_takes_the_plain_way() -> None:
    model = tiny("qwen3_moe").cuda()
    other = tiny("qwen3_moe")
    optimizer, found = run(model)
    assert optimizer._captured is None
    assert any("uncaptured" in line for line in optimizer.describe())
    _, expected = run(other)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_nothing_is_left_in_the_model() -> None:
    model = tiny("qwen3").cuda()
    model.train()
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    run(model, compile=False)
    assert [(name, type(module)) for name, module in model.named_modules()] == kinds
    assert all(module.training for module in model.modules())
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_shapes_beyond_the_most_graphs_take_the_plain_way_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.zeroth import graph

    monkeypatch.setattr(graph, "MOST_GRAPHS", 1)
    optimizer = ZerothOrder(tiny("qwen3").cuda(), ZerothSettings())
    optimizer.step([batch(0, 3)])
    assert optimizer._captured is not None
    plain = ZerothOrder(tiny("qwen3").cuda(), ZerothSettings())
    plain._captured = None
    plain.step([batch(0, 3)])
    with pytest.warns(UserWarning, match="more than 1 shapes of batches"):
        found = optimizer.step([batch(1, 5)]).losses
    torch.testing.assert_close(found, plain.step([batch(1, 5)]).losses, rtol=1e-4, atol=1e-4)
    assert optimizer._captured is not None  # the first shape still takes its graph


@pytest.mark.parametrize("rows", [0, 4, 1 << 20], ids=["no product", "the head", "every product"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_an_owed_update_is_written_whoever_reads_the_weight(
    rows: int, tie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By products that perturb what they read, on the side stream, and by those who only look up."""
    from trimtab.zeroth import thin

    monkeypatch.setattr(thin, "MOST_ROWS", rows)
    monkeypatch.setattr(thin, "LEAST_HEIGHT", 0)
    settings = ZerothSettings(method="mezo", learning_rate=1e-2, eps=1e-2, seed=SEED, weight_decay=0.1)
    found = []
    for waits in (True, False):
        model = tiny("qwen3", torch.bfloat16, tie=tie, layers=3).cuda()
        optimizer = ZerothOrder(model, settings)
        losses = [optimizer.step([batch(step % 2)], more=waits).losses for step in range(6)]
        assert (optimizer._owed is not None) == waits
        optimizer.state_dict()
        assert optimizer._owed is None
        found.append((losses, weights(model)))
    (one, two), (other, too) = found
    assert one == other
    assert all(map(torch.equal, two, too))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "height"), [(16, 1024, 1000), (3, 40, 130), (50, 256, 64)])
def test_a_thin_product_is_that_of_the_perturbed_weight(
    dtype: torch.dtype, rows: int, width: int, height: int
) -> None:
    from trimtab.zeroth.kernels import Launch, perturbed
    from trimtab.zeroth.thin import thin_product

    weight, x = torch.randn(height, width, device="cuda"), torch.randn(2, rows, width, device="cuda")
    weight, x = weight.to(dtype), x.to(dtype)
    launch = Launch(2, torch.device("cuda"))
    launch.fill(SEED, 7, [0, 0], [0.25, -0.25])
    key = torch.tensor([5], dtype=torch.int32, device="cuda")
    noise_of = (key, launch.state, launch.coefficients, True, False)
    expected = torch.bmm(x.double(), perturbed(weight, *noise_of).double().transpose(1, 2))
    found = thin_product(x, weight, *noise_of)
    share = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=share, atol=share * width**0.5)
