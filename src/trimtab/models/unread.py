"""The part of a model that its loss never reads: what lies behind the layer of a tower that the connector takes.

LLaVA takes the tokens of one layer by its number (`vision_feature_layer`): from before the tower's last norm and its
pooling head, and often from before its last layer. Where all weights are tuned, these could never get a gradient. They
are frozen before training, by what the config says alone, so that a gradient which is missing later is a fault.

Sparse attention has an indexer beside each layer, which chooses by its scores the tokens that are attended to: places
come out of it, and no gradient goes back through those. It is trained by a loss of its own, which no run here has.

A model that speaks, without its text head, has such a part too: the last layer's MLP for text. What it makes of a word
goes nowhere else than to that head.
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
    """Names of these parameters; most models have none."""
    return [*_behind_the_taken_layer(model), *_text_without_head(model), *_of_indexers(model)]


def _of_indexers(model: Any) -> list[str]:
    return [
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if prefix.rpartition(".")[2] == "indexer"
        for name, _ in module.named_parameters()
    ]


def _text_without_head(model: Any) -> list[str]:
    """Where each layer has an MLP for text beside one for sound, and there is no head for text: the last layer's."""
    stack = getattr(getattr(model, "model", None), "layers", None)
    if getattr(model, "text_lm_head", model) is not None or not stack or not hasattr(stack[-1], "audio_mlp"):
        return []
    parts = {"mlp": stack[-1].mlp, "post_attention_layernorm": stack[-1].post_attention_layernorm}
    prefix = f"model.layers.{len(stack) - 1}"
    return [
        f"{prefix}.{part}.{name}" for part, module in parts.items() for name, _ in module.named_parameters()
    ]


def _behind_the_taken_layer(model: Any) -> list[str]:
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
