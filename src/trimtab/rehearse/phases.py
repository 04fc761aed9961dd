"""Where a run stands while it is rehearsed: loading, its first step, those after it, evaluating, generating, saving,
resuming. Each virtual GPU's ledger is told, so that every phase has a peak of its own.

Seen from outside, in any script: by the passes of its modules, its optimizers' steps and what it calls of torch,
safetensors and transformers. It changes nothing of what the program does.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, optimizers_made, trained_by
from trimtab.virtual import imports, state

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process

_CACHE = re.compile(r"past|cache|mems", re.IGNORECASE)
_SAVING = {
    "safetensors.torch": [("", "save_file"), ("", "save_model")],
    "transformers.modeling_utils": [("PreTrainedModel", "save_pretrained")],
    "transformers.trainer": [("Trainer", "save_model"), ("Trainer", "_save_checkpoint")],
    "peft.peft_model": [("PeftModel", "save_pretrained")],
    "torch.distributed.checkpoint": [("", "save")],
    "torch.distributed.checkpoint.state_dict_saver": [("", "save")],
    "torch.distributed.checkpoint.state_dict": [
        ("", name) for name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict")
    ],
}
"""What writes weights, by the module that brings it."""
_RESUMING = {
    "torch.distributed.checkpoint": [("", "load")],
    "torch.distributed.checkpoint.state_dict_loader": [("", "load")],
    "torch.distributed.checkpoint.state_dict": [
        ("", name) for name in ("set_state_dict", "set_model_state_dict", "set_optimizer_state_dict")
    ],
}
"""What reads weights back, where there is an optimizer."""
_GENERATING = {"transformers.generation.utils": [("GenerationMixin", "generate")]}
_STEPPING = {"trimtab.zeroth.optimizer": [("ZerothOrder", "step")]}
"""Steps that no optimizer of torch makes."""


class Phases(BaseCheck):
    """Follows the phase of the run in this process."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._now = "load"
        self._deeds = 0
        """How many calls are open that are a phase of their own (generate, save)."""
        self._between = True
        """Whether no step is under way: none has begun, or an optimizer has made its own."""
        self._steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._stepped_before = False
        """Whether a step was made in this process, by an optimizer that may be gone."""
        self._local = threading.local()
        self.ran: WeakSet[nn.Module] = WeakSet()
        """The modules that the program itself has called."""

    def install(self) -> None:
        self._made = optimizers_made()
        hooks = nn.modules.module
        hooks.register_module_forward_pre_hook(self._entered)
        hooks.register_module_forward_hook(self._left, always_call=True)
        backward_hub().before.append(self._backward)
        register_optimizer_step_post_hook(self._stepped)
        around(torch, "save", self._deed("save"))
        around(torch, "load", self._loading)
        around(torch.optim.Optimizer, "load_state_dict", self._resuming)
        machine = state.machine()
        assert machine is not None
        self._machine = machine
        listened: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {}
        for table, call in (
            (_SAVING, self._deed("save")),
            (_RESUMING, self._loading),
            (_GENERATING, self._deed("generate")),
            (_STEPPING, self._one_step),
        ):
            for module, names in table.items():
                listened.setdefault(module, []).extend((owner, name, call) for owner, name in names)
        imports.when_imported(
            machine, machine.undo, {name: _listening(name, calls) for name, calls in listened.items()}
        )

    @property
    def in_a_pass(self) -> bool:
        """Whether a module is under way in this thread."""
        return getattr(self._local, "depth", 0) > 0

    def _begin(self, phase: str) -> None:
        self._now = phase
        for device in self._machine.devices:
            device.ledger.begin(phase)

    @contextmanager
    def _within(self, phase: str) -> Iterator[None]:
        before = self._now
        self._begin(phase)
        self._deeds += 1
        try:
            yield
        finally:
            self._deeds -= 1
            # Between steps what it has left behind is still its own, until a pass begins something else.
            if self._deeds or not self._between or before == "load":
                self._begin(before)

    def _deed(self, phase: str) -> Callable[..., Any]:
        def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self._within(phase):
                return real(*args, **kwargs)

        return call

    def _loading(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A file that is read when an optimizer is there is that of a run that goes on."""
        if not self._made or not self._between:
            return real(*args, **kwargs)
        with self._within("resume"):
            return real(*args, **kwargs)

    def _resuming(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """An optimizer is given the state of an earlier run; a library that moves it gives it back its own, empty."""
        kept = args[0] if args else kwargs.get("state_dict")
        if not isinstance(kept, Mapping) or not kept.get("state"):
            return real(optimizer, *args, **kwargs)
        with self._within("resume"):
            result = real(optimizer, *args, **kwargs)
        # Its state is there: the step that makes one has been made, by the optimizer whose state it was.
        if self._stepped_before:
            self._steps.setdefault(optimizer, 2)
        return result

    def _one_step(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of an optimizer that makes its passes itself, without gradients."""
        with self._within(self._step_phase()):
            result = real(optimizer, *args, **kwargs)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        return result

    def _step_phase(self) -> str:
        """The first step is made when every optimizer has made one; or one its second, where others never do."""
        most = max(self._steps.values(), default=0)
        waiting = [one for one in self._made if one not in self._steps and trained_by(one)]
        return "first step" if most == 0 or (most == 1 and waiting) else "steady step"

    def _entered(self, module: nn.Module, _: Any) -> None:
        depth = getattr(self._local, "depth", 0)
        self._local.depth = depth + 1
        # A pass that a backward pass makes again (checkpointing) belongs to it.
        if depth or torch._C._current_graph_task_id() != -1:
            return
        self.ran.add(module)
        if not self._deeds:
            self._begin(self._of_pass(module))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._local.depth = max(0, getattr(self._local, "depth", 1) - 1)
        if not self._local.depth:
            self.process.memory()  # a run that only generates may be ended without a word

    def _of_pass(self, module: nn.Module) -> str:
        """The phase that the pass of an outermost module belongs to."""
        if not torch.is_grad_enabled() and _has_cache(module):
            return "generate"
        if not any(p.requires_grad for p in module.parameters()):
            return self._now  # a teacher, a loss, what prepares a row: it works for the others
        if torch.is_grad_enabled():
            self._between = False
            return self._step_phase()
        if not self._between:
            return self._now
        # A policy in training mode reads again what it has generated: that is the step's.
        return self._step_phase() if module.training and self._now == "generate" else "evaluate"

    def _backward(self, *_: Any) -> None:
        self._between = False
        if not self._deeds:
            self._begin(self._step_phase())

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._between, self._stepped_before = True, True


def _listening(module: str, calls: list[tuple[str, str, Callable[..., Any]]]) -> imports.Setting:
    def put_in(_: Any) -> None:
        for owner, name, call in calls:
            holder = getattr(sys.modules[module], owner) if owner else sys.modules[module]
            if hasattr(holder, name):
                around(holder, name, call, whose="Phases")

    return put_in


def _has_cache(module: nn.Module) -> bool:
    """Whether a module's call is handed what was computed for earlier tokens."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not module:
        return False
    given = frame.f_locals.get("kwargs", {})
    return any(_CACHE.search(name) and _is_cache(value) for name, value in given.items())


def _is_cache(value: Any) -> bool:
    """A container with tensors in it, or an object that says how many tokens it has seen."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(part, torch.Tensor) or _is_cache(part) for part in value)
    seen = getattr(value, "get_seq_length", None)
    return callable(seen) and bool(seen())
