"""What a model weighs, part by part, read from its skeleton on the meta device; no weights are loaded.

The figures are estimates from shapes. They decide what fits; they never stand in for a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.placement.plan import MemoryShare, Precision

if TYPE_CHECKING:
    from torch import nn

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
ADAM_BYTES = 8
CUDA_CONTEXT_BYTES = 600 * 2**20
"""CUDA context, cuBLAS workspace and allocator slack on one GPU."""
HEAD_CHUNK_TOKENS = 256
"""Logits are computed in tiles of about this many tokens, not for the whole batch."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step pushes through the model."""

    batch_size: int = 1
    max_length: int = 1024
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


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module that is placed whole: an embedding, one decoder layer, the head."""

    name: str
    parameters: int
    trainable: int
    is_layer: bool


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model as the planner sees it."""

    parts: tuple[Part, ...]
    hidden: int
    intermediate: int
    vocabulary: int
    attention: int
    """Width of queries, keys and values together."""
    key_value: int = 0
    """Width of keys and values together: what one token leaves in a layer's cache."""

    @property
    def parameters(self) -> int:
        return sum(p.parameters for p in self.parts)

    @property
    def trainable(self) -> int:
        return sum(p.trainable for p in self.parts)

    @property
    def layers(self) -> tuple[Part, ...]:
        return tuple(p for p in self.parts if p.is_layer)

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
        frozen = sum(p.parameters for p in parts) - trainable
        layers = sum(p.is_layer for p in parts)
        head = any(not p.is_layer for p in parts)
        working = self._activations(layers, head, compute, work)
        if compute != "fp32" and work.training:
            # Autocast makes 16-bit copies of the fp32 weights and keeps them for the backward pass.
            working += trainable * BYTES[compute] // shards
        if shards > 1:
            # FSDP gathers one part whole while it fetches the next.
            working += 2 * max(p.parameters for p in parts) * BYTES[compute]
        copy = (frozen + trainable) * BYTES[weights] if work.reference else 0
        # Adapters are fp32. A model that is tuned whole is so for its gradients' sake, and else as it was loaded.
        trained_size = 4 if work.training or frozen else BYTES[weights]
        return MemoryShare(
            weights=(frozen * BYTES[weights] + trainable * trained_size + copy) // shards,
            gradients=trainable * 4 // shards if work.training else 0,
            optimizer=trainable * ADAM_BYTES // shards
            if work.training
            else self._anchors(parts, work, weights),
            activations=working,
            cache=layers * work.generated * work.max_length * self.key_value * BYTES[weights],
            overhead=overhead,
            reserved=reserved,
            capacity=capacity,
        )

    def _anchors(self, parts: Iterable[Part], work: Workload, weights: Precision) -> int:
        """At most all of the queries', keys' and values' tuned weights."""
        if not work.anchors:
            return 0
        whole = self.hidden * self.attention * BYTES[weights]
        return sum(min(whole, p.trainable * 4) for p in parts if p.is_layer)

    def _activations(self, layers: int, has_head: bool, compute: Precision, work: Workload) -> int:
        tokens, size = work.batch_size * work.lanes * work.max_length, BYTES[compute]
        # Saved for backward in one decoder layer, per token: the norms' inputs and outputs in fp32, and multiples of
        # the hidden, MLP and attention widths. Fitted to five models (benchmarks/plan_memory.py).
        widths = 4.0 * self.hidden + 3.6 * self.intermediate + 3.65 * self.attention
        layer = int(tokens * (4 * 4 * self.hidden + size * widths))
        boundary = tokens * self.hidden * size
        # Logits of one tile and their gradient in fp32, and the softmax between them.
        head = 3 * 4 * min(tokens, HEAD_CHUNK_TOKENS) * self.vocabulary if has_head else 0
        if layers == 0:
            return head
        if not work.training:
            # The perturbed weights of one module; the largest in a layer are those of its MLP.
            scratch = work.lanes * self.hidden * self.intermediate * size if work.lanes > 1 else 0
            return max(layer, head) + scratch
        if work.gradient_checkpointing:
            return layers * boundary + layer + head
        return layers * layer + head


def profile_model(model: nn.Module) -> ModelProfile:
    """Profile a model, with or without adapters; on the meta device it costs nothing."""
    base = bare_model(model)
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = _width(text, "hidden_size")
    stack = _decoder_stack(base)
    return ModelProfile(
        parts=_parts(base, stack) if stack else (_whole(base),),
        hidden=hidden,
        intermediate=_width(text, "intermediate_size") or 4 * hidden,
        vocabulary=_width(text, "vocab_size"),
        attention=_attention_width(text, hidden),
        key_value=_attention_width(text, hidden, queries=False),
    )


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


def _parts(model: nn.Module, stack: str) -> tuple[Part, ...]:
    counts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        entry = counts.setdefault(_part_of(name, stack), [0, 0])
        entry[0] += parameter.numel()
        entry[1] += parameter.numel() if parameter.requires_grad else 0
    for name, module in model.named_modules():
        # Parts without parameters of their own (rotary tables, a tied head) still need a device.
        inside = any(name == p or name.startswith(p + ".") or p.startswith(name + ".") for p in counts)
        if name and name != stack and not inside and (not list(module.children()) or list(module.buffers())):
            counts[name] = [0, 0]
    return tuple(
        Part(name=n, parameters=total, trainable=trained, is_layer=n.startswith(stack + "."))
        for n, (total, trained) in counts.items()
    )


def _whole(model: nn.Module) -> Part:
    """A model without a stack of layers is placed as one piece."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return Part(
        name="",
        parameters=sum(n for n, _ in sizes),
        trainable=sum(n for n, grad in sizes if grad),
        is_layer=False,
    )


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


def _decoder_stack(model: nn.Module) -> str:
    """Name of the module list with the most parameters: the decoder's stack of layers. Empty when there is none.

    By weight, not by length: a layer may hold more experts than there are layers, a vision tower more blocks.
    """
    from torch import nn

    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    # Of equals the first is the outer one.
    return max(lists, key=lists.__getitem__) if lists else ""


def _part_of(parameter: str, stack: str) -> str:
    if parameter.startswith(stack + "."):
        return f"{stack}.{parameter[len(stack) + 1 :].split('.')[0]}"
    pieces = parameter.split(".")
    root = stack.split(".")[:-1]
    # Beside the layers (`model.norm`) or above them (`lm_head`): one level below what they share.
    shared = 0
    while shared < len(root) and shared < len(pieces) and pieces[shared] == root[shared]:
        shared += 1
    return ".".join(pieces[: shared + 1])
