"""A callback that gives any Hugging Face Trainer or TRL trainer the placement checks, at the first steps only.

What the first step cannot show yet is looked at again in the following ones: a low-rank factor whose other half started
at zero, a tower without a picture in the batch. No check talks to another process: the gradient that was reduced over
all of them is what counts, and each process of a sharded model looks at its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from trimtab.errors import some_of
from trimtab.placement.arrival import Arrival, look
from trimtab.placement.gradients import norms_of, zero_factors
from trimtab.placement.plan import PlacementPlan, Precision
from trimtab.placement.profile import bare_model
from trimtab.placement.verify import (
    Check,
    PlacementFault,
    finite_check,
    is_finite,
    passed,
    same_device,
    verify,
    verify_trained,
)

if TYPE_CHECKING:
    from trimtab.placement.witness import Witness

PATIENCE = 100
"""Optimizer steps after which nothing is waited for any longer."""


class PlacementGuard(TrainerCallback):
    """Step 0 proves it: parameters where the plan says, every trainable one in the optimizer and with a gradient.

    `Trainer(..., callbacks=[PlacementGuard(plan)])`. Without a plan, the guard holds the trainer to what it set out
    to do itself, so that it can be dropped into a script that knows nothing of Trimtab.
    """

    def __init__(self, plan: PlacementPlan | None = None, say: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.checks: list[Check] = []
        self.table: list[str] = []
        """Which adapted modules got gradients in the first step, by part of the model."""
        self._say = say
        self._in_force: PlacementPlan | None = None
        self._step: int | None = None
        """Optimizer steps that were looked at; None: there is nothing to look for any more."""
        self._broken: list[str] = []
        self._hooks: list[Any] = []
        self._witness: Witness | None = None
        self._trained: dict[str, bool] = {}
        self._last: Arrival | None = None
        self._proven: frozenset[str] = frozenset()
        """Adapted modules that a gradient has reached."""
        self._resting: list[torch.Tensor] = []
        """Factors that have to leave zero before another look shows anything new."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        plan = self.plan or _plan_of_trainer(args, model)
        self._in_force, self._step, self._broken, self.checks, self.table = plan, 0, [], [], []
        self._last, self._proven, self._resting = None, frozenset(), []
        self._remove_hooks()
        self._note(_trainer_devices(args, plan, kwargs.get("train_dataloader")))
        self._trained = {name: p.requires_grad for name, p in model.named_parameters()}
        if not getattr(args, "torch_compile", False):
            from trimtab.placement.witness import Witness

            # A compiled model would be compiled with the hooks, and again without them.
            self._witness = Witness(bare_model(model))
        if plan.strategy == "sharded":
            # FSDP replaces parameters by shards of its own; what is checked of their gradients still holds.
            if kwargs.get("optimizer") is not None:
                self._note(verify_trained(model, kwargs["optimizer"]))
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
        if self._step is None or self._in_force is None:
            return
        self._step += 1
        first, model = self._step == 1, kwargs["model"]
        if getattr(args, "deepspeed", None):
            # DeepSpeed keeps the gradients in buffers of its own.
            self._done()
            return
        if self._broken and first:
            self._remove_hooks()
            passed([finite_check(self._broken)])
        self._remove_finite_hooks()
        if self._resting and self._step < PATIENCE and not any(norms_of([*self._resting])):
            return
        self._check_unflipped(model)
        finite = first and not self._in_force.scaler
        found = look(model, finite=finite, witness=self._witness, proven=self._proven)
        self._proven |= found.reached
        if first:
            self._note(found.checks)
            self.table = found.table
            self._tell(f"  {line}" for line in found.table)
        self._go_on(found, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step and self._last is not None and self._last.waiting:
            self._give_up(self._last)
        self._done()

    def _go_on(self, found: Arrival, model: Any) -> None:
        """Leave off when all has been seen; otherwise take along what the next step has to show."""
        before, self._last = self._last, found
        if not found.waiting and not found.idle:
            if before is not None:
                self._note(
                    [Check("gradients later", True, f"{_outstanding(before)} arrived, step {self._step}")]
                )
            self._done()
        elif self._step == PATIENCE:
            self._give_up(found)
            self._done()
        elif self._witness is not None and (found.waiting or self._witness.expects_media):
            # Also where only factors are waited for: text may follow on the first picture before they have moved.
            self._witness.forget()
        else:
            self._remove_hooks()
            # Where all that is missing are factors beside others at zero, steps change nothing until one has moved.
            self._resting = [] if found.waiting else zero_factors(model)

    def _give_up(self, found: Arrival) -> None:
        what = f"after {self._step} steps not seen yet: {_outstanding(found)}"
        self.checks.append(Check("gradients later", None, what))
        self._tell([f"! gradients later: {what}"])

    def _check_unflipped(self, model: Any) -> None:
        """`requires_grad` must not change after wrapping: DDP and the optimizer know the tensors as they were."""
        now = {name: p.requires_grad for name, p in model.named_parameters()}
        flipped = [
            f"{name} is now {'trained' if now[name] else 'frozen'}"
            for name, was in self._trained.items()
            if now.get(name, was) != was
        ]
        if flipped:
            detail = (
                f"changed for {len(flipped)} tensors after training began: {some_of(flipped)}; DDP and the optimizer "
                "were made for the tensors as they were: freeze first, then add adapters, then wrap"
            )
            passed([Check("requires_grad", False, detail)])

    def _look(self, name: str, parameter: torch.Tensor) -> None:
        if name not in self._broken and parameter.grad is not None and not is_finite(parameter.grad):
            self._broken.append(name)

    def _done(self) -> None:
        self._step = None
        self._remove_hooks()

    def _remove_finite_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _remove_hooks(self) -> None:
        self._remove_finite_hooks()
        if self._witness is not None:
            self._witness.remove()
            self._witness = None

    def _note(self, checks: list[Check]) -> None:
        self.checks += checks
        self._tell(f"{'✓' if check.ok else '!'} {check.name}: {check.detail}" for check in checks)

    def _tell(self, lines: Iterable[str]) -> None:
        if self._say is not None:
            for line in lines:
                self._say(line)


def _outstanding(found: Arrival) -> str:
    """In words, what a step could not show."""
    told = [f"{found.idle} low-rank factors (lora_A, while lora_B is zero)"] if found.idle else []
    for what in dict.fromkeys(found.waiting.values()):
        modules = [name for name, waited in found.waiting.items() if waited == what]
        told.append(f"{some_of(modules, 1)} ({what})")
    return " and ".join(told)


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
