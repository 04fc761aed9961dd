"""When the steps of a trainer begin, for the benchmarks that time one. It measures nothing else."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import TrainerCallback


class Timer(TrainerCallback):
    """When each step began, with the GPU's work done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.times = device, list[float]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._now()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._now()

    def _now(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
