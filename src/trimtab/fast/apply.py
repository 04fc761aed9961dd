"""Carries out what the plan chose of `speed`: changes a loaded model so that its training step is computed faster.

Called once, when the adapters are added and before a trainer wraps the model. What the plan could not know, the
structure of the model's blocks, decides here: a part that the model has no place for falls back with a message, or is
an error where it was asked for by name. The parts `head` and `padding` belong to the trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trimtab.errors import RequestError
from trimtab.fast.blocks import Blocks, compile_blocks
from trimtab.models.load import shapes_only
from trimtab.placement import PlacementPlan, bare_model

Say = Callable[[str], None]
_LOOKED_AT = 256
_ROOM_FOR_COPIES = 0.25
"""Of the memory that the plan leaves free."""


@dataclass
class Fast:
    """What was made faster."""

    counts: dict[str, int] = field(default_factory=dict)
    """By part, how many modules compute so."""
    refused: dict[str, int] = field(default_factory=dict)
    """Why layers of the common form are computed plainly after all, and how many for each reason."""
    blocks: Blocks | None = None

    def tell_by(self, say: Say | None, note: Callable[[dict[str, Any]], None] | None = None) -> None:
        """From here on what is found on the way is said so: a trainer has a display of its own. `note` gets the figures
        of what was compiled."""
        if self.blocks is not None:
            self.blocks.say, self.blocks.note = say, note

    def as_dict(self) -> dict[str, Any]:
        """For the run's summary."""
        compiled = {"compiled": self.blocks.as_dict()} if self.blocks is not None else {}
        plain = {"layers_computed_plainly": self.refused} if self.refused else {}
        return {**self.counts, **plain, **compiled}


def make_fast(
    model: nn.Module,
    plan: PlacementPlan,
    say: Say | None = None,
    *,
    rows: Any = None,
    _backend: str = "inductor",
) -> Fast:
    """Change the model in place as the plan says, and say what was done. `rows` are those that are trained on."""
    speed, made = plan.speed, Fast()
    architecture = type(bare_model(model)).__name__

    def fell_back(part: str, why: str, change: str) -> None:
        if part in speed.demanded:
            raise RequestError.of(f"speed.{part} was asked for", why, change)
        if say is not None:
            say(f"speed: {why}: computed plainly")

    if speed.adapters == "fused":
        from trimtab.fast.lora import use_fast_adapters

        made.counts["adapters"] = use_fast_adapters(model)
        if not made.counts["adapters"]:
            fell_back(
                "adapters", f"no adapter of {architecture} is of the plain kind", "set speed.adapters: auto"
            )
    if speed.adapters == "fused" and plan.kind != "cpu" and plan.strategy in ("single", "data_parallel"):
        from trimtab.fast.siblings import use_joint_products

        use_joint_products(model)
    if speed.adapters == "fused" and _on_a_processor(plan) and not speed.compile:
        from trimtab.fast.reordered import use_reordered
        from trimtab.fast.whole_layers import use_whole_layers

        whole, refused = use_whole_layers(model)
        if whole:
            made.counts["whole_layers"] = whole
        if refused:
            made.refused = refused
        use_reordered(model, _room_beside(plan))
    if speed.kernels == "triton":
        from trimtab.fast.fourbit import use_fast_fourbit
        from trimtab.fast.mlp import use_fused_mlp

        if unpacked := use_fast_fourbit(model):
            made.counts["four_bit"] = unpacked
        # Shards of weights are gathered one by one: none can lie beside another.
        made.counts["kernels"] = use_fused_mlp(model, joined=plan.strategy != "sharded")
        if not made.counts["kernels"] and "four_bit" not in made.counts:
            why = f"no MLP of {architecture} is of the kind that the kernels compute"
            fell_back("kernels", why, "set speed.kernels: auto")
    if speed.compile:
        made.blocks = compile_blocks(
            model,
            dynamic=True if lengths_differ(rows) else None,
            budget=speed.activation_memory_budget,
            say=say,
            demanded="compile" in speed.demanded,
            _backend=_backend,
        )
        if not made.blocks.layers:
            why = f"no stack of layers was found in {architecture}"
            fell_back("compile", why, "set speed.compile: null")
    if say is not None:
        for why, count in made.refused.items():
            say(f"speed: {count} layers are computed plainly, not in few passes: {why}")
        if line := _told(made):
            say(line)
    return made


def _on_a_processor(plan: PlacementPlan) -> bool:
    return plan.kind == "cpu" and plan.strategy in ("single", "data_parallel") and not shapes_only()


def _room_beside(plan: PlacementPlan) -> float:
    """Bytes that copies of frozen weights may take."""
    share = plan.memory.get(plan.device)
    return 0.0 if share is None else max(0.0, share.capacity - share.needed) * _ROOM_FOR_COPIES


def lengths_differ(rows: Any) -> bool:
    """Whether rows are of several lengths, as far as some of them tell; so they are where nothing can be told."""
    if not isinstance(rows, Sequence) and not hasattr(rows, "__getitem__"):
        return True
    lengths = set()
    for index in range(min(len(rows), _LOOKED_AT)):
        row = rows[index]
        ids = row.get("input_ids") if isinstance(row, Mapping) else None
        if ids is None:
            return True
        lengths.add(len(ids))
    return len(lengths) != 1


def _told(made: Fast) -> str:
    parts = []
    if count := made.counts.get("adapters"):
        parts.append(f"{count} fused adapters")
    if count := made.counts.get("whole_layers"):
        parts.append(f"{count} layers in few passes")
    if count := made.counts.get("kernels"):
        parts.append(f"{count} MLPs by Triton")
    if count := made.counts.get("four_bit"):
        parts.append(f"{count} four-bit weights unpacked by Triton")
    if made.blocks is not None and made.blocks.layers:
        parts.append(f"{made.blocks.layers} layers to be compiled in the first step")
    return f"speed: {', '.join(parts)}" if parts else ""
