"""MeZO: a plain loop with the same noise, bit for bit; nothing drifts; a step is safe when something fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zeroth_helpers import batch, bits, close_losses, fp32, reference_mezo, same_weights, tiny, with_lora

from trimtab.errors import RequestError
from trimtab.zeroth import NotFinite, ZerothOrder, ZerothSettings
from trimtab.zeroth.objective import candidate_scores, example_losses

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXACT: dict[str, Any] = {"learning_rate": 1e-2, "eps": 1e-2, "seed": 5}


def run_both(model: nn.Module, steps: int = 3, **settings: Any) -> ZerothOrder:
    """A few steps of ours and of the plain loop, which must not differ in a bit.

    Passes that share a forward are other products than the plain loop's: there the losses agree within rounding, and
    what is made of them, noise and update, still to the bit.
    """
    plain = copy.deepcopy(model)
    options = EXACT | settings
    optimizer = ZerothOrder(model, ZerothSettings(**options))
    seen = [optimizer.step([batch(step)]).losses for step in range(steps)]
    expected = reference_mezo(
        plain,
        lambda step: [batch(step)],
        steps,
        rate=options["learning_rate"],
        eps=options["eps"],
        seed=options["seed"],
        weight_decay=options.get("weight_decay", 0.0),
        seen=seen,
    )
    if optimizer.lanes == 1:
        assert seen == expected
    else:
        assert close_losses(seen, expected, optimizer.tuned[0].parameter.dtype)
    assert same_weights(model, plain)
    return optimizer


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_full_tuning_is_the_plain_loop(kind: str, tie: bool, dtype: str, lanes: int | None) -> None:
    """Also with both passes in one forward; by default on the CPU they run one after the other."""
    # In bf16 the ends of the line lie further apart, so that rounding cannot be taken for a step along it.
    eps = 0.1 if lanes and dtype == "bf16" else 0.01
    optimizer = run_both(tiny(kind, DTYPES[dtype], tie), lanes=lanes, eps=eps)
    assert optimizer.lanes == (lanes or 1)


@pytest.mark.parametrize(("dtype", "lanes"), [("fp32", None), ("bf16", None), ("fp32", 2)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_lora_is_the_plain_loop(kind: str, dtype: str, lanes: int | None) -> None:
    """One pass after the other by default on the CPU: a frozen matmul of two lanes may round otherwise than of one."""
    optimizer = run_both(with_lora(tiny(kind, DTYPES[dtype])), lanes=lanes)
    assert optimizer.lanes == (lanes or 1)
    assert all("lora" in t.name for t in optimizer.tuned)


def test_weight_decay_is_the_plain_loop() -> None:
    run_both(tiny("llama"), weight_decay=0.1)
    run_both(tiny("gpt2", torch.bfloat16), weight_decay=0.5)


def test_weight_decay_spares_vectors() -> None:
    model = tiny("gpt2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    # One answer alone: each of its lanes has the same loss, so that only the decay moves a weight.
    optimizer = ZerothOrder(
        model, ZerothSettings(learning_rate=0.5, weight_decay=0.5), lambda m, b, lanes: torch.ones(lanes, 2)
    )
    with pytest.warns(UserWarning, match="took no part"):
        optimizer.step([0])
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] * 0.75 if p.dim() > 1 else before[name])


def test_some_layers_frozen() -> None:
    model = tiny("llama")
    for name, p in model.named_parameters():
        p.requires_grad_("self_attn" in name or "norm" in name)
    optimizer = run_both(model)
    assert len(optimizer.tuned) == 13


def test_micro_batches_are_one_batch() -> None:
    """The loss is the mean over all examples, also where the parts have different sizes."""
    parts = [batch(1, 2), batch(2, 3), batch(3, 1)]
    one, two = tiny("llama"), tiny("llama")
    optimizer = ZerothOrder(one, ZerothSettings(**EXACT))
    losses = optimizer.step(parts).losses
    assert [losses] == reference_mezo(two, lambda _: parts, 1, rate=1e-2, eps=1e-2, seed=5)
    assert same_weights(one, two)


@pytest.mark.parametrize(
    ("steps", "dtype"),
    [
        (50, "fp32"),
        (50, "bf16"),
        pytest.param(1000, "fp32", marks=pytest.mark.slow),
        pytest.param(1000, "bf16", marks=pytest.mark.slow),
    ],
)
def test_with_learning_rate_zero_not_one_bit_changes(steps: int, dtype: str) -> None:
    model = tiny("llama", DTYPES[dtype], layers=1)
    before, data = bits(model), batch(0, 1)
    optimizer = ZerothOrder(model, ZerothSettings(learning_rate=0, eps=0.1))
    seen = {optimizer.step([data]).losses for _ in range(steps)}
    assert len(seen) > steps * 0.9  # it did perturb
    assert all(map(torch.equal, bits(model), before))
    assert optimizer.step_number == steps
    assert optimizer.forwards == 2 * steps


def test_it_learns() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(20, 6)
    target = data[:, 0] * data[:, 1]

    def loss(m: nn.Module, b: Tensor, lanes: int) -> Tensor:
        return (m(b.repeat(lanes, 1)).view(lanes, -1) - target).square()  # type: ignore[no-any-return]

    optimizer = ZerothOrder(model, ZerothSettings(learning_rate=3e-3, eps=1e-3), loss)
    losses = [optimizer.step([data]).loss for _ in range(200)]
    assert losses[-1] < losses[0] * 0.6


def test_a_step_tells_what_it_did() -> None:
    optimizer = ZerothOrder(tiny("llama"), ZerothSettings(**EXACT))
    result = optimizer.step([batch(0)])
    plus, minus = result.losses
    assert (result.step, result.forwards, result.skipped) == (0, 2, False)
    assert result.coefficients == ((plus - minus) / 0.02,)
    assert result.loss == (plus + minus) / 2
    assert result.learning_rate == fp32(1e-2)
    assert not optimizer.due()
    assert optimizer.project(lambda: [batch(1)]) is None
    assert optimizer.describe()[0] == "mezo: 20 tensors tuned, 18,592 elements, seed 5"


def test_schedules() -> None:
    settings = ZerothSettings(
        **EXACT | {"learning_rate": 1.0}, schedule="linear", warmup_steps=2, total_steps=6
    )
    optimizer = ZerothOrder(nn.Linear(2, 1), settings, lambda m, b, n: torch.zeros(n, 1) + m(b).sum() * 0)
    data = torch.ones(2, 2)
    assert [optimizer.step([data]).learning_rate for _ in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert optimizer.step([data], learning_rate=0.1).learning_rate == fp32(0.1)
    given = ZerothOrder(nn.Linear(2, 1), ZerothSettings(schedule="given"), lambda m, b, n: torch.zeros(n, 1))
    with pytest.raises(RequestError, match="no learning rate"):
        given.step([data])


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    model = tiny("llama").train()

    def loss(m: nn.Module, b: Any, lanes: int) -> Tensor:
        losses = example_losses(candidate_scores(m, b, lanes), b.label)
        return losses / 0 if optimizer.step_number else losses

    optimizer = ZerothOrder(model, ZerothSettings(**EXACT), loss)
    optimizer.step([batch(0)])
    before = bits(model)
    with pytest.raises(NotFinite, match="step 1: the losses are inf, inf"):
        optimizer.step([batch(1)])
    assert all(map(torch.equal, bits(model), before))
    assert optimizer.step_number == 1
    assert model.training


def test_dropout_is_off_and_the_modes_come_back() -> None:
    model = tiny("gpt2")  # dropout 0.1 by its config
    quiet = copy.deepcopy(model)
    model.train()
    model.get_submodule("transformer.h.0").eval()
    modes = [m.training for m in model.modules()]
    for each in (model, quiet):
        ZerothOrder(each, ZerothSettings(**EXACT)).step([batch(0)])
    assert same_weights(model, quiet)
    assert [m.training for m in model.modules()] == modes
    assert not any(p.grad is not None or p.is_inference() for p in model.parameters())


@pytest.mark.parametrize("lanes", [1, 2])
def test_resuming_goes_on_as_if_nothing_had_happened(lanes: int) -> None:
    whole, first = tiny("llama"), tiny("llama")
    settings = ZerothSettings(**EXACT, lanes=lanes)
    through = ZerothOrder(whole, settings)
    for step in range(4):
        through.step([batch(step)])
    begun = ZerothOrder(first, settings)
    for step in range(2):
        begun.step([batch(step)])
    again = ZerothOrder(second := copy.deepcopy(first), settings)
    again.load_state_dict(begun.state_dict())
    for step in range(2, 4):
        again.step([batch(step)])
    assert same_weights(whole, second)
    assert again.forwards == through.forwards == 8


def test_requests_that_cannot_be_met() -> None:
    frozen = tiny("llama").requires_grad_(False)
    with pytest.raises(RequestError, match="no parameter of the model requires a gradient"):
        ZerothOrder(frozen, ZerothSettings())
    with pytest.raises(RequestError, match="float64"):
        ZerothOrder(nn.Linear(2, 2).double(), ZerothSettings())
    for wrong in ({"eps": 0}, {"method": "adam"}, {"lanes": 0}, {"queries": 1}, {"schedule": "linear"}):
        with pytest.raises(RequestError):
            ZerothSettings(**wrong)
    # What fp32 does not hold would be 0 or infinity in a step.
    for name, value in (
        ("eps", 1e-50),
        ("eps", 1e39),
        ("learning_rate", 1e39),
        ("weight_decay", float("nan")),
    ):
        with pytest.raises(RequestError, match=f"{name} must be"):
            ZerothSettings(**{name: value})
    optimizer = ZerothOrder(nn.Linear(2, 2), ZerothSettings(), lambda m, b, n: m(b))
    with pytest.raises(ValueError, match=r"\[lanes, examples\]"):
        optimizer.step([torch.ones(4, 2)])
    with pytest.raises(ValueError, match="at least one micro-batch"):
        optimizer.step([])


def test_nothing_is_owed_where_no_pass_could_carry_it() -> None:
    """Whoever looks at the weights of a CPU between two steps sees them moved, whatever was said of more steps."""
    model, other = tiny("qwen3", torch.bfloat16), tiny("qwen3", torch.bfloat16)
    ZerothOrder(model, ZerothSettings(**EXACT)).step([batch(0)], more=True)
    optimizer = ZerothOrder(other, ZerothSettings(**EXACT))
    optimizer.step([batch(0)])
    assert same_weights(model, other)
    optimizer.settle()
    assert same_weights(model, other)
