"""Where a run stands while it is rehearsed: loading, its first step, those after it, evaluating, generating, saving,
resuming. Each virtual GPU's ledger is told, so that every phase has a peak of its own.

Seen from outside, in any script: by the passes of its modules, its optimizers' steps and what it calls of torch,
safetensors and transformers. It changes nothing of what the program does.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.rehearse import kinds
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
}
"""What writes weights, by the module that brings it."""
_GENERATING = {"transformers.generation.utils": [("GenerationMixin", "generate")]}
_STEPPING = {"trimtab.zeroth.optimizer": [("ZerothOrder", "step")]}
"""Steps that no optimizer of torch makes."""
_KEEPING = {"transformers.cache_utils": [("Cache", "update")]}


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
        self._told: WeakSet[nn.Module] = WeakSet()
        """Modules whose weights the ledgers know in this phase."""
        self._trained: WeakSet[nn.Module] = WeakSet()
        self._local = threading.local()

    def install(self) -> None:
        self._made = optimizers_made()
        hooks = nn.modules.module
        hooks.register_module_forward_pre_hook(self._entered)
        hooks.register_module_forward_hook(self._left, always_call=True)
        backward_hub().before.append(self._backward)
        backward_hub().after.append(self._differentiated)
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)
        around(torch, "save", self._deed("save"))
        around(torch, "load", self._loading)
        around(torch.optim.Optimizer, "load_state_dict", self._deed("resume"))
        machine = state.machine()
        assert machine is not None
        self._machine = machine
        listened: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {}
        for table, call in (
            (_SAVING, self._deed("save")),
            (_GENERATING, self._deed("generate")),
            (_STEPPING, self._one_step),
            (_KEEPING, self._kept),
        ):
            for module, names in table.items():
                listened.setdefault(module, []).extend((owner, name, call) for owner, name in names)
        imports.when_imported(
            machine, machine.undo, {name: _listening(name, calls) for name, calls in listened.items()}
        )

    def finish(self) -> None:
        """What is held at the end counts as what it is, also where no module ever ran."""
        for module in list(self._machine.modules):
            kinds.tell_weights(module)

    def _begin(self, phase: str, *, anew: bool = False) -> None:
        """From now on it is this phase; `anew` where another one of its kind begins (the next step)."""
        if phase != self._now or anew:
            self._now = phase
            self._told.clear()
            for device in self._machine.devices:
                device.ledger.begin(phase)

    def _mark(self, name: str) -> None:
        for device in self._machine.devices:
            device.ledger.mark(name)

    @contextmanager
    def _within(self, phase: str) -> Iterator[None]:
        before = self._now
        self._begin(phase)
        self._deeds += 1
        try:
            yield
        finally:
            self._deeds -= 1
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

    def _one_step(self, real: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A step of an optimizer that makes its passes itself, without gradients."""
        with self._within(self._step_phase()):
            result = real(optimizer, *args, **kwargs)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        return result

    def _kept(self, real: Callable[..., Any], cache: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(cache, *args, **kwargs)
        kinds.tell(getattr(cache, "layers", cache), "cache")
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
        if not self._deeds:
            next_step = self._between and torch.is_grad_enabled()
            self._begin(self._of_pass(module), anew=next_step)
            if torch.is_grad_enabled():
                self._mark("forward")
                self._trained.add(module)
        if module not in self._told:
            self._told.add(module)
            kinds.tell_weights(module)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._local.depth = max(0, getattr(self._local, "depth", 1) - 1)

    def _of_pass(self, module: nn.Module) -> str:
        """The phase that the pass of an outermost module belongs to."""
        if torch.is_grad_enabled():
            self._between = False
            return self._step_phase()
        cache = _cache_given(module)
        if cache is not None:
            kinds.tell(cache, "cache")
            return "generate"
        if not self._between or not any(p.requires_grad for p in module.parameters()):
            # A teacher, a reference model: it works for the step.
            return self._now
        # A policy in training mode reads again what it has generated: that is the step's.
        return self._step_phase() if module.training and self._now == "generate" else "evaluate"

    def _backward(self, *_: Any) -> None:
        if not self._deeds:
            self._begin(self._step_phase())
        self._between = False
        self._mark("backward")

    def _differentiated(self) -> None:
        for module in list(self._trained):
            kinds.tell_gradients(module.parameters())
        for optimizer in list(self._made):
            kinds.tell_gradients(trained_by(optimizer))

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        kinds.tell_gradients(trained_by(optimizer))
        if not self._deeds:
            self._begin(self._step_phase())
        self._mark("optimizer")

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        count = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._between = True
        if count <= 2 or count & (count - 1) == 0:
            kinds.tell_state(optimizer)


def _listening(module: str, calls: list[tuple[str, str, Callable[..., Any]]]) -> imports.Setting:
    def put_in(_: Any) -> None:
        for owner, name, call in calls:
            holder = getattr(sys.modules[module], owner) if owner else sys.modules[module]
            if hasattr(holder, name):
                around(holder, name, call, whose="Phases")

    return put_in


def _cache_given(module: nn.Module) -> Any:
    """What was computed for earlier tokens, where a module's call is handed it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    if frame is None or frame.f_locals.get("self") is not module:
        return None
    for name, value in frame.f_locals.get("kwargs", {}).items():
        if (
            _CACHE.search(name)
            and not isinstance(value, torch.Tensor)
            and next(kinds.tensors_in(value), None)
        ):
            return value
    return None
