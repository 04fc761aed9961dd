"""What a trainer of Hugging Face does in every step by walking over all modules, done without the walk.

A model with adapters has thousands of modules; three walks a step (the mode, the norm, the cleared gradients) take
longer on the host than the launches of a compiled step. The results are the same. It wraps a trainer's methods while it
trains and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import DistributedType

_OWN = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.XLA)
"""Strategies that clip by ways of their own, and have parameters of their own in a model's modules."""


@contextmanager
def lean_steps(trainer: Any) -> Iterator[None]:
    """While it is open the steps of this trainer walk over no modules."""
    step, clip = trainer.training_step, getattr(trainer, "_clip_grad_norm", None)
    prepared: list[Any] = []
    trained: list[torch.nn.Parameter] = []

    def training_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not prepared:
            prepared.append(model)
            if trainer.accelerator.distributed_type not in _OWN:
                # FSDP has other parameters in its modules after an evaluation than those that are trained.
                trained.extend(p for p in model.parameters() if p.requires_grad)
            _shadow(model, trained)
        return step(model, *args, **kwargs)

    def clip_by_norm(model: Any) -> Any:
        accelerator = trainer.accelerator
        if not trained:
            assert clip is not None
            return clip(model)
        accelerator.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(trained, trainer.args.max_grad_norm)

    trainer.training_step = training_step
    if clip is not None:
        trainer._clip_grad_norm = clip_by_norm
    try:
        yield
    finally:
        trainer.training_step = step
        if clip is not None:
            trainer._clip_grad_norm = clip
        for model in prepared:
            for name in ("train", "zero_grad"):
                vars(model).pop(name, None)


def _shadow(model: Any, trained: list[torch.nn.Parameter]) -> None:
    chain = _wrapped_in(model)

    def train(mode: bool = True) -> Any:
        # Whoever generates or evaluates sets the mode of the whole model, or of what is wrapped here.
        return model if all(part.training == mode for part in chain) else type(model).train(model, mode)

    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none or not trained:
            type(model).zero_grad(model, set_to_none)
            return
        for parameter in trained:
            parameter.grad = None

    vars(model)["train"], vars(model)["zero_grad"] = train, zero_grad


def _wrapped_in(model: Any) -> list[Any]:
    """The model, and what it is wrapped around: DDP's module, PEFT's base."""
    chain = [model]
    for name in ("module", "_orig_mod", "base_model", "model"):
        inner = getattr(chain[-1], name, None)
        if isinstance(inner, torch.nn.Module) and inner is not chain[-1]:
            chain.append(inner)
    return chain
