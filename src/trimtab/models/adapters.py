"""LoRA adapters: chooses the layers by role in any architecture and lets PEFT add them. Freezing comes first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import LoraSettings
from trimtab.errors import RequestError

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

ROLES = ("attention", "mlp", "all-linear")
# A layer's role is told by the block that it lies in; only an MLP without one (OPT's fc1) by its own name.
_ATTENTION_BLOCK = re.compile(r"attn|attention", re.IGNORECASE)
_MLP_BLOCK = re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE)
_MLP_NAME = re.compile(r"(gate|up|down|gate_up)_proj|(c_)?fc(_?\d|_in|_out)?|w[123]")
_ROUTER = re.compile(r"gate|router|shared_expert_gate")


def adapter_targets(model: nn.Module, targets: str | list[str]) -> list[str]:
    """The shortest endings of module names, such as `q_proj` or `attn.c_proj`, that mean the wanted layers alone."""
    linear = _linear_layers(model)
    wanted = [targets] if isinstance(targets, str) else targets
    chosen: set[str] = set()
    for target in wanted:
        found = [n for n in linear if target == "all-linear" or role_of(n) == target]
        if target in ROLES and not found:
            raise RequestError.of(
                f"lora.targets={target}: no layer of {type(model).__name__} has this role",
                f"its linear layers are {_endings(linear)}",
                "name the layers themselves",
            )
        chosen.update(found)
    named = [t for t in wanted if t not in ROLES]
    unknown = [t for t in named if not any(_ends_with(n, t) for n in _linear_layers(model, with_head=True))]
    if unknown or not wanted:
        raise RequestError.of(
            f"lora.targets: {', '.join(unknown) or 'an empty list'} not found in {type(model).__name__}",
            f"its linear layers are {_endings(linear)}",
            f"use these names, or a role: {', '.join(ROLES)}",
        )
    others = [n for n, _ in model.named_modules() if n and n not in chosen]
    return sorted({_shortest_ending(n, others) for n in chosen} | set(named))


def role_of(layer: str) -> str | None:
    """`attention` or `mlp` for a linear layer by its full name; None where neither is plain."""
    *blocks, name = layer.split(".")
    for block in reversed(blocks):
        if _ATTENTION_BLOCK.search(block):
            return "attention"
        if _MLP_BLOCK.search(block):
            return None if _ROUTER.fullmatch(name) else "mlp"
    return "mlp" if _MLP_NAME.fullmatch(name) else None


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> PeftModel:
    """Freeze the model, then add adapters beside the chosen layers, on those layers' own devices."""
    from peft import get_peft_model

    model.requires_grad_(False)
    adapted: PeftModel = get_peft_model(model, lora_config(model, settings))
    return adapted


def lora_config(model: nn.Module, settings: LoraSettings) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=adapter_targets(model, settings.targets),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _linear_layers(model: nn.Module, *, with_head: bool = False) -> list[str]:
    """Full names of the linear layers inside the model; its output head only by request."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    get_head: Any = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    return [
        n
        for n, m in model.named_modules()
        if isinstance(m, (nn.Linear, Conv1D)) and (with_head or m is not head)
    ]


def _ends_with(name: str, ending: str) -> bool:
    """PEFT's own rule for what a target module means."""
    return name == ending or name.endswith("." + ending)


def _shortest_ending(name: str, others: list[str]) -> str:
    """As few of the last name parts as no other module ends with."""
    parts = name.split(".")
    for start in range(len(parts) - 1, 0, -1):
        ending = ".".join(parts[start:])
        if not any(_ends_with(other, ending) for other in others):
            return ending
    return name


def _endings(names: list[str]) -> str:
    return ", ".join(sorted({n.split(".")[-1] for n in names}))
