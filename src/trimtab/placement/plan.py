"""The placement plan: where every tensor lives and in which precision, each decision with its reason.

A plan is resolved once (`resolve.py`), never changed, saved as plan.json, and read by everything that places a
tensor. This file only describes it; it looks at no hardware and imports no torch until a dtype is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trimtab.files import write_whole

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["single", "split", "data_parallel", "sharded"]


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """What the user asked for; the three-valued settings stay three-valued."""

    device: str = "auto"
    precision: str = "auto"
    model_parallel: bool | None = None
    sharding: bool | None = None
    processes: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryShare:
    """What one device has to hold, in bytes: estimated by a formula or executed, and told so where it is shown."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cache: int = 0
    """Keys and values while generating. They are gone when activations come, so the larger of the two counts."""
    overhead: int = 0
    other: int = 0
    """Executed alone: what kernels and libraries took for themselves when the device was fullest."""
    pool: int = 0
    """Executed alone: what torch's allocator held beyond what was allocated at once."""
    reserved: int = 0
    """What an engine beside the training takes for itself: vLLM's share (GRPO)."""
    capacity: int = 0
    executed: bool = False
    """Whether a step was executed to know it."""

    @property
    def allocated(self) -> int:
        """Of all tensors at once."""
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.cache) + self.other

    @property
    def needed(self) -> int:
        return self.allocated + self.pool + self.overhead + self.reserved

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Which of the faster ways to compute a step are used; why, the plan's reasons tell by `speed.PART`."""

    adapters: Literal["fused", "plain"] = "plain"
    head: Literal["chunked", "plain"] = "plain"
    compile: bool = False
    padding: Literal["none", "padded"] = "padded"
    kernels: Literal["triton", "plain"] = "plain"
    activation_memory_budget: float | None = None
    demanded: tuple[str, ...] = ()
    """The parts that were asked for by name: where the model cannot have one, that is an error, no fall-back."""


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """One run's placement, whole."""

    device: str
    """The primary device: inputs, labels, loss and metrics meet here. Under data parallelism, this rank's own."""
    precision: Precision
    scaler: bool
    """Whether gradients are scaled: with fp16 alone."""
    weight_precision: Precision
    """Number format in which frozen weights are held."""
    strategy: Strategy
    trainable_precision: Precision = "fp32"
    """Number format of trainable weights: fp32 in every plan that is resolved; a guard without a plan takes over
    what it finds."""
    device_map: Mapping[str, str] | None = None
    """Module name to device, for a split model."""
    processes: int = 1
    unused_parameters: bool = False
    """Whether DDP looks, in every step, for trained tensors that the step left out."""
    launcher: str = "none"
    memory: Mapping[str, MemoryShare] = field(default_factory=dict)
    speed: Speed = field(default_factory=Speed)
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why each decision was taken, by the name of the decision."""
    notes: tuple[str, ...] = ()
    """Things found on the way that the user should know, such as stale launcher variables."""

    @property
    def kind(self) -> str:
        return self.device.split(":")[0]

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that this process uses, the primary one first."""
        return tuple(dict.fromkeys([self.device, *(self.device_map or {}).values()]))

    @property
    def starts_launcher(self) -> bool:
        """Whether this process has to start torchrun, rather than train itself."""
        return self.processes > 1 and self.launcher == "none"

    @property
    def torch_weight_dtype(self) -> torch.dtype:
        return _torch_dtype(self.weight_precision)

    @property
    def torch_dtype(self) -> torch.dtype:
        return _torch_dtype(self.precision)

    @property
    def load_device(self) -> str:
        """Where an unsplit model is loaded: FSDP takes its shards from a copy on the CPU, all else stays put."""
        return "cpu" if self.strategy == "sharded" else self.device

    def load_device_map(self) -> dict[str, str]:
        """What `from_pretrained(device_map=…)` gets: weights go straight to their device."""
        return dict(self.device_map or {"": self.load_device})

    def device_of(self, parameter: str) -> str:
        """The device on which the plan computes with a parameter or buffer, by its full name."""
        if not self.device_map:
            return self.device
        owners = [p for p in self.device_map if p in ("", parameter) or parameter.startswith(p + ".")]
        return self.device_map[max(owners, key=len)] if owners else self.device

    def as_dict(self) -> dict[str, Any]:
        data = asdict(self)
        for device, share in self.memory.items():
            data["memory"][device] |= {"needed": share.needed, "allocated": share.allocated}
        data["notes"] = list(self.notes)
        data["speed"]["demanded"] = list(self.speed.demanded)
        return data

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.as_dict(), indent=2) + "\n")


def _torch_dtype(precision: Precision) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
