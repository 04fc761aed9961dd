"""The model's edge: whatever goes in on a device comes out on that device, also from a model that is split.

Accelerate's root hook does this for a model's own forward. TRL replaces that forward by one that calls the backbone
and the head itself, past the hook, and leaves log-probabilities, entropies and loss on the head's device, where they
meet masks and advantages of another. It moves inputs and outputs, and makes the head's GPU the current one meanwhile;
it catches no error and makes up no result.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from trimtab.placement.apply import move
from trimtab.placement.profile import bare_model

if TYPE_CHECKING:
    from torch import nn

    from trimtab.placement.plan import PlacementPlan


def take_inputs(model: nn.Module, plan: PlacementPlan) -> None:
    """Make a model that was loaded in parts take its inputs on the plan's device.

    Accelerate takes the first device of a set of names, which is another one from process to process.
    """
    hook: Any = getattr(model, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "execution_device", None) is not None:
            part.execution_device = plan.device


def return_outputs(model: nn.Module) -> None:
    """Make `model` answer on the device of its input. Call it last: after TRL's trainer has replaced the forward."""
    import torch

    inner: Any = bare_model(model)
    forward = inner.forward

    # `generate` reads the arguments that a model takes off its forward's signature.
    @functools.wraps(forward)
    def at_the_edge(*args: Any, **kwargs: Any) -> Any:
        with _current(inner):
            outputs = forward(*args, **kwargs)
        # The first tensor among the inputs, those of the text before all others.
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values())
        device = next((value.device for value in given if isinstance(value, torch.Tensor)), None)
        return outputs if device is None else move(outputs, device)

    inner.forward = at_the_edge


def _current(model: Any) -> AbstractContextManager[Any]:
    """The head's GPU as the current one: a Triton kernel runs on that, wherever its tensors lie."""
    import torch

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    device = getattr(getattr(head, "weight", None), "device", None)
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()


def on_several_devices(model: nn.Module) -> bool:
    """Whether a model is split: what is computed last may then lie elsewhere than what was given."""
    return len({tensor.device for tensor in model.parameters()}) > 1
