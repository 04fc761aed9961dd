"""Tells the ledgers what memory is for, by what torch itself says: modules that run, backward passes, optimizers.

A training step is found so: a forward pass of a module that has something to train, with gradients on; the backward
pass; the step of an optimizer. Asks nothing of a program that no rehearsal listens to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.virtual import state
from trimtab.virtual.ledger import blocks_of
from trimtab.virtual.places import ROUTE
from trimtab.virtual.state import Machine


class Teller:
    """Listens to the program for one machine's ledgers."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.part = ""
        self._stack: list[nn.Module] = []
        self._frozen: dict[int, weakref.ReferenceType[nn.Module]] = {}
        """Modules that were called with nothing to train in them, since the last step."""

    def _mark(self, part: str) -> None:
        self.part = part
        for device in self.machine.devices:
            device.ledger.mark(part)

    def moved(self, module: nn.Module) -> None:
        """A module has its parameters where it had none before: moved, or gathered from all ranks for a call."""
        for parameter in module._parameters.values():
            block = parameter.__dict__.get("_block") if parameter is not None else None
            if block is not None and block.serial not in block.device.ledger.kinds:
                block.device.ledger.tell(block, "weights")

    def before(self, module: nn.Module, inputs: Any) -> None:
        """A module is called."""
        if state.machine() is not self.machine:
            return
        remember(module)
        self.moved(module)
        if not torch.is_grad_enabled():
            return
        if self.part == "backward":
            if not self._stack:
                self._note("recompute")
        elif self.part != "forward":
            if not self._trains(module):
                return
            for device in self.machine.devices:
                if device.ledger.lap.phase == "load":
                    device.ledger.begin("first step")
            ROUTE.clear()
            self._stack.clear()
            self._mark("forward")
        self._stack.append(module)
        ROUTE.enter(module)

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module has returned, or failed."""
        if module._parameters and state.machine() is self.machine:
            # FSDP gathers the parameters of a module that it wraps after `before`, and frees them after this.
            self.moved(module)
        if self._stack:
            if self._stack[-1] is module:
                self._stack.pop()
                if self._stack:
                    ROUTE.enter(self._stack[-1])
                elif self.part == "backward":
                    self._note("recomputed")
        elif _holds_cache(output.__class__) and state.machine() is self.machine:
            _tell(_tensors(output.past_key_values, 4), "cache")

    def _note(self, name: str) -> None:
        for device in self.machine.devices:
            device.ledger.note(name)

    def _trains(self, module: nn.Module) -> bool:
        known = self._frozen.get(id(module))
        if known is not None and known() is module:
            return False
        if any(parameter.requires_grad for parameter in module.parameters()):
            return True
        self._frozen.update((id(part), weakref.ref(part)) for part in module.modules())
        return False

    def backward(self, run: Callable[[], Any]) -> Any:
        """A backward pass: what it leaves in `.grad` are gradients."""
        if state.machine() is not self.machine or torch._C._current_graph_task_id() != -1:
            return run()
        self._stack.clear()
        self._mark("backward")
        try:
            return run()
        finally:
            parameters = [p for module in tuple(self.machine.modules) for p in module._parameters.values()]
            _tell_gradients(parameters)
            self._stack.clear()
            self._mark("")

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer takes a step."""
        if state.machine() is self.machine:
            _tell_gradients(p for group in optimizer.param_groups for p in group["params"])
            self._mark("optimizer")

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has taken its step: what it keeps is its state, and a step of the training is over."""
        if state.machine() is not self.machine:
            return
        with torch._C.DisableTorchFunction():
            _tell(_tensors(list(optimizer.state.values()), 3), "optimizer")
        self._mark("")
        self._frozen.clear()
        for device in self.machine.devices:
            device.ledger.step_ends()


def remember(module: nn.Module) -> None:
    """A module was moved or called: the machine in force knows it."""
    machine = state.machine()
    # A class with an __eq__ of its own and no __hash__ cannot be kept in a set; it can be called all the same.
    if machine is not None and type(module).__hash__ is not None:
        machine.modules.add(module)


def listen(machine: Machine) -> Callable[[], None]:
    """Tell the ledgers of a machine from now on; returns the undo."""
    teller = machine.teller = Teller(machine)
    undo = ExitStack()
    for hook in (
        nn.modules.module.register_module_forward_pre_hook(teller.before),
        nn.modules.module.register_module_forward_hook(teller.after, always_call=True),
        register_optimizer_step_pre_hook(teller.before_step),
        register_optimizer_step_post_hook(teller.after_step),
    ):
        undo.callback(hook.remove)
    return undo.close


_CACHES: dict[type, bool] = {}


def _holds_cache(kind: type) -> bool:
    """Whether an output is of a class that carries a cache of keys and values, by the name that all give it."""
    known = _CACHES.get(kind)
    if known is None:
        known = _CACHES[kind] = hasattr(kind, "past_key_values")
    return known


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors in lists, dictionaries and plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        inner: Iterable[Any] = ()
        if isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, (list, tuple)):
            inner = value
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            inner = vars(value).values()
        for item in inner:
            yield from _tensors(item, depth - 1)


def _tell(tensors: Iterable[torch.Tensor], kind: str) -> None:
    for tensor in tensors:
        for block in blocks_of(tensor):
            block.device.ledger.tell(block, kind)


def _tell_gradients(parameters: Iterable[Any]) -> None:
    with torch._C.DisableTorchFunction():
        _tell([p.grad for p in parameters if p is not None and p.grad is not None], "gradients")
