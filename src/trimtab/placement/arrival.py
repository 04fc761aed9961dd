"""Judges the gradients after a backward pass: what lacks one is named with its reason, or waited for.

No fault yet: a tower without a picture in the batch, an expert or a head that no token was sent to, and a step whose
loss pulls at nothing (rewards that are all equal). They are waited for, and that is said. Nothing is repaired.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

from trimtab.errors import some_of
from trimtab.placement.cutoff import explain, ran
from trimtab.placement.gradients import Flow, Places, adapter_flows, frozen_at_zero, gradient_table, norms_of
from trimtab.placement.profile import bare_model
from trimtab.placement.verify import Check, finite_check, frozen_check, is_finite, passed

if TYPE_CHECKING:
    from torch import nn

    from trimtab.placement.witness import Witness

PICTURES = "the first batch with more than text"
EXPERTS = "a token for each expert"
TOKENS = "a token that is sent through them"
LOSS = "a step whose loss has a gradient at all"


@dataclass(frozen=True)
class Arrival:
    """What came after one backward pass."""

    checks: list[Check]
    table: list[str] = field(default_factory=list)
    """The adapted modules, by part of the model; empty without adapters."""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Modules that have no gradient for a reason that is no fault, and what is waited for."""
    reached: frozenset[str] = frozenset()
    """Adapted modules that got a gradient other than zero."""
    idle: int = 0
    """Factors whose gradient has to be zero until the other factor has moved."""


def verify_gradients(model: nn.Module, *, finite: bool = True, witness: Witness | None = None) -> list[Check]:
    """Check after the first backward pass that every trainable parameter has a gradient, and a finite one.

    An adapter's must also be other than zero, but for the factor that is multiplied by one that starts at zero. With a
    witness of the pass the reason for a missing one is told. `finite=False` is for scaled fp16 gradients, which may
    overflow in the first steps by design.
    """
    return look(model, finite=finite, witness=witness).checks


def look(
    model: nn.Module,
    *,
    finite: bool = True,
    witness: Witness | None = None,
    proven: Collection[str] = (),
) -> Arrival:
    """The same, with the table and with what is waited for. `proven` are adapted modules that had gradients in an
    earlier step: where all of one's are zero or missing now, this step does not pull at it, and that is no fault."""
    bare = bare_model(model)
    names = {id(p): n for n, p in bare.named_parameters()}
    flows = adapter_flows(model)
    owners = {flow.name: flow.module for flow in flows}
    trained = [(n, names.get(id(p), n), p) for n, p in model.named_parameters() if p.requires_grad]
    none = {n: owners.get(own) or own.rpartition(".")[0] for n, own, p in trained if p.grad is None}
    # One that is there and zero is a fault in an adapter alone: elsewhere it may be meant (a gate that starts shut).
    zero = {f.name: f.module for f in flows if f.wanted and f.norm == 0}
    reached = {f.module for f in flows if f.norm}
    waiting = _waits({*none.values(), *zero.values()}, flows, bare, witness)
    if flows and not none and not any(f.norm for f in flows) and not (witness and witness.pulled):
        waiting = dict.fromkeys(zero.values(), LOSS)
    waiting |= {module: LOSS for module in zero.values() if module in proven and module not in reached}
    # One that had a gradient before and has none at all now: no token of this step was sent through it.
    gone = {m for m in none.values() if m in proven and m not in reached} - waiting.keys()
    waiting |= dict.fromkeys(sorted(gone), TOKENS)
    adapted = {flow.name for flow in flows}
    others = [(n, p.grad) for n, own, p in trained if own not in adapted and p.grad is not None]
    norms = dict(zip((n for n, _ in others), norms_of([g for _, g in others]), strict=True))
    still = [n for n, norm in norms.items() if norm == 0]
    if still and not flows and len(still) == len(trained):
        waiting = dict.fromkeys((n.rpartition(".")[0] for n in still), LOSS)
    lacking = {n: module for n, module in none.items() if module not in waiting}
    nothing = list(dict.fromkeys(module for module in zero.values() if module not in waiting))
    pulled = any(f.norm for f in flows) or len(others) > len(still)
    checks = [
        _arrive(lacking, len(trained), len(none) - len(lacking), waiting, witness, still, pulled=pulled)
    ]
    if nothing:
        checks.append(_zero(nothing, witness))
    if frozen := frozen_at_zero(model):
        checks.append(frozen_check(frozen))
    if finite:
        # A norm that is finite says so of every element. One that is not may be of large numbers: these are looked at.
        norms |= {f.name: f.norm for f in flows}
        open_ones = [(n, p.grad) for n, own, p in trained if not isfinite(norms.get(own, norms.get(n)) or 0)]
        checks.append(finite_check([n for n, gradient in open_ones if not is_finite(gradient)]))
    idle = sum(f.idle and f.trained and not f.norm for f in flows)
    return Arrival(passed(checks), gradient_table(flows), waiting, frozenset(reached), idle)


def _arrive(
    lacking: Mapping[str, str],
    trained: int,
    waited: int,
    waiting: Mapping[str, str],
    witness: Witness | None,
    still: list[str],
    *,
    pulled: bool,
) -> Check:
    """`still` have a gradient that is zero; `pulled`: whether any gradient at all is not."""
    if not lacking:
        have = f"all {trained} trainable tensors have one"
        if not pulled and waited < trained:
            have += ", and every one is exactly zero (rewards or labels that are all alike?)"
            return Check("gradients arrive", None, f"{have}; {len(waiting)} modules wait for {LOSS}")
        if still:
            have += f", exactly zero in {len(still)}: {some_of(still, 2)}"
        if waiting:
            # With a part that takes part in every step, its gradient is there and zero.
            count = f"{trained - waited} of {trained} trainable tensors have one; " if waited else f"{have}; "
            have = f"{count}{len(waiting)} modules wait for {' and '.join(dict.fromkeys(waiting.values()))}"
        return Check("gradients arrive", True, have)
    some = some_of(list(lacking), 5 if witness is None else 2)
    told = f"{len(lacking)} of {trained} trainable tensors got none: {some}; they are not in the graph of the loss"
    if witness is None:
        return Check(
            "gradients arrive",
            False,
            f"{told} (a detached input, an unused branch, re-entrant checkpointing)",
        )
    return Check("gradients arrive", False, "\n".join([told, *_indented(lacking.values(), witness)]))


def _zero(modules: list[str], witness: Witness | None) -> Check:
    told = f"the gradient of {len(modules)} adapted modules is exactly zero: {some_of(modules)}"
    return Check(
        "gradients arrive",
        False,
        "\n".join([told, *(_indented(modules, witness) if witness is not None else [])]),
    )


def _indented(modules: Iterable[str], witness: Witness) -> list[str]:
    return [f"    {line}" for line in explain(dict.fromkeys(modules), witness)]


def _waits(modules: set[str], flows: list[Flow], bare: nn.Module, witness: Witness | None) -> dict[str, str]:
    if witness is None or not modules:
        return {}
    known = {flow.module: flow.place for flow in flows}
    places = Places(bare)
    waits = {}
    for module in sorted(modules):
        place = known.get(module) or places.of(module)
        unused = witness.expects_media and not ran(module, witness)
        if witness.media is False and (place.beside or unused):
            waits[module] = PICTURES
        elif _unchosen(module, witness):
            waits[module] = EXPERTS
        elif (seen := witness.seen.get(module)) is not None and seen.fed and not seen.busy:
            waits[module] = TOKENS
        elif witness.closed_around(module) is not None and place.chosen:
            waits[module] = TOKENS  # whether it got any is not seen from outside of a closed layer
    return waits


def _unchosen(module: str, witness: Witness) -> bool:
    """Whether it is an expert that did not run, beside others that did: no token was sent to it."""
    parts = module.split(".")
    for at, part in enumerate(parts[1:], 1):
        if part.isdigit() and "expert" in parts[at - 1].lower():
            if witness.closed_around(module) is not None:
                return True  # into a closed layer nobody looks
            return not ran(".".join(parts[: at + 1]), witness) and ran(".".join(parts[:at]), witness)
    return False
