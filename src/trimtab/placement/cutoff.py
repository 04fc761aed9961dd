"""Why a module got no gradient: from what a witness saw of the step to a reason and a way out. It looks at no tensor.

Each reason is one that was looked for and found; where no training pass was seen, that is what is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import some_of

if TYPE_CHECKING:
    from trimtab.placement.witness import Seen, Witness


class Reason(NamedTuple):
    """What was found, and what to change."""

    why: str
    change: str


def explain(modules: Iterable[str], witness: Witness) -> list[str]:
    """For each reason one line, with the modules that it holds for."""
    found: dict[Reason, list[str]] = {}
    for module in modules:
        found.setdefault(reason_for(module, witness), []).append(module)
    return [f"{some_of(names, 2)}: {why}; {change}" for (why, change), names in found.items()]


def reason_for(module: str, witness: Witness) -> Reason:
    """The reason for one module, by its name in the bare model."""
    seen = witness.seen.get(module)
    if seen is None and (layer := witness.closed_around(module)) is not None:
        return _inside(layer, witness)
    if seen is None:
        return _never_ran(module, witness)
    if not seen.with_gradients:
        return _switched_off(seen, witness)
    if not seen.gives:
        return Reason(
            "it ran, and what its own forward gave requires no gradient, though its weights do",
            "look for a detach(), .data or torch.no_grad() inside it",
        )
    if seen.answered and seen.pulls and not any(map(bool, seen.pulls)):
        return Reason(
            "the gradient that comes back to its output is zero everywhere: no trained token of this step depends on "
            "what it computed (behind the last attention a position counts only where it tells a trained token)",
            "train on labels that it has a part in, or leave it out of what is trained (lora.targets); else look for a "
            "factor of 0 or a mask behind it",
        )
    if seen.answered:
        return Reason(
            "a gradient comes back to its output, but none that is other than zero reaches its weights",
            "look for a factor of 0 or a mask behind it, or an adapter that is merged or switched off",
        )
    return _cut(module, witness)


def ran(module: str, witness: Witness) -> bool:
    """Whether a module, or anything inside it, ran in a training pass; of one in a closed layer, whether that did."""
    module = witness.closed_around(module) or module
    return module in witness.seen or any(name.startswith(f"{module}.") for name in witness.seen)


def _inside(layer: str, witness: Witness) -> Reason:
    """Of a module in a closed layer only the layer was watched."""
    seen = witness.seen.get(layer)
    if seen is None or not seen.with_gradients or not seen.gives or not seen.answered:
        return reason_for(layer, witness)
    return Reason(
        f"a gradient comes back to {layer}, and what happens inside of a layer that is computed as one is not watched",
        f"run once with {witness.closed[layer]} to be told where it ends",
    )


def _never_ran(module: str, witness: Witness) -> Reason:
    if not witness.seen:
        return Reason(
            "no training pass through the model was seen", "call the model itself, not a copy of it"
        )
    unused = module
    for outer in _around(module):
        if not ran(outer, witness):
            unused = outer
    what = "it" if unused == module else unused
    return Reason(
        f"{what} never ran in this step: an unused branch or view of the model",
        "use it in every forward, or leave it out of what is trained (lora.targets)",
    )


def _switched_off(seen: Seen, witness: Witness) -> Reason:
    alike = [s for s in witness.seen.values() if (s.off_in, s.function) == (seen.off_in, seen.function)]
    line = min((s for s in alike if not s.with_gradients), key=lambda s: s.order).off_at
    at = f" ({line})" if line else ""
    if seen.function == "CheckpointFunction":
        return Reason(
            f"re-entrant checkpointing{at}: nothing that goes into the segment requires a gradient, so that "
            "autograd leaves the whole segment out",
            'checkpoint with use_reentrant=False (gradient_checkpointing_kwargs={"use_reentrant": False})',
        )
    if seen.function is not None:
        return Reason(
            f"the autograd function {seen.function}{at} runs it without gradients and passes none on",
            "its inputs have to require a gradient, or use torch.utils.checkpoint with use_reentrant=False",
        )
    inside = f"in the forward of {seen.off_in}" if seen.off_in else "inside the model's forward"
    return Reason(
        f"it ran under torch.no_grad(), switched off {inside}{at}",
        "take no_grad, inference_mode or set_grad_enabled(False) away there: frozen weights need none of them",
    )


def _cut(module: str, witness: Witness) -> Reason:
    """Its output is in a graph that the loss does not reach: find the last module before the cut, and who got it."""
    last, inside = module, ""
    for outer in _around(module):
        seen = witness.seen.get(outer)
        if seen is None:
            # A list of layers is never called.
            continue
        if seen.answered or not seen.gives:
            inside = outer
            break
        last = outer
    layers = (_last_used(layer, witness) for layer in (module, *_around(module)))
    if (used := next((found for found in layers if found), None)) is not None:
        stack, number = used
        return Reason(
            f"no gradient comes back to the layers of {stack} behind {number}: the model takes its features from there",
            f"leave the layers behind it out: lora.targets ROLE:0-{number}",
        )
    change = "pass the tensor on as it is, without detach(), .data, .item(), numpy() or torch.tensor(...)"
    within = [name for name in witness.seen if name == last or name.startswith(f"{last}.")]
    taker = next((t for name in within if (t := witness.seen[name].passed_on) and t not in within), None)
    if taker is not None:
        return Reason(
            f"detached between {last} and {taker}: the output of the one requires a gradient, what the other is given "
            "of it does not",
            change,
        )
    where = f"in the forward of {inside}" if inside else "in the model's forward"
    starved = _starved(last, inside, witness)
    if starved is not None:
        return Reason(
            f"no gradient comes back to {last}: {where} its output is detached or not used; {starved}, which runs "
            "behind it, is given nothing that requires a gradient",
            change,
        )
    return Reason(
        f"no gradient comes back to {last}: {where} its output is not used for the loss, or detached on the way",
        f"use it, or leave it out of what is trained (lora.targets); else {change}",
    )


def _last_used(layer: str, witness: Witness) -> tuple[str, int] | None:
    """If it is a layer: its stack, and the last layer before it to which a gradient came back."""
    stack, _, number = layer.rpartition(".")
    if not number.isdigit():
        return None
    before = [n for n in range(int(number)) if (seen := witness.seen.get(f"{stack}.{n}")) and seen.answered]
    return (stack, before[-1]) if before else None


def _starved(last: str, inside: str, witness: Witness) -> str | None:
    """The first module behind `last` that is given numbers without a graph: the next one, or one inside of another
    that was still given a graph."""
    seen, around = witness.seen, set(_around(last))
    later = sorted(
        (what.order, name)
        for name, what in seen.items()
        if what.order > seen[last].order
        and what.fed
        and not name.startswith(f"{last}.")
        and (not inside or name.startswith(f"{inside}."))
    )
    for place, (_, name) in enumerate(later):
        outer = next((o for o in _around(name) if o in seen), None)
        behind = outer is not None and outer not in around and seen[outer].takes
        if not seen[name].takes and (place == 0 or behind):
            return name
    return None


def _around(module: str) -> Iterator[str]:
    """The modules around this one, from the inside out, without the whole model."""
    while module := module.rpartition(".")[0]:
        yield module
