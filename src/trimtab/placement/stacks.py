"""Where a model's stacks of layers are: its language model's, and those of towers and codecs beside it.

Read off the structure alone, in any architecture; nothing is placed and no weight is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def find_stacks(model: nn.Module) -> list[str]:
    """Names of the lists of layers, in the model's own order. What the model wants whole is never looked into.

    A layer is a block made of blocks (attention, MLP): a list of experts or of small heads is none. Where no list is
    of that kind, the heaviest is taken.
    """
    from torch import nn

    whole = set(getattr(model, "_no_split_modules", None) or ())
    lists: dict[str, nn.ModuleList] = {}

    def walk(module: nn.Module, name: str) -> Iterator[str]:
        if type(module).__name__ in whole:
            return
        if isinstance(module, nn.ModuleList):
            lists[name] = module
            if any(_blocks(part) for layer in module for part in _blocks(layer)):
                yield name
                return
        for child, inner in module.named_children():
            yield from walk(inner, f"{name}.{child}" if name else child)

    found = list(walk(model, ""))
    if found or not lists:
        return found
    # Of equals the first is the outer one.
    return [max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()))]


def language_root(model: nn.Module, stacks: list[str]) -> str:
    """Name of the module that holds the text's embeddings and the layers above them; empty where that is the model."""
    get_embeddings: Any = getattr(model, "get_input_embeddings", None)
    try:
        embeddings = get_embeddings() if get_embeddings is not None else None
    except NotImplementedError:
        return ""
    root = next((name for name, module in model.named_modules() if module is embeddings), "")
    while root and not any(under(stack, root) for stack in stacks):
        root = root.rpartition(".")[0]
    return root


def under(name: str, root: str) -> bool:
    """Whether a dotted name lies inside the module `root`, which may be the whole model (empty)."""
    return not root or name.startswith(root + ".")


def _blocks(module: nn.Module) -> list[nn.Module]:
    # An adapter hides its linear layer in a block of its own.
    return [] if hasattr(module, "base_layer") else list(module.children())
