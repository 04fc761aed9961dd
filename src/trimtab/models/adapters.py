"""LoRA adapters: chooses the layers by role in any architecture and lets PEFT add them. Freezing comes first.

A role or a name means the language model's layers. What stands beside it, a vision tower and its connector, is adapted
by a role of its own or by a name that only it has; an output head by its name alone, or as `audio_head`. Where a layer
has a second MLP for sound, `mlp` means both, `text_mlp` and `audio_mlp` the one or the other. Behind a role or name may
stand which layers of its stack are meant, and which names in these (`targets.py`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trimtab.config.schema import LoraSettings
from trimtab.errors import RequestError
from trimtab.models.families import CAUSAL_LM, Family
from trimtab.models.targets import Target
from trimtab.models.unread import unread
from trimtab.placement.stacks import find_stacks, language_root, tower_roots, tower_stacks, under

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel

ROLES = ("attention", "mlp", "all-linear", "text_mlp", "audio_mlp", "audio_head", "vision", "connector")
# A layer's kind is told by the block that it lies in; only an MLP without one (OPT's fc1) by its own name.
_ATTENTION_BLOCK = re.compile(r"attn|attention", re.IGNORECASE)
_MLP_BLOCK = re.compile(r"mlp|ffn|feed_?forward|moe|expert", re.IGNORECASE)
_MLP_NAME = re.compile(r"(gate|up|down|gate_up)_proj|(c_)?fc(_?\d|_in|_out)?|w[123]")
_ROUTER = re.compile(r"gate|router|shared_expert_gate")
_SOUND = re.compile(r"audio|speech", re.IGNORECASE)
_HEAD = re.compile(r"head", re.IGNORECASE)


def adapter_targets(model: nn.Module, targets: str | list[str]) -> list[str]:
    """The shortest endings of module names, such as `q_proj` or `attn.c_proj`, that mean the wanted layers alone.

    Where all of them are the language model's, they mean its layers alone; a tower may have the same endings.
    """
    return _targets(model, targets)[0]


def _targets(model: nn.Module, targets: str | list[str]) -> tuple[list[str], str | None]:
    """The endings, and as a pattern what is left out although it ends so."""
    layers = _LinearLayers(model)
    wanted = [Target.read(text) for text in ([targets] if isinstance(targets, str) else targets)]
    unknown = [t.who for t in wanted if t.who not in ROLES and not layers.named(t.who)]
    if unknown or not wanted:
        raise RequestError.of(
            f"lora.targets: {', '.join(unknown) or 'an empty list'} not found in {type(model).__name__}",
            f"its linear layers are {layers}",
            f"use these names, or a role: {', '.join(ROLES)}",
        )
    chosen: set[str] = set()
    for target in wanted:
        found = layers.of_role(target.who) if target.who in ROLES else layers.named(target.who)
        if not found:
            raise layers.nothing_for(target)
        if target.first is None and target.who in ROLES:
            found = [name for name in found if name not in layers.unread]
        chosen.update(target.within(found, layers.lengths))
    others = [n for n, _ in model.named_modules() if n and n not in chosen]
    root = layers.root if all(under(n, layers.root) for n in chosen) else ""
    taken = {ending for other in others if under(other, root) for ending in _endings(other)}
    endings = {next(e for e in _endings(n) if e not in taken) for n in chosen}
    same = any(not endings.isdisjoint(_endings(n)) for n in others if not under(n, root))
    return sorted(endings), rf"(?!{re.escape(root)}\.).*" if same else None


def kind_of_layer(layer: str) -> str | None:
    """`attention` or `mlp` for a linear layer by its full name; None where neither is plain."""
    *blocks, name = layer.split(".")
    for block in reversed(blocks):
        if _ATTENTION_BLOCK.search(block):
            return "attention"
        if _MLP_BLOCK.search(block):
            return None if _ROUTER.fullmatch(name) else "mlp"
    return "mlp" if _MLP_NAME.fullmatch(name) else None


def is_audio_mlp(layer: str) -> bool:
    """Whether a layer, by its full name, lies in an MLP whose own name says that it is for sound."""
    if kind_of_layer(layer) != "mlp":
        return False
    blocks = [block for block in layer.split(".")[:-1] if _MLP_BLOCK.search(block)]
    return any(_SOUND.search(block) for block in blocks)


def add_lora(model: PreTrainedModel, settings: LoraSettings, family: Family = CAUSAL_LM) -> PeftModel:
    """Freeze the model, then add adapters beside the chosen layers, on those layers' own devices."""
    from peft import get_peft_model

    model.requires_grad_(False)
    # Beside a structure without weights adapters get none either: nobody reads the numbers that would be drawn.
    empty = all(parameter.is_meta for parameter in model.parameters())
    chosen = lora_config(model, settings, family)
    try:
        adapted: PeftModel = get_peft_model(model, chosen, low_cpu_mem_usage=empty)
    except ValueError as error:
        raise RequestError.of(
            "PEFT puts no such adapters on this model",
            str(error),
            _otherwise(settings, str(error)),
        ) from error
    return adapted


def _otherwise(settings: LoraSettings, refused: str) -> str:
    """What to change where PEFT refuses."""
    if settings.dropout and "dropout" in refused:
        return (
            "set lora.dropout=0; or lora.targets=attention, which leaves out experts that lie in one tensor"
        )
    return "choose other layers (lora.targets), or fewer of the other settings under lora"


def lora_config(model: nn.Module, settings: LoraSettings, family: Family = CAUSAL_LM) -> Any:
    from peft import LoraConfig

    targets, left_out = _targets(model, settings.targets)
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        target_modules=targets,
        exclude_modules=left_out,
        bias="none",
        task_type=family.task_type,
    )


class _LinearLayers:
    """Full names of a model's linear layers, by where they stand: language model, tower, connector, head."""

    def __init__(self, model: Any) -> None:
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        get_head = getattr(model, "get_output_embeddings", None)
        head = get_head() if get_head is not None else None
        body = getattr(model, "base_model_prefix", "")
        body = body if hasattr(model, body) else ""
        linear = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
        stacks = find_stacks(model)
        self.model = model
        self.root = language_root(model, stacks)
        self.lengths = {stack: len(model.get_submodule(stack)) for stack in stacks}
        """How many layers each stack has."""
        self.every = [n for n, _ in linear]
        inside = [n for n, m in linear if m is not head and under(n, body)]
        towers = tower_stacks(stacks, self.root)
        self._towers = tower_roots(stacks, towers)
        own = [stack for stack in stacks if stack not in towers]
        # A language model that has a tower inside (LLaVA's own code) has the connector inside as well.
        roots = own if any(under(tower, self.root) for tower in towers) else [self.root]
        self.language = [n for n in inside if _under_any(n, roots)]
        beside = [n for n in inside if not _under_any(n, roots)]
        self.vision = [n for n in beside if _under_any(n, towers)]
        self.unread = {name.rpartition(".")[0] for name in unread(model)}
        """What the model never reads; a role means it only where its layers are asked for by number."""
        self.audio_heads = [
            n for n in self.every if _SOUND.search(n) and _HEAD.search(n) and not _under_any(n, stacks)
        ]
        rest = [n for n in beside if not _under_any(n, towers)]
        # In a tower, beside its layers, there may be a head for pooling; Qwen keeps the connector itself there.
        self.connector = [n for n in rest if not _under_any(n, self._towers)] or rest

    def of_role(self, role: str) -> list[str]:
        if role in ("vision", "connector"):
            return self.vision if role == "vision" else self.connector
        if role == "audio_head":
            return self.audio_heads
        if role in ("text_mlp", "audio_mlp"):
            return self._mlp_of(sound=role == "audio_mlp")
        return [n for n in self.language if role in ("all-linear", kind_of_layer(n))]

    def _mlp_of(self, *, sound: bool) -> list[str]:
        """Of MLPs that stand side by side those for sound, or the others; none where there is one kind alone."""
        mlps = [n for n in self.language if kind_of_layer(n) == "mlp"]
        told = [n for n in mlps if is_audio_mlp(n)]
        beside = told and len(told) < len(mlps)
        return [n for n in mlps if (n in told) == sound] if beside else []

    def named(self, name: str) -> list[str]:
        """Layers of this name, or in a block of this name: the language model's, else those that stand elsewhere."""

        def within(names: list[str]) -> list[str]:
            return [n for n in names if f".{name}." in f".{n}."]

        return within(self.language) or within(self.every)

    def nothing_for(self, target: Target) -> RequestError:
        found = f"lora.targets={target}: no layer of {type(self.model).__name__} has this role"
        bare = self._bare_connector() if target.who == "connector" else []
        if bare:
            return RequestError.of(
                found,
                f"its connector is a tensor of its own, {', '.join(bare)}, and LoRA goes beside linear layers",
                "leave `connector` out: `vision` and the language model's roles work; or use method=full",
            )
        if target.who in ("text_mlp", "audio_mlp"):
            return RequestError.of(
                found,
                "its layers have one MLP each, for all that they are given",
                "use `mlp`; these two roles are for models with a second MLP for sound, such as Higgs Audio v2",
            )
        if target.who == "audio_head":
            return RequestError.of(
                found, "it has no head whose name says that it is for sound", "leave `audio_head` out"
            )
        return RequestError.of(found, f"its linear layers are {self}", "name the layers themselves")

    def _bare_connector(self) -> list[str]:
        """Matrices between tower and language model that are no layer's weight (Gemma 3)."""
        layers = {n for n, m in self.model.named_modules() if n and not list(m.children()) and "." in n}
        return [
            name
            for name, tensor in self.model.named_parameters()
            if self._towers
            and tensor.dim() == 2
            and not _under_any(name, [self.root, *self._towers])
            and not (name.endswith(".weight") and name.rpartition(".")[0] in layers)
        ]

    def __str__(self) -> str:
        return ", ".join(sorted({n.split(".")[-1] for n in self.language + self.vision + self.connector}))


def _under_any(name: str, roots: list[str]) -> bool:
    return any(under(name, root) for root in roots)


def _endings(name: str) -> list[str]:
    """What PEFT takes for a target that means this module: its last name parts, the fewest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
