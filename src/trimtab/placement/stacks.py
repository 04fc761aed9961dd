"""Where a model's stacks of layers are: its language model's, and those of towers and codecs beside it.

Read off the structure alone, in any architecture; nothing is placed and no weight is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def layer_classes(model: nn.Module) -> list[str]:
    """Names of the classes of all its layers: the language model's, and those of towers beside it."""
    stacks = (model.get_submodule(name) for name in find_stacks(model))
    return sorted({type(layer).__name__ for stack in stacks for layer in stack.children()})


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


def tower_stacks(stacks: list[str], root: str) -> list[str]:
    """The stacks beside the language model, which is rooted at `root`.

    A model may keep its tower inside the module that holds the embeddings (LLaVA's own code: `model.layers` beside
    `model.vision_tower.vision_tower.vision_model.encoder.layers`): of unequally deep ones the nearest is its own.
    """
    nearest = min((stack.count(".") for stack in stacks if under(stack, root)), default=0)
    return [stack for stack in stacks if not under(stack, root) or stack.count(".") > nearest]


def tower_roots(stacks: list[str], towers: list[str]) -> list[str]:
    """The largest modules around the towers' stacks that hold no layer of the language model."""
    language = [stack for stack in stacks if stack not in towers]
    roots = []
    for tower in towers:
        root = tower
        while (outer := root.rpartition(".")[0]) and not any(under(stack, outer) for stack in language):
            root = outer
        roots.append(root)
    return list(dict.fromkeys(roots))


def under(name: str, root: str) -> bool:
    """Whether a dotted name lies inside the module `root`, which may be the whole model (empty)."""
    return not root or name.startswith(root + ".")


def in_ranges(numbers: Iterable[int]) -> str:
    """Numbers of layers as one reads them: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _blocks(module: nn.Module) -> list[nn.Module]:
    # An adapter hides its linear layer in a block of its own.
    return [] if hasattr(module, "base_layer") else list(module.children())
