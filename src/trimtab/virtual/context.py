"""Puts a machine in force and takes it out again, leaving nothing behind.

`with virtual_gpus(2):` for a block; `install()` and `uninstall()` for a whole process. Contexts nest: the inner
machine replaces the outer one until it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.virtual import (
    amp,
    authors,
    bootstrap,
    compiled,
    ctypes_libraries,
    cuda,
    deeds,
    dispatch,
    extents,
    flex,
    foreach,
    from_data,
    functions,
    fused,
    generators,
    held_modes,
    hollow_files,
    kinds,
    legacy,
    processes,
    ranks,
    recurrent,
    scripted,
    serialization,
    sharing,
    state,
    threads,
    triton_kernels,
    unknown,
)
from trimtab.virtual.assignment import materialize
from trimtab.virtual.imports import when_imported
from trimtab.virtual.memory import parse_bytes
from trimtab.virtual.observer import Observer
from trimtab.virtual.state import Machine, OnFault, Patch
from trimtab.virtual.tensor import PARAMETERS, VIRTUAL, of_own_class, own_class

Settings = ParamSpec("Settings")

# Each has patches(machine) -> list of (object, attribute name, replacement).
_PATCHING = (
    amp,
    authors,
    compiled,
    cuda,
    foreach,
    legacy,
    generators,
    hollow_files,
    processes,
    ranks,
    scripted,
    serialization,
    threads,
)


def install(
    count: int = 2,
    *,
    memory: str | int = "80GiB",
    name: str = "NVIDIA H100 80GB HBM3",
    capability: tuple[int, int] = (9, 0),
    observer: Observer | None = None,
    on_fault: OnFault = "raise",
    shapes: bool = False,
    every_rank: bool = False,
) -> Machine:
    """Put a machine in force for this process, until `uninstall`.

    `shapes`: big tensors have a shape and no values, and take no memory of this machine. One rank then stands for all
    that its process groups name, or with `every_rank` meets the others, which are processes of their own.
    """
    if count < 0:
        raise ValueError(f"the number of virtual GPUs cannot be negative, got {count}")
    if on_fault not in ("raise", "repair"):
        raise ValueError(f"on_fault is 'raise' or 'repair', got {on_fault!r}")
    machine = Machine(
        count,
        total_bytes=parse_bytes(memory),
        name=name,
        capability=capability,
        observer=observer,
        on_fault=on_fault,
        shapes=shapes,
        every_rank=every_rank,
    )
    with ExitStack() as undo:
        state._stack.append(machine)
        undo.callback(state._stack.pop)
        for patches in (*(part.patches for part in _PATCHING), _own_patches):
            for patch in patches(machine):
                state.replace(undo, *patch)
        undo.callback(processes.enter(machine))
        undo.callback(sharing.enter())
        undo.callback(extents.enter())
        if shapes and not any(outer.shapes for outer in state._stack[:-1]):
            undo.callback(amp.enter_on_host())
        if len(state._stack) == 1:
            undo.callback(amp.enter())
            held_modes.enter(undo)
            undo.enter_context(dispatch.VirtualMode())
            undo.enter_context(functions.MODE)
            settings = {
                "triton": triton_kernels.set_in_triton,
                "bitsandbytes.cuda_specs": ctypes_libraries.set_in_its_specs,
                "bitsandbytes.cextension": ctypes_libraries.set_in_bitsandbytes,
                "bitsandbytes.functional": ctypes_libraries.set_in_its_functions,
            }
            when_imported(machine, undo, settings)
        hollow_files.keep_out_of_files(machine, undo)
        if "torch._dynamo" in sys.modules:
            undo.enter_context(sys.modules["torch._dynamo"].config.patch(disable=True))
        if observer is not None:
            undo.callback(kinds.listen(machine))
            undo.callback(deeds.listen())
        machine.undo = undo.pop_all()
    return machine


def uninstall() -> None:
    """Take the innermost machine out of force and put everything back as it was."""
    machine = state.machine()
    if machine is None:
        raise RuntimeError("no virtual machine is in force")
    machine.undo.close()


def _for_a_block(
    installing: Callable[Settings, Machine],
) -> Callable[Settings, AbstractContextManager[Machine]]:
    @contextmanager
    @wraps(installing, assigned=())
    def virtual_gpus(*args: Settings.args, **kwargs: Settings.kwargs) -> Iterator[Machine]:
        """Run a block on virtual GPUs: `torch.cuda` is there, tensors hold real values, CUDA's placement rules hold."""
        machine = installing(*args, **kwargs)
        try:
            yield machine
        finally:
            uninstall()

    return virtual_gpus


virtual_gpus = _for_a_block(install)


def install_from_environment() -> None:
    """Called in a child process when torch has been imported: the machine that bootstrap.py described."""
    text = os.environ.get(bootstrap.VARIABLE)
    if not text:
        return
    wanted = json.loads(text)
    processes.hide_real_gpus()
    machine = install(
        wanted["count"],
        memory=wanted["memory"],
        name=wanted["name"],
        capability=tuple(wanted["capability"]),
        on_fault=wanted["on_fault"],
        shapes=wanted.get("shapes", False),
        every_rank=wanted.get("every_rank", False),
    )
    machine.visible_at_install = wanted["visible_at_install"]
    if wanted.get("setup"):
        module, function = wanted["setup"].split(":")
        getattr(importlib.import_module(module), function)(machine)


def _own_patches(machine: Machine) -> list[Patch]:
    return [
        # A rehearsal adds to them.
        (
            functions,
            "HANDLERS",
            functions.HANDLERS
            | from_data.HANDLERS
            | flex.HANDLERS
            | fused.HANDLERS
            | recurrent.HANDLERS
            | (unknown.handlers() if machine.shapes else {}),
        ),
        (nn.Parameter, "__new__", _parameter_new(nn.Parameter.__new__)),
        (torch._C._nn, "_parse_to", _parse_to(torch._C._nn._parse_to)),
        (nn.Module, "_apply", _module_apply(nn.Module._apply)),
        (nn.parameter.UninitializedTensorMixin, "materialize", materialize),  # type: ignore[attr-defined]
        (FakeTensorMode, "from_tensor", _not_faked(FakeTensorMode.from_tensor)),
        (torch.autograd, "_engine_run_backward", _with_functions(torch.autograd._engine_run_backward)),
    ]


def _parameter_new(original: Callable[..., Any]) -> Any:
    def __new__(cls: type, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Parameter(data), also of a virtual parameter: torch wants detach() to keep the class of a foreign one."""
        own = own_class(cls)
        if own is not None and data.__class__ in VIRTUAL:
            return of_own_class(own, data, kwargs.get("requires_grad", args[0] if args else True))
        return original(own or cls, data.detach() if data.__class__ in PARAMETERS else data, *args, **kwargs)

    return staticmethod(__new__)


def _parse_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        """What `to(…)` asks for, of a module and of a tensor with a `to` of its own, also for `to(1)`: C++ knows no
        accelerator that an index could mean."""
        if args and args[0].__class__ is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if kwargs.get("device").__class__ is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return original(*args, **kwargs)

    return parse_to


def _module_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        kinds.remember(self)
        if scripted.is_scripted(self):
            scripted.apply(self, args[0])
            return self
        original(self, *args, **kwargs)
        machine = state.machine()
        if machine is not None and machine.teller is not None:
            machine.teller.moved(self)
        return self

    return _apply


def _not_faked(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_tensor(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """A fake tensor of a tensor on the host; one of a GPU needs the CUDA library and would abort the process."""
        if tensor.__class__ in VIRTUAL:
            raise state.NotSimulated(
                "torch.export (or another tracer) makes fake tensors of tensors on a GPU: that is not simulated"
            )
        return original(self, tensor, *args, **kwargs)

    return from_tensor


def _with_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        """Hooks and recomputation run user code inside backward, where torch has put the function mode aside."""
        compiled.broken("it calls backward()")
        machine = state.machine()
        teller = machine.teller if machine is not None else None
        with functions.switched_on():
            if teller is None:
                return original(*args, **kwargs)
            return teller.backward(lambda: original(*args, **kwargs))

    return _engine_run_backward
