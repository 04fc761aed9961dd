"""A check that breaks is told as ours: the program's own calls are made once, its results and errors are its own."""

from __future__ import annotations

import contextlib
import gc
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.rehearse import shield
from trimtab.rehearse.checks.sources import is_finite

Rehearse = Callable[..., dict[str, Any]]

BREAKS = """
    import torch
    from torch import nn
    from trimtab.rehearse.checks import gradients, scaler, untrained, values

    def broken(*args, **kwargs):
        raise AttributeError("a mistake of ours")

    # What hooks call: before the real function, after it, in listeners and at the end.
    values.trained_by = untrained.trained_by = scaler.trained_by = gradients._modules_of = broken
    scaler.Scaler._carry = values._fill = broken
    gradients.leaves = values.Sources.turn = broken

    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert torch.empty(2, 2).shape == (2, 2)
    calls = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    for step in range(2):
        loss = torch.utils.checkpoint.checkpoint(model, torch.ones(4, 3, device="cuda"), use_reentrant=True).sum()
        loss = loss + model(torch.ones(4, 3, device="cuda")).sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_((p for p in model.parameters()), 1.0)
        assert norm > 1
        assert 0.5 < sum(float(p.grad.pow(2).sum()) for p in model.parameters()) < 1.01
        before = model.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model.weight)
        optimizer.zero_grad()
    assert len(calls) == 4, calls
    try:
        torch.autograd.backward(torch.ones(2, device="cuda", requires_grad=True) * 2)
    except RuntimeError as error:
        print("its own error:", error)
    """


def test_a_broken_check_harms_nobody_and_is_told_as_ours(rehearse_warm: Rehearse, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(BREAKS))
    report = rehearse_warm(str(path))
    assert "its own error: grad can be implicitly created only for scalar outputs" in report["stdout"], (
        report["stderr"]
    )
    assert (report["verdict"], report["exit"]) == ("unproven", 3), report["text"]
    assert report["findings"] == [], report["text"]
    for name in ("Values", "Gradients", "Scaler", "Untrained"):
        note = f"the check {name} of Trimtab failed (AttributeError: a mistake of ours)"
        assert sum(note in said for said in report["notes"]) == 1, report["notes"]


class _Owner:
    def real(self, value: int) -> int:
        self.calls = getattr(self, "calls", 0) + 1
        if value < 0:
            raise ValueError("negative")
        return value + 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_real_function_is_called_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(_Owner, "real", _Owner.real)
    monkeypatch.setattr(shield, "failed", lambda name, error: told.append(f"{name}: {error}"))

    def look(real: Any, owner: Any, value: int) -> int:
        if when == "before":
            raise KeyError("ours")
        try:
            return int(real(owner, value))
        finally:
            raise KeyError("ours")

    shield.around(_Owner, "real", look)
    owner = _Owner()
    assert owner.real(1) == 2
    assert (owner.calls, told) == (1, ["test_shield: 'ours'"])
    with pytest.raises(ValueError, match="negative") as caught:
        owner.real(-1)
    assert (owner.calls, caught.value.__context__) == (2, None)


def test_what_a_failed_call_held_is_let_go_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that goes on after an error has its memory back at once."""
    monkeypatch.setattr(_Owner, "real", _Owner.real)
    shield.around(_Owner, "real", lambda real, owner, value: real(owner, value))
    gc.disable()
    try:
        owner = _Owner()
        gone = weakref.ref(owner)
        with contextlib.suppress(ValueError):
            owner.real(-1)
        del owner
        assert gone() is None
    finally:
        gc.enable()


def test_what_has_no_values_and_what_has_eight_bits_is_judged() -> None:
    import torch

    assert is_finite(torch.ones(3, device="meta"))
    assert is_finite(torch.ones(3).to(torch.float8_e4m3fn))
    assert not is_finite(torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2))


def test_what_a_function_asks_of_itself_goes_past_those_who_watch_the_outermost_call() -> None:
    class Part:
        def __init__(self, *parts: Part) -> None:
            self.parts = parts

        def names(self) -> list[str]:
            found = [type(self).__name__]
            for part in self.parts:
                found += part.names()
            return found

    class Own(Part):
        def names(self) -> list[str]:
            return ["own", *super().names()]

    asked: list[tuple[str, str]] = []

    def watch(who: str) -> Callable[..., Any]:
        def look(real: Callable[..., Any], part: Part) -> Any:
            asked.append((who, type(part).__name__))
            return real(part)

        return look

    shield.around(Part, "names", watch("first"), whose="first", outermost=True)
    shield.around(Part, "names", watch("second"), whose="second", outermost=True)
    whole = Part(Part(), Own(Part()))
    assert whole.names() == ["Part", "Part", "own", "Own", "Part"]
    # A class with a way of its own calls from outside the real function.
    assert asked == [("second", "Part"), ("first", "Part"), ("second", "Own"), ("first", "Own")]
    asked.clear()
    shield.around(Part, "names", watch("every"), whose="every")
    assert whole.names() == ["Part", "Part", "own", "Own", "Part"]
    assert [who for who, _ in asked].count("every") == 4
