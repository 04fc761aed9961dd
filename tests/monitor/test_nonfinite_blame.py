"""The module that makes the first number which is not finite is found by running the pass again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trimtab.monitor.blame import Blame, bad_inputs, bad_weights, blame
from trimtab.monitor.verdict import History, reason

QUIET = History(steps_made=0, losses=[], growth=1.0, learning_rate=1e-4)


class Grow(nn.Module):
    """A part without weights whose own computation overflows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.inner = factor, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.factor * self.factor)


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("inf")


class Steep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Root.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def chain(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), *parts, nn.Linear(3, 1))


def of(model: nn.Module, x: torch.Tensor | None = None) -> Blame:
    given = torch.ones(2, 3) if x is None else x
    return blame(lambda: model(given).square().mean(), model)


def test_a_weight_that_is_nan() -> None:
    model = chain(nn.Tanh())
    with torch.no_grad():
        model[2].weight[0, 1] = float("nan")  # type: ignore[index]
    assert (of(model).kind, of(model).where) == ("weights", "2.weight")
    assert bad_weights(model) == [("2.weight", 1, 3)]
    made = reason(of(model), QUIET, no_labels=False, bad_weights=bad_weights(model))
    assert made.cause == "weights"
    assert "2.weight holds 1 of 3 values that are not finite, as it was loaded" in made.why


def test_a_computation_that_overflows_between_two_modules() -> None:
    found = of(chain(Grow(1e30)))
    assert (found.kind, found.where, found.precision) == ("forward", "1", "fp32")
    assert "in its own forward, before 1.inner" in found.said
    made = reason(found, QUIET, no_labels=False, bad_weights=[])
    assert made.cause == "overflow"


def test_half_precision_is_told_as_the_reason() -> None:
    model = chain(nn.Linear(3, 3)).to(torch.float16)
    with torch.no_grad():
        for part in model:
            part.weight.fill_(200.0)  # type: ignore[union-attr]
    found = blame(lambda: model(torch.ones(2, 3, dtype=torch.float16)).float().mean(), model)
    assert (found.kind, found.where, found.precision) == ("forward", "1", "fp16")
    assert "weights up to 200" in found.said
    assert "fp16 ends at 65504" in reason(found, QUIET, no_labels=False, bad_weights=[]).change


def test_a_gradient_that_overflows_on_its_way_back() -> None:
    found = of(chain(Steep(), nn.Tanh()))
    assert (found.kind, found.where) == ("backward", "1")
    assert (
        "going back, 1 gave the first gradient" in reason(found, QUIET, no_labels=False, bad_weights=[]).why
    )


def test_a_mask_of_minus_infinity_is_no_fault() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.soft(x.masked_fill(torch.tensor([[False, True, False]]), float("-inf")))

        def __init__(self) -> None:
            super().__init__()
            self.soft = nn.Softmax(-1)

    assert of(chain(Masked())).kind == "nothing"
    found = of(chain(Masked(), Grow(1e30)))
    assert found.where == "2"


def test_a_loss_that_is_nan_by_itself() -> None:
    model = chain()
    ignored = torch.full((2,), -100)
    found = blame(lambda: nn.functional.cross_entropy(model(torch.ones(2, 3)), ignored), model)
    assert found.kind == "loss"
    made = reason(found, QUIET, no_labels=True, bad_weights=[])
    assert (made.cause, "mean over no token" in made.why) == ("labels", True)


def test_the_row_of_the_batch_is_told() -> None:
    pixels = torch.ones(4, 2, 2)
    assert bad_inputs({"pixel_values": pixels}) is None
    pixels[2, 0, 1] = float("inf")
    found = bad_inputs({"input_ids": torch.ones(4, 2, dtype=torch.long), "pixel_values": pixels})
    assert found is not None
    assert (found.kind, found.where, found.said) == ("input", "pixel_values", "holds infinity in row 3 of 4")


def test_a_learning_rate_that_blew_up_is_not_called_a_damaged_model() -> None:
    history = History(7, [2.0, 1.9, 30.0], 4e5, 1e6, frozenset({"2.weight"}))
    for found, weights in [
        (Blame("weights", "2.weight"), [("2.weight", 3, 3)]),
        (Blame("forward", "1", "inputs up to 1e30", "fp32"), []),
    ]:
        made = reason(found, history, no_labels=False, bad_weights=weights)
        assert made.cause == "diverged"
        assert (
            "training diverged with learning rate 1e+06: the trained weights have grown 4e+05 times"
            in made.why
        )
        assert "the loss had risen from 1.9 to 30" in made.why
        assert "training.learning_rate" in made.change
    # A frozen tensor does not get there by training.
    damaged = reason(Blame("weights", "0.weight"), history, no_labels=False, bad_weights=[("0.weight", 1, 9)])
    assert damaged.cause == "weights"


def test_what_does_not_happen_again_is_said() -> None:
    made = reason(of(chain(nn.Tanh())), QUIET, no_labels=False, bad_weights=[])
    assert (made.cause, "the same batch gave finite numbers" in made.why) == ("unknown", True)
