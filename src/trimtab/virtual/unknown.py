"""Values that nobody computed: which tensors have none, what is answered when a program asks for one, who is told.

The answer is neutral (of numbers 1, of indices 0; of a test, what it says of such numbers), so that a program goes on
as it would in an ordinary run. Every such question is told to the machine in force, with its line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.virtual import functions, origin, stand_in, state
from trimtab.virtual.face import ABOVE
from trimtab.virtual.memory import human
from trimtab.virtual.observer import Asked, How
from trimtab.virtual.stand_in import StandIn, WholeStandIn, nested, unknown_array
from trimtab.virtual.storage import set_bytes_for
from trimtab.virtual.tensor import VIRTUAL, HostTensor, wrap

_GO_ON = tuple(
    os.path.join(os.sep, *place.split("/"))
    for place in (
        "torch/amp/grad_scaler.py",
        "transformers/generation/utils.py",
        "trl/trainer/grpo_trainer.py",
        "trl/trainer/utils.py",
    )
)
"""Libraries' own questions (do gradients overflow? has every sentence ended, and where?) that are answered so that the
work goes on, which asks for the most: a program's memory does not hang on them."""
_MOST_BYTES = 1 << 28
"""Stand-ins for memory that a program reads as bytes are made up to this size."""


_told: dict[Any, Asked] = {}
"""What was told of a line, by the line that asked and the user's line above it: who watches a run looks at thousands
of numbers in one loop."""


def is_unknown(tensor: Any) -> bool:
    """Whether a tensor has a shape and no values (or none to be trusted)."""
    return tensor.__class__ in VIRTUAL and (tensor.payload.is_meta or tensor._block.unknown)


def forget(tensor: Any) -> None:
    """What this tensor holds is not what it will hold: weights that nobody read."""
    if tensor.__class__ in VIRTUAL:
        tensor._block.unknown = True


def asked(how: How, op: str, compared: bool = False) -> None:
    """A value that is not there was asked for (or `compared`, once given out) at the present line: tell the machine."""
    in_force = state.machine()
    if in_force is None:
        return
    at = origin.nearest(1)
    # The same code in two files is equal to Python.
    key = None if at is None else (at[0].co_filename, at, origin.here(1), how, op, compared, in_force.hidden)
    if (known := _told.get(key)) is not None:
        _tell(in_force, known)
        return
    everyone = origin.stack(1)
    if compared and everyone and everyone[0][0].file.startswith(in_force.hidden):
        return  # who watches the program compared it, not the program
    frames = [pair for pair in everyone if not pair[0].file.startswith(in_force.hidden)]
    inner = list(takewhile(lambda frame: origin.is_plumbing(frame.file), (frame for frame, _ in frames)))
    if any(frame.file == nn.init.__file__ for frame in inner):
        return  # random weights are looked at while they are made: nothing of the program hangs on it
    if any(frame.file.endswith(_GO_ON) for frame in inner) or (frames and frames[0][0].file.endswith(_GO_ON)):
        how = "value"
    first = frames[len(inner)][0] if len(inner) < len(frames) else None
    told = Asked(how, op, next((frame for frame, user in frames if user), None), first)
    if key is not None and not inner and frames and frames[0] == everyone[0]:
        _told[key] = told  # all of it hangs on these two lines
    _tell(in_force, told)


def _tell(in_force: state.Machine, told: Asked) -> None:
    in_force.asked[told] = in_force.asked.get(told, 0) + 1
    if in_force.observer is not None:
        in_force.observer.asked(told)


some_stand = False
"""Whether any numbers stand for others in this process: most programs have none, and then nobody has to look."""


def stand_for(payload: Tensor, values: Tensor) -> Tensor:
    """Have a few numbers stand for those of a payload without values, where one for all would contradict itself."""
    global some_stand
    some_stand = True
    payload._stands = values  # type: ignore[attr-defined]
    return payload


def standing_for(payload: Tensor) -> Tensor | None:
    """The numbers that stand for a payload's, if there are such."""
    found: Tensor | None = payload.__dict__.get("_stands")
    return found


def hint(payload: Tensor) -> Any:
    """One value for a tensor that has none: of numbers 1, of indices 0; of a test, what it says of such numbers."""
    if not payload.is_meta and payload.numel() == 1:
        return payload.item()  # what it held before it was written to from unknown values
    found = payload.__dict__.get("_hint")
    if found is not None:
        return found
    if payload.numel() == 1 and (stands := standing_for(payload)) is not None:
        return stands.item()
    if payload.dtype is torch.bool:
        return not payload.is_meta and bool(payload.all())
    return 1.0 if payload.is_floating_point() else 0


def filled(payload: Tensor) -> Tensor:
    """Memory of that shape, for a program that reads bytes or numbers of it."""
    if not payload.is_meta:
        return payload.clone()
    if (stands := standing_for(payload)) is not None:
        return stands.clone()
    refuse_more(payload.numel() * payload.element_size())
    with torch._C.DisableTorchFunction():
        return torch.full(payload.size(), hint(payload), dtype=payload.dtype, device="cpu")


def shape_on_host(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in the host's memory of which nothing but the shape is known."""
    machine = state.machine()
    assert machine is not None
    with torch._C.DisableTorchFunction():
        payload = torch.empty(shape, dtype=dtype, device="meta")
    return wrap(payload, machine.host)


def _give_out(tensor: Any, method: str) -> Any:
    """What a method answers that reads all values: numbers, an array, or memory."""
    op = f"Tensor.{method}"
    whole = tensor.dtype is torch.bool or not tensor.is_floating_point()
    asked("decision" if whole and method == "tolist" else "value", op)
    values = filled(tensor.payload)

    def decided() -> None:
        asked("decision", op, compared=True)

    if method == "tolist":
        return nested(values.tolist(), decided)
    return unknown_array(values.numpy(force=True), decided) if method == "numpy" else values


def _bytes_for(size: int) -> torch.UntypedStorage:
    asked("value", "UntypedStorage.cpu")
    refuse_more(size)
    with torch._C.DisableTorchFunction():
        return torch.zeros(size, dtype=torch.uint8, device="cpu").untyped_storage()


def refuse_more(size: int) -> None:
    """Say that values are asked for of which there are none, and too many for stand-ins."""
    if size > _MOST_BYTES:
        raise state.NotSimulated(
            f"{human(size)} of values are read, and shapes alone are rehearsed: so much memory is not made up"
        )


ABOVE.give_out = _give_out
set_bytes_for(_bytes_for)


def handlers() -> dict[Any, functions.Handler]:
    """What answers above autograd when a number is taken out of a tensor."""
    named = torch.Tensor
    taken: dict[Any, functions.Handler] = {
        function: _watched(function)
        for function in (named.item, named.__float__, named.__int__, named.__index__)
    }
    assigned = named.grad.__set__  # type: ignore[union-attr]
    return taken | {named.__bool__: _watched(named.__bool__, "decision"), assigned: _gradient_on_host}


def _gradient_on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor.grad = grad`: a gradient without values, for a weight in the host's memory, which has some."""
    tensor, grad = args
    mine, given = (getattr(value, "_local_tensor", value) for value in (tensor, grad))
    if given.__class__ is HostTensor and isinstance(mine, Tensor) and mine.__class__ not in VIRTUAL:
        asked("copy", "Tensor.grad")
        made = filled(given.payload)
        if given is not grad:
            made = type(grad)(made, grad._spec, requires_grad=False)
        grad = made
    return functions.assign_grad(func, (tensor, grad), kwargs)


def _watched(function: Any, how: How = "value") -> functions.Handler:
    below = functions.HANDLERS.get(function, functions.call)

    def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if not is_unknown(tensor) or tensor.numel() != 1:
            return below(func, args, kwargs)
        op = f"Tensor.{function.__name__}"
        found, about = hint(tensor.payload), tensor.payload.__dict__.get("_about")
        if about == "equal" and function is torch.Tensor.item and found.__class__ is int:
            asked("value", op)
            return WholeStandIn(found, lambda: asked("decision", op, compared=True))
        # A truth value or a whole number steers a program; a floating-point one is mostly shown.
        asked("value" if about == "finite" else how if isinstance(found, float) else "decision", op)
        if function is torch.Tensor.item:
            return (
                StandIn(found, lambda: asked("decision", op, compared=True))
                if isinstance(found, float)
                else found
            )
        return {"__bool__": bool, "__float__": float}.get(function.__name__, int)(found)

    return answer


def _told_by() -> Callable[[], None] | None:
    in_force = state.machine()
    if in_force is None or not in_force.shapes:
        return None
    return lambda: asked("decision", "load", compared=True)


stand_in.told_by = _told_by
