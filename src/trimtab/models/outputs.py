"""Finds the loss in whatever a model's forward pass gives back, or says what it gave back. It computes no loss.

By name where the outputs have names (`loss` of a mapping, `ModelOutput`, dataclass, named tuple or any object; fields
beside it do not matter), by place in a tuple or list. Nothing else that looks like a loss is ever taken for it: the
`aux_loss` of a mixture of experts alone would train the router and nothing more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.errors import RequestError, some_of

if TYPE_CHECKING:
    from torch import Tensor

_ABSENT = object()


def loss_of(outputs: Any) -> Tensor:
    """The one loss of a batch, as a tensor without dimensions."""
    import torch

    found = _find(outputs)
    if found is _ABSENT or found is None:
        raise _without_loss(outputs, known=found is None)
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        raise RequestError.of(
            f"the loss is {_kind(found)}, in {describe(outputs)}",
            "the backward pass starts at a tensor of floating-point numbers",
            "have the model return the loss as the tensor that it computed, without .item() or float()",
        )
    if found.numel() != 1:
        raise RequestError.of(
            f"the loss has {found.numel()} values, shape {tuple(found.shape)}, in {describe(outputs)}",
            "one number is trained on; whether these (one a token, a row or a DataParallel replica) are to be added or "
            "averaged, and over how many tokens, only the model knows",
            "have the model reduce its loss to one number (the mean over the trained tokens), and in place of "
            "torch.nn.DataParallel start one process for each GPU (processes: N)",
        )
    return found.reshape(())


def loss_in_step(outputs: Any, trained: Tensor, of: Tensor | int, *, some: bool | None = None) -> Tensor:
    """The part of a step's loss that these outputs bring: their mean, weighted by the share of the step's tokens.

    A step is all passes of all processes, `of` the tokens trained in it, `trained` where this pass has some of them. A
    mean of means would count the tokens of a short answer for more, and another number of processes or passes would
    make another loss. Weighed here, after the model, it is right for models that count by themselves or do not.
    `some`: whether there are any in this pass, where that is known; else the device is asked.
    """
    here = trained.sum()
    if not (here if some is None else some):
        # The mean of no tokens is NaN. Their part is nought, and the graph is there for the others to wait for.
        for part in _tensors(outputs):
            return nothing_of(part)
        raise RequestError.of(
            f"a batch in which no token is trained, and the model returned {describe(outputs)}",
            "the mean of no tokens is no number, and nothing beside it leads back to the weights",
            "drop rows without an answer, or have the model return its logits beside the loss",
        )
    return loss_of(outputs) * (here / of)


def nothing_of(features: Tensor) -> Tensor:
    """The sum of none of them: nought also of infinities, which 0 × sum is not, and still a part of the graph."""
    return features.reshape(-1)[:0].sum()


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """What of the outputs has a gradient, but for a loss that may be NaN in its backward pass as well."""
    import torch

    for name, value in _fields(outputs):
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dim()
            and "loss" not in name
        ):
            yield value


def _find(outputs: Any) -> Any:
    """What stands where the loss stands: `_ABSENT` without such a place, None where the place is empty."""
    import torch

    if outputs is None or isinstance(outputs, torch.Tensor):
        # Of a model that returns its loss alone. Logits alone have many values and are refused by that.
        return _ABSENT if outputs is None or outputs.dim() > 1 else outputs
    if isinstance(outputs, (list, tuple)) and not hasattr(outputs, "_fields"):
        return _in_sequence(outputs)
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    return getattr(outputs, "loss", _ABSENT)


def _in_sequence(outputs: Sequence[Any]) -> Any:
    """The first, as transformers orders them; elsewhere only where nothing else could be it."""
    numbers = [item for item in outputs if _is_number(item)]
    if numbers and (_is_number(outputs[0]) or len(numbers) == 1):
        return numbers[0]
    if numbers:
        raise RequestError.of(
            f"{len(numbers)} of what the model returned could be its loss: {describe(outputs)}",
            "none of them comes first, where a tuple's loss stands",
            "have the model return the loss first, or under its name: {'loss': …, 'logits': …}",
        )
    named = [item for item in outputs if not isinstance(item, (list, tuple)) or hasattr(item, "_fields")]
    inner = [found for found in map(_named, named) if found is not _ABSENT]
    return inner[0] if len(inner) == 1 else _ABSENT


def _named(item: Any) -> Any:
    """The loss of outputs inside a tuple, beside what a wrapper added."""
    import torch

    return _ABSENT if item is None or isinstance(item, torch.Tensor) else _find(item)


def _is_number(item: Any) -> bool:
    import torch

    return (
        isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel() == 1 and item.dim() <= 1
    )


def _without_loss(outputs: Any, *, known: bool) -> RequestError:
    alike = [name for name, value in _fields(outputs) if "loss" in name and value is not None]
    if known:
        why = "its loss is None: a model computes one where it is given labels"
        change = "give the batch its labels, and check that the model's forward passes them on to its loss"
    elif alike:
        why = f"{some_of(alike)} may be a part of the loss or another figure; only `loss` is trained on"
        change = "have the model return the whole loss under the name loss"
    else:
        why = "nothing in it is called loss, and no tensor of one number stands first"
        change = "have the model return its loss: {'loss': …}, an object with .loss, or a tuple that starts with it"
    return RequestError.of(f"no loss in what the model returned: {describe(outputs)}", why, change)


def describe(outputs: Any) -> str:
    """The type of some outputs with names, types and shapes of what is in them."""
    if _is_plain(outputs):
        return _kind(outputs)
    parts = [f"{name}: {_kind(value)}" if name else _kind(value) for name, value in _fields(outputs)]
    return f"{type(outputs).__name__}({some_of(parts, 12)})"


def _fields(outputs: Any) -> Iterator[tuple[str, Any]]:
    """Names (empty in a tuple) and values, one level deep."""
    if _is_plain(outputs):
        return
    if isinstance(outputs, Mapping):
        yield from ((str(key), value) for key, value in outputs.items())
    elif hasattr(outputs, "_fields"):
        yield from zip(outputs._fields, outputs, strict=True)
    elif isinstance(outputs, (list, tuple)):
        yield from (("", value) for value in outputs)
    elif dataclasses.is_dataclass(outputs):
        yield from ((f.name, getattr(outputs, f.name, None)) for f in dataclasses.fields(outputs))
    else:
        yield from ((name, value) for name, value in vars(outputs).items() if not name.startswith("_"))


def _is_plain(value: Any) -> bool:
    """Whether there is nothing inside to name."""
    import torch

    inside = isinstance(value, (Mapping, list, tuple)) or hasattr(value, "__dict__")
    return value is None or isinstance(value, torch.Tensor) or not inside


def _kind(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
