"""The latest figures of a run: what its trainer logged, beside what is measured here. Shows and writes nothing."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from trimtab.gpu_models import peak_flops
from trimtab.monitor.memory import MemoryMeter, gpu_busy_share
from trimtab.monitor.pace import Pace
from trimtab.monitor.progress import Figures
from trimtab.virtual.state import machine


class Readings:
    """What was read last; a figure that was never logged is None."""

    def __init__(self, device: str, devices: Sequence[str] = ()) -> None:
        """`devices` are all that the process uses, where a model is split over several."""
        self.device = device
        self._meters = {name: MemoryMeter(name) for name in dict.fromkeys((device, *devices))}
        self._busy: dict[str, tuple[float, float | None]] = {}
        # On GPUs processes that exchange objects wait for their devices: not in every log.
        self._apart = 16 if torch.device(device).type == "cuda" else 1
        self._logs = 0
        self.begin()

    def begin(self) -> None:
        """A training begins: what an earlier one logged is past."""
        self._latest = Figures(0, 0, 0.0)
        self.first_loss: float | None = None
        self.skipped = 0
        """Steps that an fp16 gradient scaler has skipped."""

    @property
    def timed(self) -> bool:
        """Whether the time that a step takes says anything: on a virtual GPU this machine's processor takes it."""
        return torch.device(self.device).type != "cuda" or machine() is None

    @property
    def computed(self) -> bool:
        """Whether figures of a step are: where shapes alone are rehearsed, all of them stand for others."""
        return (rehearsed := machine()) is None or not rehearsed.shapes

    @property
    def loss(self) -> float | None:
        return self._latest.loss

    @property
    def learning_rate(self) -> float | None:
        return self._latest.learning_rate

    @property
    def peak_memory(self) -> int:
        return self._meters[self.device].read().peak

    def note(self, values: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
        """Take over the figures that are shown, and `more`: a recipe's own, as they are shown."""
        known = {k: values[k] for k in ("loss", "learning_rate", "grad_norm") if values.get(k) is not None}
        if values.get("reward") is not None:
            more = (f"reward {values['reward']:.3g}", *more)
        self._latest = replace(self._latest, **known, more=more or self._latest.more)
        if self.first_loss is None:
            self.first_loss = self.loss

    def take_in(
        self,
        values: dict[str, Any],
        tokens: int | None,
        pace: Pace,
        *,
        processes: int = 1,
        flops: float | None = None,
    ) -> None:
        """Take the figures over from a log of the trainer, and add our own to it. `tokens` counts from the start,
        `flops`, of this process alone, from that of this training.

        Of several `processes` every one has to call it: each reads the device that it uses, and all get all.
        """
        self.note(values)
        pace.touch()
        pace.logged(tokens, flops)
        memory = self._meters[self.device].read()
        self._latest = replace(self._latest, memory=memory.now)
        own: dict[str, float | None] = {
            **self._speed(pace),
            "memory_bytes": memory.now,
            "peak_memory_bytes": memory.peak,
            "peak_reserved_bytes": memory.reserved,
            "elapsed_seconds": round(pace.elapsed, 3),
        }
        if len(self._meters) == 1:
            own["busy"] = self._busy_share(self.device)
        if len(self._meters) > 1 or (processes > 1 and self._logs % self._apart == 0):
            own |= self._of_each_device(processes)
        self._logs += 1
        values.update((key, value) for key, value in own.items() if value is not None)

    def _speed(self, pace: Pace) -> dict[str, float | None]:
        if not self.timed:
            return {}
        return {
            "steps_per_second": pace.steps_per_second,
            "tokens_per_second": pace.tokens_per_second,
            "mfu": self._utilisation(pace),
        }

    def _busy_share(self, device: str) -> float | None:
        """The driver takes a moment for it: asked once in a second."""
        if not self.timed:
            return None
        asked, share = self._busy.get(device, (-math.inf, None))
        if time.monotonic() - asked >= 1.0:
            share = gpu_busy_share(device)
            self._busy[device] = (time.monotonic(), share)
        return share

    def _utilisation(self, pace: Pace) -> float | None:
        """Which share of its GPU's highest rate this process's model needed; None where that is not known."""
        if pace.flops_per_second is None or self._peak is None or len(self._meters) > 1:
            return None
        return round(pace.flops_per_second / self._peak, 4)

    @cached_property
    def _peak(self) -> float | None:
        device = torch.device(self.device)
        return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def _of_each_device(self, processes: int) -> dict[str, float | None]:
        """Memory and busy share by device, where there are several."""
        mine = [(name, meter.read(), self._busy_share(name)) for name, meter in self._meters.items()]
        everywhere = [mine]
        if processes > 1:
            everywhere = [[] for _ in range(processes)]
            dist.all_gather_object(everywhere, mine)
        count = Counter(name for part in everywhere for name, _, _ in part)
        found: dict[str, float | None] = {}
        for rank, part in enumerate(everywhere):
            for device, memory, busy in part:
                # On the CPU, and on several machines, processes use devices of one name.
                name = device if count[device] == 1 else f"{device}, rank {rank}"
                found |= {f"memory_bytes/{name}": memory.now, f"peak_memory_bytes/{name}": memory.peak}
                found[f"busy/{name}"] = busy
        return found

    def figures(self, pace: Pace) -> Figures:
        """For the display."""
        shown = replace(
            self._latest, step=pace.step, total=pace.total, elapsed=pace.elapsed, skipped=self.skipped
        )
        if not self.timed:
            return shown
        return replace(
            shown,
            left=pace.left,
            tokens_per_second=pace.tokens_per_second,
            utilisation=self._utilisation(pace),
            steps_per_second=pace.steps_per_second,
        )
