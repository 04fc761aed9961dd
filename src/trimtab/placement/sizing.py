"""Answers whether a model fits on the devices there are, with the figures behind the answer.

They are estimates, but for what was executed and handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab.errors import NoRoomError, RequestError
from trimtab.hardware import Hardware
from trimtab.placement.balance import balanced_map
from trimtab.placement.plan import MemoryShare, Precision
from trimtab.placement.profile import CUDA_CONTEXT_BYTES, ModelProfile, Workload

GIB = 2**30


class PlacementError(RequestError):
    """A placement that was asked for cannot be had on this machine."""


class DoesNotFit(PlacementError, NoRoomError):
    """The plan's devices have too little memory."""


@dataclass(frozen=True)
class Sizing:
    """One model and its work, held against the hardware. Without a profile everything is taken to fit."""

    profile: ModelProfile | None
    work: Workload
    weights: Precision
    compute: Precision
    hardware: Hardware
    local_processes: int = 1
    """How many processes of the run share this machine's memory."""
    alone: MemoryShare | None = None
    """What the whole model needs on one GPU, where a step was executed to know it."""
    refuses: bool = True
    """Whether an estimate is enough to refuse a plan; not where the plan is executed before it counts."""

    def share(self, device: str, shards: int = 1) -> MemoryShare:
        """What the whole model, or one of its shards, needs on a device."""
        assert self.profile is not None
        gpu, cuda = self.hardware.get(device), device.startswith("cuda")
        if self.alone is not None and gpu is not None and cuda and shards == 1:
            return replace(self.alone, capacity=gpu.free_bytes)
        return self.profile.share(
            self.profile.parts,
            self.weights,
            self.compute,
            self.work,
            capacity=gpu.free_bytes if gpu else self.hardware.cpu.free_bytes // self.local_processes,
            overhead=CUDA_CONTEXT_BYTES if cuda else 0,
            # vLLM takes its share of the whole device, whatever is free.
            reserved=int(self.work.reserved_share * gpu.total_bytes) if gpu and cuda else 0,
            shards=shards,
        )

    def fits(self, device: str) -> bool:
        return self.profile is None or self.share(device).fits

    def fits_when_empty(self) -> bool:
        """Whether each GPU would be large enough if nothing else used it.

        The processes of one launch decide each for itself; free memory differs from one to the next, size does not.
        """
        if self.profile is None:
            return True
        needed = self.share(self.hardware.gpus[0].name).needed
        return all(needed <= gpu.total_bytes for gpu in self.hardware.gpus)

    def shares(self, devices: Iterable[str], shards: int = 1) -> dict[str, MemoryShare]:
        """The share of each device; an error when a GPU is too small for its own."""
        if self.profile is None:
            return {}
        memory = {device: self.share(device, shards) for device in devices}
        for device, share in memory.items():
            if device.startswith("cuda") and not share.fits and self.refuses:
                raise self.too_large(device, share)
        return memory

    def split(self, primary: str) -> tuple[dict[str, str], dict[str, MemoryShare]]:
        """The device map over all GPUs and what each then holds."""
        gpus = self.hardware.gpus
        if self.profile is None or not self.profile.layers:
            raise PlacementError.of(
                "model_parallel=true for a model without a known stack of layers",
                "a split gives whole layers to each GPU, and none were found"
                if self.profile
                else "a split is made from the model's profile, and none was given",
                "set model_parallel=false"
                if self.profile
                else "pass profile=profile_model(model) to resolve",
            )
        device_map, memory = balanced_map(
            self.profile,
            primary,
            {gpu.name: gpu.free_bytes for gpu in gpus},
            self.weights,
            self.compute,
            self.work,
        )
        crowded = {device: share for device, share in memory.items() if not share.fits}
        if crowded and self.refuses:
            device, share = max(crowded.items(), key=lambda item: item[1].needed - item[1].capacity)
            raise DoesNotFit.of(
                f"the model does not fit even when split over {len(gpus)} GPUs",
                f"{figures(device, share)}; embeddings lie on {primary}, a tied head beside them",
                f"{self._smaller}; or use sharding=true, or more or larger GPUs",
            )
        if len(set(device_map.values())) < 2:
            raise PlacementError.of(
                f"model_parallel=true, but only {primary} would hold anything",
                "the other GPUs have no room for a single layer",
                "free memory on them, or set model_parallel=false",
            )
        return device_map, memory

    @property
    def _smaller(self) -> str:
        return "; ".join(self._ways())

    def _ways(self, *, stands: bool = False) -> list[str]:
        """What to change. `stands`: what is there however few rows a pass has is too much by itself."""
        roomy = None if self.hardware.launcher.multi_process else self._roomy()
        elsewhere = f"set device={roomy}, which has room for the whole model" if roomy else ""
        beside = "lower grpo.vllm_memory or set grpo.vllm_mode=server" if self.work.reserved_share else ""
        return [way for way in (elsewhere, beside, self._less(stands=stands)) if way]

    def _less(self, device: str = "cuda", *, stands: bool = False) -> str:
        """What makes a run smaller that is not done yet, and can be had on the device."""
        profile = self.profile
        frozen = profile is not None and profile.trainable < profile.parameters
        ways = [] if stands else ways_down(self.work)
        if not frozen and self.work.training:
            ways.append("use method=lora")
        elif self.weights == "fp32":
            halved = "the frozen weights" if frozen else "the weights"
            ways.append(f"use precision=bf16 or fp16, which halves {halved}")
        if frozen and profile is not None and self.work.training and not profile.four_bit and device != "mps":
            ways.append("set model.quantize=nf4, which holds the frozen weights in four bits")
        return one_of(ways) if ways else ""

    def _roomy(self) -> str | None:
        """A GPU on which the whole model fits, as where another program has filled the first one."""
        return next((gpu.name for gpu in self.hardware.gpus if self.fits(gpu.name)), None)

    def misfit(self, device: str) -> str:
        return "one GPU is too small: " + figures(device, self.share(device))

    def too_large(self, device: str, share: MemoryShare | None = None) -> PlacementError:
        share = share or self.share(device)
        standing = share.weights + share.gradients + share.optimizer
        stands = standing + share.overhead > share.capacity
        why = (
            f": {standing / GIB:.1f} GiB of it, however short the rows, for weights, gradients and optimizer"
        )
        ways = self._ways(stands=stands)
        more = "or use more" if ways else "use more"
        return DoesNotFit.of(
            f"the model does not fit on {device}",
            figures(device, share) + (why if stands else rows_told(self.work, share)),
            f"{'; '.join([*ways, more])} or larger GPUs (device=cuda takes all that are visible when "
            "model_parallel, sharding and processes are left out); `trimtab fit` looks for what fits",
        )

    def tight_note(self, device: str) -> str | None:
        """CPU and Apple GPU can borrow memory from the disk, so there a lack is told, not refused."""
        if device.startswith("cuda") or self.fits(device):
            return None
        return f"{figures(device, self.share(device))}: it may swap, or be ended by the system; {self._less(device)}"


def ways_down(work: Workload) -> list[str]:
    """What makes a pass smaller that is not done yet, whatever the model."""
    ways = [
        "lower training.batch_size or data.max_length" if work.batch_size > 1 else "lower data.max_length"
    ]
    if work.training and not work.gradient_checkpointing:
        ways.append("set training.gradient_checkpointing=true")
    return ways


def one_of(ways: list[str]) -> str:
    """`a`, or `a, b, or c`."""
    return ways[0] if len(ways) == 1 else ", ".join(ways[:-1]) + f", or {ways[-1]}"


def rows_told(work: Workload, share: MemoryShare) -> str:
    """What the executed rows were, behind what a device needs for them."""
    return f", with {work.batch_size:,} × {work.max_length:,} tokens at once" if share.executed else ""


def figures(device: str, share: MemoryShare) -> str:
    """What a device needs and has, and how it is known."""
    vllm = f", {share.reserved / GIB:.1f} GiB of it for vLLM (grpo.vllm_memory)" if share.reserved else ""
    found = (
        f"needs {share.needed / GIB:.1f} GiB (executed on virtual GPUs{vllm})"
        if share.executed
        else f"would need about {share.needed / GIB:.1f} GiB (estimate{vllm})"
    )
    return f"{device} {found} and has {share.capacity / GIB:.1f} GiB free"
