"""What a model weighs, part by part, read from its skeleton on the meta device; no weights are loaded.

The figures are estimates from shapes. They decide what fits; they never stand in for a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trimtab.placement.activations import Computed, head_bytes, layer_bytes
from trimtab.placement.plan import MemoryShare, Precision
from trimtab.placement.stacks import find_stacks, language_root, tower_stacks, under

if TYPE_CHECKING:
    from torch import nn

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight in NF4: its code, its share of a block's scale, and of a group's."""
ADAM_BYTES = 8
CUDA_CONTEXT_BYTES = 600 * 2**20
"""CUDA context, cuBLAS workspace and allocator slack on one GPU."""
_EXPERT = re.compile(r"expert\w*\.\d+\.", re.IGNORECASE)
_SCALES = (".weight_scales", ".weight_groups")
"""What belongs to a weight in four bits, which itself holds two numbers a byte."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step pushes through the model."""

    batch_size: int = 1
    max_length: int = 1024
    patches: int | None = None
    """Patches or frames of a row that pass through a tower; None: as many as the row has tokens."""
    gradient_checkpointing: bool = False
    training: bool = True
    """Whether there are gradients and an optimizer; zeroth-order steps have neither."""
    lanes: int = 1
    """Copies of the batch in one forward pass, each through weights of its own."""
    anchors: bool = False
    """Whether the starting weights of the attention layers are kept (DiZO)."""
    generated: int = 0
    """Sequences that are generated at once, each up to `max_length` (GRPO)."""
    reference: bool = False
    """Whether a second, frozen copy of all weights is held (GRPO's KL term without an adapter)."""
    reserved_share: float = 0.0
    """Share of each GPU's whole memory that an engine beside the training takes (GRPO with vLLM)."""
    computed: Computed = field(default_factory=Computed)
    """How the language model's part of a training step is computed."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module that is placed whole: an embedding, one layer, the head. Or a tensor beside such modules."""

    name: str
    parameters: int
    trainable: int
    is_layer: bool
    stack: str = ""
    """The list of a tower or codec that the layer lies in; empty for the language model's, and for no layer."""
    embeds: bool = False
    """Whether it holds a table of embeddings."""
    four_bit: int = 0
    """How many of its parameters are held in four bits."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The widths of one stack's layers."""

    hidden: int
    intermediate: int
    attention: int
    """Width of queries, keys and values together."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile(Widths):
    """A model as the planner sees it; the widths are its language model's."""

    parts: tuple[Part, ...]
    vocabulary: int
    key_value: int = 0
    """Width of keys and values together: what one token leaves in a layer's cache."""
    towers: Mapping[str, Widths] = field(default_factory=dict)
    """The other stacks: vision towers, codecs."""
    ties: tuple[tuple[str, str], ...] = ()
    """Parts that share a tensor, and so a device."""
    routed: bool = False
    """Whether trained tensors belong to single experts, some of which a step may leave out."""

    @property
    def parameters(self) -> int:
        return sum(p.parameters for p in self.parts)

    @property
    def trainable(self) -> int:
        return sum(p.trainable for p in self.parts)

    @property
    def four_bit(self) -> int:
        return sum(p.four_bit for p in self.parts)

    @property
    def layers(self) -> tuple[Part, ...]:
        """The layers in the order in which they compute: what sees and hears first, then the language model."""
        return tuple(sorted((p for p in self.parts if p.is_layer), key=lambda p: not p.stack))

    def share(
        self,
        parts: Iterable[Part],
        weights: Precision,
        compute: Precision,
        work: Workload,
        *,
        capacity: int,
        overhead: int = 0,
        reserved: int = 0,
        shards: int = 1,
    ) -> MemoryShare:
        """What `parts` need on one device; with `shards` > 1 their state is spread over that many processes."""
        parts = tuple(parts)
        trainable = sum(p.trainable for p in parts)
        packed = sum(p.four_bit for p in parts)
        frozen = sum(p.parameters for p in parts) - trainable - packed
        working = self._activations(parts, compute, work)
        if compute != "fp32" and work.training:
            # Autocast makes 16-bit copies of the fp32 weights and keeps them for the backward pass.
            working += trainable * BYTES[compute] // shards
        if shards > 1:
            # FSDP gathers one part whole while it fetches the next.
            working += 2 * max(p.parameters for p in parts) * BYTES[compute]
        if packed:
            # The largest layer is unpacked while its product is made; the one before it is only just let go.
            working += 2 * self.hidden * max(self.intermediate, self.hidden) * BYTES[compute]
        copy = (frozen + trainable) * BYTES[weights] if work.reference else 0
        # Adapters are fp32. A model that is tuned whole is so for its gradients' sake, and else as it was loaded.
        trained_size = 4 if work.training or frozen else BYTES[weights]
        return MemoryShare(
            weights=(frozen * BYTES[weights] + trainable * trained_size + copy) // shards
            + int(packed * FOUR_BIT_BYTES),
            gradients=trainable * 4 // shards if work.training else 0,
            optimizer=trainable * ADAM_BYTES // shards
            if work.training
            else self._anchors(parts, work, weights),
            activations=working,
            cache=sum(p.is_layer and not p.stack for p in parts)
            * (work.generated * work.max_length * self.key_value * BYTES[weights]),
            overhead=overhead,
            reserved=reserved,
            capacity=capacity,
        )

    def _anchors(self, parts: Iterable[Part], work: Workload, weights: Precision) -> int:
        """At most all of the queries', keys' and values' tuned weights."""
        if not work.anchors:
            return 0
        stacks = self._stacks
        whole = {name: w.hidden * w.attention * BYTES[weights] for name, w in stacks.items()}
        return sum(min(whole[p.stack], p.trainable * 4) for p in parts if p.is_layer)

    @property
    def _stacks(self) -> Mapping[str, Widths]:
        return {"": self, **self.towers}

    def _activations(self, parts: Iterable[Part], compute: Precision, work: Workload) -> int:
        """At the worst moment: what is kept for the backward pass, or a frozen tower's pass before there is any."""
        rows, size = work.batch_size * work.lanes, BYTES[compute]
        patches = work.max_length if work.patches is None else work.patches
        logits = head_bytes(rows * work.max_length, self.hidden, self.vocabulary, size, work.computed)
        head = logits if any(not p.is_layer for p in parts) else 0
        held, passing, scratch = (head, 0, 0) if work.training else (0, head, 0)
        for name, widths in self._stacks.items():
            layers = sum(p.is_layer and p.stack == name for p in parts)
            if not layers:
                continue
            tokens = rows * (patches if name else work.max_length)
            how = Computed() if name else work.computed
            if self.four_bit:
                how = replace(how, kernels=False)  # the kernels of an MLP take its weights in 16 bits
            kept = layer_bytes(widths.hidden, widths.intermediate, widths.attention, size, how)
            layer = int(tokens * kept)
            # Gradients go through the language model to whatever is trained; into a tower only for its own sake.
            if work.training and (not name or any(p.trainable for p in self.parts if p.stack == name)):
                boundary = tokens * widths.hidden * size
                held += layers * boundary + layer if work.gradient_checkpointing else layers * layer
                continue
            passing = max(passing, layer)
            if work.lanes > 1:
                # The perturbed weights of one module; the largest in a layer are those of its MLP.
                scratch = max(scratch, work.lanes * widths.hidden * widths.intermediate * size)
        return max(held, passing) + scratch


def profile_model(model: nn.Module) -> ModelProfile:
    """Profile a model, with or without adapters; on the meta device it costs nothing."""
    base = bare_model(model)
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stacks = find_stacks(base)
    beside = tower_stacks(stacks, language_root(base, stacks))
    towers = {name: Widths(**_widths(_config_of(base, name))) for name in beside}
    parts, ties = _parts(base, stacks, set(towers))
    widths = _widths(text)
    return ModelProfile(
        **widths,
        parts=parts,
        vocabulary=_width(text, "vocab_size"),
        key_value=_attention_width(text, widths["hidden"], queries=False),
        towers=towers,
        ties=ties,
        routed=any(p.requires_grad and _EXPERT.search(name) for name, p in base.named_parameters()),
    )


def _config_of(model: nn.Module, stack: str) -> Any:
    """The config of the nearest model around a stack that has one of its own."""
    name = stack
    while name:
        name = name.rpartition(".")[0]
        config = getattr(model.get_submodule(name), "config", None)
        if config is not None:
            return config
    return None


def _widths(config: Any) -> dict[str, int]:
    hidden = _width(config, "hidden_size")
    return {
        "hidden": hidden,
        "intermediate": _width(config, "intermediate_size") or 4 * hidden,
        "attention": _attention_width(config, hidden),
    }


def _width(config: Any, name: str) -> int:
    """A figure of the config, 0 where it has none. Where layers differ (Gemma 3n and 4), the largest of them."""
    if getattr(config, "is_heterogeneous", False):
        return max(_width(layer, name) for layer in config.per_layer_config)
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, (list, tuple)) else value)


def _attention_width(config: Any, hidden: int, *, queries: bool = True) -> int:
    heads = _width(config, "num_attention_heads")
    if not heads:
        return (3 if queries else 2) * hidden
    width = _width(config, "head_dim") or hidden // heads
    return width * (heads * queries + 2 * (_width(config, "num_key_value_heads") or heads))


def _parts(
    model: nn.Module, stacks: list[str], towers: set[str]
) -> tuple[tuple[Part, ...], tuple[tuple[str, str], ...]]:
    """Layers one by one, and around them the largest modules that hold no layer; with the pairs that share a tensor."""
    from torch import nn

    parts: list[Part] = []
    ties: dict[tuple[str, str], None] = {}
    owners: dict[int, str] = {}

    def add(name: str, tensors: Iterable[tuple[str, nn.Parameter]], **more: Any) -> None:
        total = trained = packed = 0
        for own, tensor in tensors:
            if owners.setdefault(id(tensor), name) != name:
                ties[owners[id(tensor)], name] = None
                continue
            count = numbers_in(own, tensor)
            total += count
            trained += count if tensor.requires_grad else 0
            packed += count if count > tensor.numel() else 0
        parts.append(Part(name=name, parameters=total, trainable=trained, four_bit=packed, **more))

    def walk(module: nn.Module, name: str) -> None:
        children = {f"{name}.{child}" if name else child: inner for child, inner in module.named_children()}
        if name in stacks:
            for layer, inner in children.items():
                add(layer, inner.named_parameters(), is_layer=True, stack=name if name in towers else "")
        elif not any(under(stack, name) for stack in stacks):
            embeds = any(isinstance(inner, nn.Embedding) for inner in module.modules())
            add(name, module.named_parameters(), is_layer=False, embeds=embeds)
        else:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for tensor, value in own:
                held = [(tensor, value)] if isinstance(value, nn.Parameter) else []
                add(f"{name}.{tensor}" if name else tensor, held, is_layer=False)
            for child, inner in children.items():
                walk(inner, child)

    walk(model, "")
    return tuple(parts), tuple(ties)


def numbers_in(name: str, tensor: nn.Parameter) -> int:
    """How many parameters a tensor stands for: two a byte in four bits, whose scales are counted with them."""
    import torch

    packed = tensor.dtype == torch.uint8
    return 0 if name.endswith(_SCALES) else tensor.numel() * (1 + packed)


def bare_model(model: nn.Module) -> nn.Module:
    """The model itself, without DDP, DataParallel, torch.compile or PEFT around it: its names are the device map's."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    inner: Any = model
    while True:
        if isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            bare: nn.Module = inner
            return bare
