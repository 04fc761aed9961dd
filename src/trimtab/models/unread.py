"""The part of a picture's tower that a model never reads: what lies behind the layer that its connector takes.

LLaVA takes the tokens of one layer by its number (`vision_feature_layer`): from before the tower's last norm and its
pooling head, and often from before its last layer. Where all weights are tuned, these could never get a gradient. They
are frozen before training, by what the config says alone, so that a gradient which is missing later is a fault.
"""

from __future__ import annotations

from typing import Any


def freeze_unread(model: Any) -> list[str]:
    """Freeze what lies behind the taken layer, and name it."""
    names = unread(model)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return names


def unread(model: Any) -> list[str]:
    """Names of the parameters behind the taken layer. Models that take no layer by number have none."""
    layer = getattr(getattr(model, "config", None), "vision_feature_layer", None)
    tower = getattr(getattr(model, "base_model", None), "vision_tower", None)
    stack = getattr(getattr(tower, "encoder", None), "layers", None)
    if layer is None or tower is None or stack is None:
        return []
    prefix = next(name for name, module in model.named_modules() if module is tower)
    # Number 0 is what goes into the first layer; numbers below 0 count from the last.
    taken = max(one % (len(stack) + 1) for one in ([layer] if isinstance(layer, int) else layer))
    in_stack = {id(tensor) for tensor in stack.parameters()}
    behind = {id(tensor) for later in stack[taken:] for tensor in later.parameters()}
    found, passed = [], False
    for name, tensor in tower.named_parameters():
        # In the order of the pass: embeddings, the layers, then norm and head.
        passed = passed or id(tensor) in in_stack
        if id(tensor) in behind or (passed and id(tensor) not in in_stack):
            found.append(f"{prefix}.{name}")
    return found
