"""Random numbers on virtual GPUs: the CPU's stream, in the CPU's order, under CUDA's rules."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

from trimtab.virtual.context import virtual_gpus


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual_gpus(2):
        yield


def test_the_default_generator_draws_what_the_cpu_would() -> None:
    torch.manual_seed(0)
    plain = [torch.randn(3), torch.rand(2), torch.randperm(5)]
    torch.manual_seed(0)
    virtual = [
        torch.randn(3, device="cuda"),
        torch.rand(2, device="cuda:1"),
        torch.randperm(5, device="cuda"),
    ]
    for left, right in zip(plain, virtual, strict=True):
        assert torch.equal(left, right.cpu())


def test_first_use_of_a_gpu_does_not_reseed() -> None:
    torch.manual_seed(3)
    first = torch.rand(2)
    second = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(2, device="cuda").cpu(), second)


def test_dropout_draws_what_the_cpu_would() -> None:
    torch.manual_seed(1)
    plain = torch.nn.functional.dropout(torch.ones(64))
    torch.manual_seed(1)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device="cuda:1")).cpu(), plain)


def test_a_generator_of_its_own() -> None:
    generator = torch.Generator(device="cuda:1")
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cuda:1")
    assert torch.Generator("cuda").device == torch.device("cuda:0")
    assert isinstance(torch.Generator(), torch.Generator)
    generator.manual_seed(5)
    first = torch.randn(3, generator=generator, device="cuda:1")
    generator.manual_seed(5)
    assert torch.equal(torch.randn(3, generator=generator, device="cuda:1"), first)
    assert generator.initial_seed() == 5
    state = generator.get_state()
    second = torch.empty(4, device="cuda:1").uniform_(generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.empty(4, device="cuda:1").uniform_(generator=generator), second)
    twin = pickle.loads(pickle.dumps(generator))
    assert torch.equal(
        torch.randn(2, generator=twin, device="cuda"), torch.randn(2, generator=generator, device="cuda")
    )


@pytest.mark.parametrize("draw", [torch.randn, torch.rand, torch.randperm])
def test_a_cpu_generator_on_a_gpu(draw) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(
        RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"
    ) as caught:
        draw(4, generator=torch.Generator(), device="cuda")
    assert caught.value.fault.kind == "generator-device"  # type: ignore[attr-defined]


def test_a_gpu_generator_on_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.randn(4, generator=torch.Generator("cuda"))
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.utils.data.random_split(range(4), [2, 2], generator=torch.Generator("cuda"))


def test_in_place_and_multinomial() -> None:
    weights = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.multinomial(weights, 1, generator=torch.Generator())
    with pytest.raises(RuntimeError, match="device type for generator"):
        weights.normal_(generator=torch.Generator())
    assert torch.multinomial(weights, 2, generator=torch.Generator("cuda")).device.type == "cuda"


def test_sampler_with_a_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            list(torch.utils.data.RandomSampler(range(4)))
    finally:
        torch.set_default_device(None)


def test_state_of_the_default_generators() -> None:
    torch.manual_seed(0)
    state = torch.cuda.get_rng_state("cuda:1")
    first = torch.rand(3, device="cuda:1")
    torch.cuda.set_rng_state(state, "cuda:1")
    assert torch.equal(torch.rand(3, device="cuda:1"), first)
    assert len(torch.cuda.get_rng_state_all()) == 2
    torch.cuda.manual_seed_all(7)
    again = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda"), again)
    assert torch.cuda.initial_seed() == 7
    assert torch.cuda.default_generators[1].device == torch.device("cuda:1")


def test_fork_rng_brings_the_state_back() -> None:
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[0, 1]):
        inside = torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), inside)


def test_checkpointing_replays_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    weight = torch.ones(32, device="cuda", requires_grad=True)

    def layer(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(value * 2)

    for reentrant in (True, False):
        weight.grad = None
        out = checkpoint(layer, weight, use_reentrant=reentrant)
        out.sum().backward()
        assert torch.equal(weight.grad, out.detach())
