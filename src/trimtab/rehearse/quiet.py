"""Warnings that no machine with GPUs would print: those that a rehearsal itself provokes. Each by its exact words.

Nothing else is silenced.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

_OURS = (
    # Ours are on every module; torch.compile runs the code as it is written here, so nothing fires twice.
    r"Using `torch\.compile\(module\)` when there are global hooks on modules",
)
_LOGGED = {"torch.utils.flop_counter": "triton not found; flop counting will not work for triton kernels"}
"""What a build without CUDA says of itself."""


def silence() -> None:
    """Leave out what the rehearsal provokes, in this process. To be called when torch is there."""
    from trimtab.rehearse.shield import around

    for words in _OURS:
        warnings.filterwarnings("ignore", message=words)
    for name, words in _LOGGED.items():
        logging.getLogger(name).addFilter(_Without(words))
    import torch.distributed as dist

    if dist.is_available():
        from torch.nn.parallel import DistributedDataParallel

        around(DistributedDataParallel, "__init__", _without_time_stats, whose="quiet")


class _Without(logging.Filter):
    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()


def _without_time_stats(real: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
    real(ddp, *args, **kwargs)
    if getattr(ddp, "logger", None) is not None:
        ddp.logger = _Untimed(ddp.logger)


class _Untimed:
    """DDP's log of itself, but for the times of its passes: C++ has a timer for CUDA, and warns of having none here."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def set_runtime_stats_and_log(self) -> None:
        """Nothing is timed."""
