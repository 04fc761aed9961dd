"""The part of a picture's tower that a model never reads: what lies behind the layer that its connector takes.

LLaVA takes the tokens of one layer by its number (`vision_feature_layer`): from before the tower's last norm and its
pooling head, and often from before its last layer. Where all weights are tuned, these could never get a gradient. They
are frozen before training, by what the config says alone, so that a gradient which is missing later is a fault.
"""

from __future__ import annotations

from typing import Any


def freeze_unread(model: Any) -> list[str]:
    """Freeze what lies behind the taken layer, and name it. Models that take no layer by number are left alone."""
    layer = getattr(model.config, "vision_feature_layer", None)
    tower = getattr(model.base_model, "vision_tower", None)
    stack = getattr(getattr(tower, "encoder", None), "layers", None)
    if layer is None or tower is None or stack is None:
        return []
    # Number 0 is what goes into the first layer; numbers below 0 count from the last.
    taken = max(one % (len(stack) + 1) for one in ([layer] if isinstance(layer, int) else layer))
    in_stack = {id(tensor) for tensor in stack.parameters()}
    behind = {id(tensor) for later in stack[taken:] for tensor in later.parameters()}
    frozen, passed = [], False
    for name, tensor in tower.named_parameters():
        # In the order of the pass: embeddings, the layers, then norm and head.
        passed = passed or id(tensor) in in_stack
        if id(tensor) in behind or (passed and id(tensor) not in in_stack):
            tensor.requires_grad_(False)
            frozen.append(name)
    return frozen
