"""A callback that gives any Hugging Face Trainer or TRL trainer the placement checks, at the first step only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from trimtab.placement.plan import PlacementPlan, Precision
from trimtab.placement.verify import (
    Check,
    PlacementFault,
    finite_check,
    is_finite,
    passed,
    same_device,
    verify,
    verify_gradients,
)


class PlacementGuard(TrainerCallback):
    """Step 0 proves it: parameters where the plan says, every trainable one in the optimizer and with a gradient.

    `Trainer(..., callbacks=[PlacementGuard(plan)])`. Without a plan, the guard holds the trainer to what it set out
    to do itself, so that it can be dropped into a script that knows nothing of Trimtab.
    """

    def __init__(self, plan: PlacementPlan | None = None, say: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.checks: list[Check] = []
        self._say = say
        self._in_force: PlacementPlan | None = None
        self._waiting = False
        self._broken: list[str] = []
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        plan = self.plan or _plan_of_trainer(args, model)
        self._in_force, self._waiting, self._broken, self.checks = plan, True, [], []
        self._remove_hooks()
        self._note(_trainer_devices(args, plan, kwargs.get("train_dataloader")))
        if plan.strategy == "sharded":
            # FSDP replaces parameters by shards of its own; the check of their gradients still holds.
            return
        self._note(verify(model, plan, kwargs.get("optimizer")))
        if not plan.scaler:
            # The trainer clips before `on_pre_optimizer_step`, and clipping spreads one NaN to every gradient.
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._look, name))
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            ]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._waiting or self._in_force is None:
            return
        self._waiting = False
        self._remove_hooks()
        if getattr(args, "deepspeed", None):
            # DeepSpeed keeps the gradients in buffers of its own.
            return
        if self._broken:
            passed([finite_check(self._broken)])
        self._note(verify_gradients(kwargs["model"], finite=not self._in_force.scaler))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove_hooks()

    def _look(self, name: str, parameter: torch.Tensor) -> None:
        if name not in self._broken and parameter.grad is not None and not is_finite(parameter.grad):
            self._broken.append(name)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note(self, checks: list[Check]) -> None:
        self.checks += checks
        if self._say is not None:
            for check in checks:
                self._say(f"✓ {check.name}: {check.detail}")


def _trainer_devices(args: Any, plan: PlacementPlan, dataloader: Any) -> list[Check]:
    """The trainer's own device, and the one that its batches go to."""
    batches = getattr(dataloader, "device", None)
    found = {"trainer device": args.device} | ({"batches": batches} if batches is not None else {})
    for what, device in found.items():
        if not same_device(device, plan.device):
            raise PlacementFault(
                f"{what}: {device}, the plan says {plan.device}; give the trainer the plan's device "
                "(trimtab.placement.prepare_process, trainer_options and bind_arguments)"
            )
    return [Check(name=what, ok=True, detail=str(device)) for what, device in found.items()]


def _plan_of_trainer(args: Any, model: Any) -> PlacementPlan:
    """A plan that says what the trainer itself set out to do."""
    placed = getattr(model, "hf_device_map", None) or {}
    device_map = {part: _device_name(device) for part, device in placed.items()}
    split = len(set(device_map.values())) > 1
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    # Training in pure bf16 is the script's choice; fp16 would break the scaler, so it stays a fault.
    bf16 = torch.bfloat16 in trained and not args.fp16
    precision: Precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    processes = int(args.world_size)
    return PlacementPlan(
        device=str(args.device),
        precision=precision,
        scaler=bool(args.fp16),
        weight_precision=precision,
        trainable_precision="bf16" if bf16 else "fp32",
        strategy="sharded"
        if args.fsdp
        else "split"
        if split
        else "data_parallel"
        if processes > 1
        else "single",
        device_map=device_map if split else None,
        processes=processes,
        reasons={"device": "chosen by the trainer"},
    )


def _device_name(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)
