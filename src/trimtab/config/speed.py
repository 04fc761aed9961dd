"""The settings of how a step is computed: faster ways to the same numbers, and what must hold between them.

Declares and compares settings; which parts a machine and a model can have is for placement/speed.py and fast/ to say.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trimtab.config.rule import Rules
from trimtab.config.section import Section

RULES = Rules()


class SpeedSettings(Section):
    """How a step is computed, with the same maths: each part by itself. `auto` takes the faster way where it is sound
    and says why not elsewhere; a part that is asked for by name and cannot be had is an error (docs/speed.md)."""

    adapters: Literal["auto", "fused", "plain"] = "auto"
    """LoRA's products: `fused` computes them in the activations' number format, `plain` by PEFT's own forward."""

    head: Literal["auto", "chunked", "plain"] = "auto"
    """The loss at the output head: `chunked` never holds all logits at once, `plain` as the trainer does it."""

    compile: Annotated[bool | None, BeforeValidator(lambda said: None if said == "auto" else said)] = None
    """Each layer's training step by torch.compile: true demands it, false leaves it, null (or auto) decides."""

    padding: Literal["auto", "none", "padded"] = "auto"
    """Rows of a batch: `none` lays them end to end and computes no padding, `padded` makes them equally long."""

    kernels: Literal["auto", "triton", "plain"] = "auto"
    """The MLP of a layer with its adapters: by fused Triton kernels, or as the model's own code has it."""

    activation_memory_budget: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of a compiled layer's activations that is kept for the backward pass: 1 computes none of them again, 0
    nearly all; null is 1. Between it and training.gradient_checkpointing lies a trade of memory for time."""


RULES.blame(
    "speed.activation_memory_budget speed.compile",
    lambda c: c.speed.activation_memory_budget is not None and c.speed.compile is False,
    "is a choice of the compiler, and speed.compile is false",
    "set speed.compile: null, or training.gradient_checkpointing: true in its place",
)
RULES.blame(
    "speed.activation_memory_budget training.gradient_checkpointing",
    lambda c: c.speed.activation_memory_budget is not None and c.training.gradient_checkpointing,
    "cannot go with training.gradient_checkpointing: that computes all activations again",
    "remove one of the two",
)
RULES.blame(
    "speed.adapters method",
    lambda c: c.speed.adapters == "fused" and c.method == "full",
    "needs adapters, but method is full",
    "set speed.adapters: auto, or method: lora",
)
RULES.blame(
    "speed.adapters lora.dora",
    lambda c: c.speed.adapters == "fused" and c.lora.dora,
    "cannot go with lora.dora: its adapters scale the layer's own weight, which PEFT's forward computes",
    "set speed.adapters: auto, or lora.dora: false",
)
RULES.blame(
    "speed.head method",
    lambda c: c.speed.head == "chunked" and c.method == "full" and c.recipe != "sft",
    "is for a frozen output head with this recipe, but method: full trains it",
    "set speed.head: auto, or method: lora",
)
