"""Non-finite gradients are found, named as they were before clipping, and kept out of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.monitor.finite import SKIPS_ALLOWED, GradientCheck
from trimtab.monitor.health import NonFiniteError, Standing, check_logged

STANDING = Standing(step=7, learning_rate=2e-4, last_good_loss=1.2345, last_good_step=6)


class Two(nn.Module):
    """Two layers; with `broken` the loss stays finite and only the first layer's weight gets a NaN gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, broken: bool = False) -> dict[str, torch.Tensor]:
        loss = self.second(self.first(x)).square().mean()
        if broken:
            # The slope of the root at zero is infinite; times zero it is NaN.
            loss = loss + (self.first.weight * 0).square().sum().sqrt()
        return {"loss": loss}


def backward(model: nn.Module, *, broken: bool = False, scale: float = 1.0) -> None:
    model.zero_grad()
    (model(torch.ones(2, 3), broken=broken)["loss"] * scale).backward()


def test_finite_gradients_pass() -> None:
    model = Two()
    check = GradientCheck(model, scaler=False)
    check.step_begins()
    backward(model)
    check.check(STANDING)


def test_the_parameter_is_named_although_clipping_has_made_all_gradients_nan() -> None:
    model = Two()
    check = GradientCheck(model, scaler=False)
    check.step_begins()
    backward(model, broken=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad is not None and p.grad.isnan().all() for p in model.parameters())

    with pytest.raises(NonFiniteError) as caught:
        check.check(STANDING)
    error, text = caught.value, str(caught.value)
    assert (error.step, error.what, error.parameters) == (7, "gradient", ["first.weight"])
    assert error.exit_code == 1
    assert (
        "step 7: the gradient of 1 of 4 trainable parameters is NaN or infinite (nearest the loss first): first.weight"
        in text
    )
    assert "learning rate 0.0002; last good loss: 1.234 at step 6" in text
    assert "why: the loss was finite, so the backward pass overflowed" in text
    assert "`precision: bf16`" in text


def test_a_loss_that_was_nan_already_is_told_apart_from_a_backward_overflow() -> None:
    model = Two()
    check = GradientCheck(model, scaler=False)
    check.step_begins()
    backward(model)
    model(torch.full((2, 3), float("inf")))["loss"].backward()
    with pytest.raises(
        NonFiniteError, match=r"the loss was (nan|inf) already in forward pass 2 of 2"
    ) as caught:
        check.check(STANDING)
    assert len(caught.value.parameters) == 4


def test_a_nan_that_came_from_another_process_is_told_as_such() -> None:
    model = Two()
    check = GradientCheck(model, scaler=False, processes=2)
    check.step_begins()
    backward(model)
    for parameter in model.parameters():  # what averaging with the other process's gradients leaves
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="came in with those of another process"):
        check.check(STANDING)


def test_weights_that_are_not_finite_are_blamed_first() -> None:
    model = Two()
    with torch.no_grad():
        model.second.weight[0, 0] = float("nan")
    check = GradientCheck(model, scaler=False)
    backward(model)
    with pytest.raises(
        NonFiniteError, match=r"weights themselves are not finite \(1 tensor, first second\.weight\)"
    ):
        check.check(STANDING)


def test_two_names_are_shown_and_the_rest_counted() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(8)])
    check = GradientCheck(model, scaler=False)
    for layer in model:
        layer.weight.grad = torch.full((1, 1), float("inf"))
    with pytest.raises(NonFiniteError, match=r"8 of 8 .*: 7\.weight, 6\.weight and 6 more") as caught:
        check.check(STANDING)
    assert len(caught.value.parameters) == 8


def test_large_half_precision_gradients_are_not_mistaken_for_infinite_ones() -> None:
    layer = nn.Linear(1000, 1000, bias=False, dtype=torch.float16)
    check = GradientCheck(layer, scaler=False)
    layer.weight.grad = torch.full((1000, 1000), 200.0, dtype=torch.float16)  # norm 200,000: no fp16 number
    check.check(STANDING)


def test_gradients_that_are_still_being_accumulated_are_not_measured() -> None:
    from accelerate.state import GradientState

    model = Two()
    check = GradientCheck(model, scaler=False)
    state = GradientState()
    state._set_sync_gradients(False)
    try:
        backward(model)
        assert check._after_backward is None
    finally:
        state._set_sync_gradients(True)
    backward(model)
    assert check._after_backward is not None


def test_a_gradient_scaler_may_skip_steps_but_not_for_ever() -> None:
    model = Two()
    check = GradientCheck(model, scaler=True)

    def skip(times: int) -> None:
        for _ in range(times):
            check.step_begins()
            backward(model, scale=float("inf"))
            check.check(STANDING)

    skip(SKIPS_ALLOWED - 1)
    backward(model)
    check.check(STANDING)
    skip(SKIPS_ALLOWED - 1)
    with pytest.raises(NonFiniteError, match=f"{SKIPS_ALLOWED} steps in a row"):
        skip(1)


def test_closing_takes_the_hooks_off() -> None:
    model = Two()
    check = GradientCheck(model, scaler=False)
    check.close()
    backward(model)
    assert check._after_backward is None
    assert check._forward_results == []


def test_what_the_trainer_logged_is_checked_too() -> None:
    check_logged(1.0, 2.0, STANDING, scaler=False)
    check_logged(None, None, STANDING, scaler=False)
    with pytest.raises(NonFiniteError, match="step 7: the loss is nan"):
        check_logged(float("nan"), 1.0, STANDING, scaler=True)
    with pytest.raises(NonFiniteError, match="step 7: the gradient norm is inf"):
        check_logged(1.0, float("inf"), STANDING, scaler=False)
    check_logged(1.0, float("inf"), STANDING, scaler=True)
