"""The gradients of the adapters after a backward pass, read off tensor by tensor and told by part. It judges nothing.

A low-rank pair starts with one factor at zero, so that the other's gradient is exactly zero until the first has moved:
that is told by the values, not by the number of the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from trimtab.placement.profile import bare_model
from trimtab.placement.stacks import find_stacks, in_ranges, language_root, tower_roots, tower_stacks, under

if TYPE_CHECKING:
    import torch
    from torch import nn

_FACTOR = re.compile(r"\.lora_(embedding_)?([AB])\.")
_SEEING = re.compile(r"vis|image|siglip|clip", re.IGNORECASE)
_SOUND_MLP = re.compile(r"audio.*(mlp|ffn)|speech.*(mlp|ffn)", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)
LANGUAGE, CONNECTOR = "language model", "connector"
SOUND_MLP, SOUND_HEAD = "audio MLP", "audio head"
TEXT_MLP = f"{LANGUAGE}: text MLP"
"""Where a layer has an MLP for sound beside the one for text, the parts of the language model are told one by one."""


@dataclass(frozen=True)
class Place:
    """Where in the model a module lies."""

    part: str
    layer: int | None = None

    @property
    def beside(self) -> bool:
        """Whether it is of a tower or connector, or for sound: what a batch of text alone does not use."""
        return not self.part.startswith(LANGUAGE)

    @property
    def chosen(self) -> bool:
        """Whether a token goes either here or to another module of its kind: an MLP for sound beside one for text."""
        return self.part in (SOUND_MLP, TEXT_MLP)


@dataclass(frozen=True)
class Flow:
    """One tensor of an adapter, and the gradient that it got."""

    name: str
    module: str
    """The adapted module, by its name in the bare model."""
    place: Place
    trained: bool
    """Whether it requires a gradient."""
    norm: float | None
    """None: it has no gradient."""
    idle: bool = False
    """Whether its gradient has to be zero: it is multiplied by a factor that is zero."""
    elsewhere: bool = False
    """Whether a sharded tensor has nothing on this process."""

    @property
    def arrived(self) -> bool:
        return self.elsewhere or bool(self.norm)

    @property
    def wanted(self) -> bool:
        """Whether a gradient other than zero is due now."""
        return self.trained and not self.idle and not self.elsewhere


def adapter_flows(model: nn.Module) -> list[Flow]:
    """Every tensor of the adapters in use, with its gradient's norm; of a sharded tensor, this process's part."""
    bare = bare_model(model)
    where = Places(bare)
    found = list(_adapter_tensors(bare))
    norms = norms_of([tensor.grad for _, _, tensor in found])
    sizes = norms_of([tensor for _, _, tensor in found])
    zeros = {name: size == 0 for (name, _, _), size in zip(found, sizes, strict=True)}
    return [
        Flow(
            name,
            module,
            where.of(module),
            tensor.requires_grad,
            norm,
            idle=(other := _partner(name)) is not None and zeros.get(other, False),
            elsewhere=not _local(tensor).numel(),
        )
        for (name, module, tensor), norm in zip(found, norms, strict=True)
    ]


def zero_factors(model: nn.Module) -> list[torch.Tensor]:
    """Trained factors of low-rank pairs that are zero: until one of them has moved, the other's gradient is zero."""
    found = [
        tensor
        for name, _, tensor in _adapter_tensors(bare_model(model))
        if tensor.requires_grad and _FACTOR.search(name)
    ]
    return [tensor for tensor, size in zip(found, norms_of([*found]), strict=True) if size == 0]


def frozen_at_zero(model: nn.Module) -> list[str]:
    """Adapted modules that can never do anything: a factor is zero and frozen. A trained adapter may well be frozen."""
    frozen = [
        (module, _local(tensor.detach()))
        for name, module, tensor in _adapter_tensors(bare_model(model))
        if not tensor.requires_grad and not tensor.is_meta and _FACTOR.search(name)
    ]
    return list(dict.fromkeys(module for module, tensor in frozen if tensor.numel() and not tensor.any()))


def _adapter_tensors(bare: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, adapted module and tensor, of the adapters that a forward adds: none where they are switched off."""
    for module, inner in bare.named_modules():
        if hasattr(inner, "base_layer") and hasattr(inner, "active_adapters"):
            layer: Any = inner
            used = set() if layer.disable_adapters else set(layer.active_adapters)
            for name, tensor in inner.named_parameters():
                if not name.startswith("base_layer.") and not used.isdisjoint(name.split(".")):
                    yield f"{module}.{name}", module, tensor


def gradient_table(flows: list[Flow]) -> list[str]:
    """By part of the model: how many adapted modules got gradients, and how large these are."""
    parts: dict[str, list[Flow]] = {}
    for flow in flows:
        parts.setdefault(flow.place.part, []).append(flow)
    rows = []
    for part, inside in parts.items():
        modules = {f.module: f.place.layer for f in inside}
        reached = {f.module for f in inside if f.norm}
        layers = in_ranges(n for n in modules.values() if n is not None)
        norms = [f.norm for f in inside if f.norm]
        rows.append((part, f"layers {layers}" if layers else "", len(reached), len(modules), norms))
    wide, deep = max((len(row[0]) for row in rows), default=0), max((len(row[1]) for row in rows), default=0)
    return [
        f"{part:<{wide}}  {layers:<{deep}}  {got} of {of} adapted modules{_size(norms)}"
        for part, layers, got, of, norms in rows
    ]


def _size(norms: list[float]) -> str:
    if not norms:
        return ""
    if len(norms) == 1:
        return f", gradient norm {norms[0]:.1e}"
    return f", gradient norm {min(norms):.1e} to {max(norms):.1e}, median {median(norms):.1e}"


class Places:
    """Finds the part of the model that a module lies in, by its name in the bare model."""

    def __init__(self, bare: nn.Module) -> None:
        stacks = find_stacks(bare)
        root = language_root(bare, stacks)
        towers = tower_stacks(stacks, root)
        roots = tower_roots(stacks, towers)
        self._own = [stack for stack in stacks if stack not in towers]
        if not any(under(tower, root) for tower in towers):
            self._own.append(root)
        self._stacks = sorted(stacks, key=len, reverse=True)
        seeing = [name for name in roots if _SEEING.search(name)]
        self._towers = {
            stack: "vision tower" if [name] == seeing else name
            for stack in towers
            for name in roots
            if under(stack, name) or stack == name
        }
        get_head: Any = getattr(bare, "get_output_embeddings", None)
        head = get_head() if get_head is not None else None
        self._head = next((name for name, module in bare.named_modules() if module is head), None)
        parts = {part for name, _ in bare.named_modules() if self._within(name) for part in name.split(".")}
        self._two_mlps = any(_SOUND_MLP.fullmatch(part) for part in parts)

    def of(self, module: str) -> Place:
        stack = next((stack for stack in self._stacks if under(module, stack)), None)
        number = module.removeprefix(f"{stack}.").split(".")[0] if stack is not None else ""
        layer = int(number) if number.isdigit() else None
        if stack in self._towers:
            return Place(self._towers[stack], layer)
        own = not self._towers or module == self._head or any(under(module, root) for root in self._own)
        if self._two_mlps and own:
            return Place(self._told_apart(module), layer)
        return Place(LANGUAGE if own else CONNECTOR, layer)

    def _within(self, module: str) -> bool:
        """Whether it lies in a stack of the language model."""
        return any(under(module, stack) for stack in self._stacks if stack not in self._towers)

    def _told_apart(self, module: str) -> str:
        parts = module.split(".")
        if not self._within(module):
            return SOUND_HEAD if "audio" in module and "head" in module else LANGUAGE
        if any(_SOUND_MLP.fullmatch(part) for part in parts):
            return SOUND_MLP
        return TEXT_MLP if any(_MLP.search(part) for part in parts) else f"{LANGUAGE}: attention"


def _partner(name: str) -> str | None:
    """The other factor of a low-rank pair; None: it is no factor."""
    if (factor := _FACTOR.search(name)) is None:
        return None
    other = f".lora_{factor[1] or ''}{'B' if factor[2] == 'A' else 'A'}."
    return name[: factor.start()] + other + name[factor.end() :]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def norms_of(tensors: list[torch.Tensor | None]) -> list[float | None]:
    """Euclidean norms, brought to the CPU once for each device. Zero means that every element is."""
    import torch

    with torch.no_grad():  # of a sharded tensor its part itself, past autograd
        found = {i: _local(tensor).detach() for i, tensor in enumerate(tensors) if tensor is not None}
    values: list[float | None] = [0.0 if index in found else None for index in range(len(tensors))]
    for device in {tensor.device for tensor in found.values()}:
        here = [i for i, tensor in found.items() if tensor.device == device and tensor.numel()]
        if not here:
            continue
        norms = [torch.linalg.vector_norm(found[i], dtype=torch.float32) for i in here]
        # Squares of tiny numbers vanish in fp32; the largest number itself does not.
        largest = [torch.linalg.vector_norm(found[i], float("inf"), dtype=torch.float32) for i in here]
        both = zip(torch.stack(norms).tolist(), torch.stack(largest).tolist(), strict=True)
        for i, (norm, most) in zip(here, both, strict=True):
            values[i] = norm or most
    return values
