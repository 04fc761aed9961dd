"""A step with a NaN leaves the weights as they were, also where the verdict is read a step later."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.monitor import gate
from trimtab.monitor.finite import SKIPS_ALLOWED, GradientCheck
from trimtab.monitor.health import NonFiniteError, Standing


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=kind == "fused")


def steps(
    model: nn.Module, check: GradientCheck, optimizer: torch.optim.Optimizer, values: list[float], first: int
) -> None:
    for number, value in enumerate(values, first):
        check.step_begins()
        optimizer.zero_grad()
        model(torch.full((2, 3), value)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        check.check(Standing(number, 0.1, None, None), optimizer)
        optimizer.step()


@pytest.mark.parametrize(("kind", "way"), [("fused", "gated"), ("foreach", "undone"), ("sgd", "undone")])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_verdict_that_is_read_later_finds_the_weights_untouched(kind: str, way: str, bad: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(kind, model)
    check = GradientCheck(model, scaler=False, late=True)
    steps(model, check, optimizer, [1.0, 2.0, 3.0], 1)
    assert check._gate is not None
    assert check._gate.way == way
    before = [p.detach().clone() for p in model.parameters()]
    steps(model, check, optimizer, [1.0], 4)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), (
        "it does train"
    )
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError, match="step 5: the gradient"):
        steps(model, check, optimizer, [bad, 1.0], 5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_last_step_is_settled_too() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of("fused", model)
    check = GradientCheck(model, scaler=False, late=True)
    steps(model, check, optimizer, [1.0, float("nan")], 1)
    with pytest.raises(NonFiniteError, match="step 2"):
        check.settle()
    assert check.settle(), "told once"


def test_many_trained_weights_are_judged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of them would cost more memory than the plan knows of."""
    monkeypatch.setattr(gate, "UNDO_BYTES", 8)
    model = nn.Linear(3, 2)
    optimizer = optimizer_of("foreach", model)
    check = GradientCheck(model, scaler=False, late=True)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError, match="step 1"):
        steps(model, check, optimizer, [float("nan")], 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert check._gate is not None
    assert check._gate.way == "at once"


def test_the_optimizer_is_left_as_it_was() -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of("fused", model)
    check = GradientCheck(model, scaler=False, late=True)
    steps(model, check, optimizer, [1.0], 1)
    assert hasattr(optimizer, "found_inf")
    check.close()
    assert not hasattr(optimizer, "found_inf")


def test_skipped_steps_are_counted_when_they_are_known() -> None:
    model, skipped = nn.Linear(3, 2), []
    check = GradientCheck(model, scaler=True, late=True, on_skip=skipped.append)
    optimizer = optimizer_of("sgd", model)
    steps(model, check, optimizer, [1.0, float("inf"), 1.0], 1)
    assert skipped == [2]
    with pytest.raises(NonFiniteError, match=f"{SKIPS_ALLOWED} steps in a row"):
        steps(model, check, optimizer, [float("nan")] * (SKIPS_ALLOWED + 1), 4)


@pytest.mark.parametrize(
    ("kind", "shapes", "copies"),
    [("fused", False, 0), ("foreach", False, 1), ("foreach", True, 1), ("sgd", True, 1), ("fused", True, 0)],
)
def test_a_virtual_gpu_holds_the_copies_that_a_real_one_would(kind: str, shapes: bool, copies: int) -> None:
    """And a step that is bad is told at once."""
    from trimtab.virtual import virtual_gpus

    with virtual_gpus(1, shapes=shapes):
        model = nn.Linear(3, 2).cuda()
        optimizer = optimizer_of(kind, model)
        check = GradientCheck(model, scaler=False)
        with torch.device("cuda"):
            steps(model, check, optimizer, [1.0], 1)
        assert check._gate is not None
        assert len(check._gate._copies) == copies * len(list(model.parameters()))
        assert all(copy.is_cuda for copy in check._gate._copies)
        if not shapes:
            with torch.device("cuda"), pytest.raises(NonFiniteError, match="step 2: the gradient"):
                steps(model, check, optimizer, [float("nan")], 2)
        check.close()
