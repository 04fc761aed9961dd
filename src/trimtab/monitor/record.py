"""Keeps the passes of the step that is being made, batch and loss, so that a bad one can be run once more.

References, no copies: what the trainer has moved to its device anyway lives until the verdict on its step. It changes
nothing in a pass and asks no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.placement import bare_model

KEPT_BYTES = 128 * 2**20
"""Up to so much of a step's batches is kept; of larger ones (pictures, many passes) the first are let go."""
_EXCHANGES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


@dataclass(eq=False)
class Pass:
    """One forward pass of a step."""

    inputs: Mapping[str, Any] | None
    """As the loss was computed from them; None: too large to keep."""
    items: Any
    """How many tokens the whole step trains on, where the trainer counts them."""
    rng: tuple[torch.Tensor, torch.Tensor | None]
    """The state of the random numbers before it: the CPU's, and the device's."""
    loss: torch.Tensor
    """On its device."""

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in (self.inputs or {}).values() if isinstance(value, torch.Tensor))


class Recorder:
    """Stands around a trainer's `compute_loss`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._compute_loss = trainer.compute_loss
        self.passes: list[Pass] = []
        trainer.compute_loss = self._noted

    def begin(self) -> None:
        """Another step begins."""
        self.passes = []

    def _noted(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not model.training or not isinstance(inputs, Mapping):
            return self._compute_loss(model, inputs, *args, **kwargs)
        # A shallow copy: a loss may take entries out.
        kept, rng = dict(inputs), _rng(self._trainer.args.device)
        result = self._compute_loss(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self.passes.append(Pass(kept, kwargs.get("num_items_in_batch"), rng, loss.detach()))
        held = sum(each.nbytes for each in self.passes)
        for each in self.passes:
            if held <= KEPT_BYTES:
                break
            held, each.inputs = held - each.nbytes, None
        return result

    @property
    def sharded(self) -> bool:
        """Whether no process can run the model by itself."""
        return any(hasattr(p, "to_local") for p in self._trainer.model.parameters())

    @property
    def processor(self) -> Any:
        return self._trainer.processing_class

    def model(self) -> Any:
        """Without what the trainer has wrapped around it, but for the precision that it runs in."""
        if self.sharded:
            return self._trainer.model_wrapped
        return self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

    def bare(self) -> torch.nn.Module:
        """The model by whose names modules are told."""
        return bare_model(self._trainer.model)

    def again(self, which: Pass) -> torch.Tensor:
        """Compute the loss of a kept pass once more, from the same random numbers.

        By this process alone, without a word to the others; a sharded model needs all of them to do the same.
        """
        assert which.inputs is not None
        trainer = self._trainer
        with self._alone(), torch.random.fork_rng(devices=_devices(trainer.args.device)):
            _set_rng(which.rng, trainer.args.device)
            model = self.model()
            model.train()
            with trainer.compute_loss_context_manager():
                loss: torch.Tensor = self._compute_loss(
                    model, dict(which.inputs), num_items_in_batch=which.items
                )
        return loss

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Figures that a trainer gathers over the processes stay this one's."""
        accelerator = self._trainer.accelerator
        if self.sharded or accelerator.num_processes == 1:
            yield
            return
        for name in _EXCHANGES:
            setattr(accelerator, name, lambda tensor, *args, **kwargs: tensor)
        try:
            yield
        finally:
            for name in _EXCHANGES:
                delattr(accelerator, name)


def _rng(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None


def _set_rng(rng: tuple[torch.Tensor, torch.Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(rng[0])
    if rng[1] is not None:
        torch.cuda.set_rng_state(rng[1], device)


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
