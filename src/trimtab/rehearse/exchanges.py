"""Who exchanges what between ranks, as far as the comparison of ranks needs it; it records, and stops nothing.

A gradient or weight that the program itself hands to a collective is known by its memory. Anything else of size that
the program (not DDP, not FSDP) exchanges may be activations of a split model or gradients in buckets: then ranks may
differ on purpose, or agree by a way that is not seen here, and nothing is said about them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from trimtab.diagnose.finding import Place
from trimtab.rehearse import agreement, places, shield
from trimtab.rehearse.checks.base import optimizers_made, trained_by
from trimtab.virtual.tensor import payload_of

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process

_SMALL = 64
"""Elements up to which a vector is figures to show (losses, counts), no part of training."""
_MOST = 4096
"""Exchanges that are looked at: a program that has made as many has shown how it works."""
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

_said: set[str] = set()
_looked = 0
_training = False
"""Whether a backward pass has begun: what is exchanged before is no part of a step."""
shared: set[int] = set()
"""Ids of trained parameters of which the program itself has exchanged the gradient or the weight."""
averaged: set[int] = set()
"""Ids of trained parameters of which something of that very shape was exchanged between backward passes: a copy, or all
of them in one row, as those do who average weights every few steps."""
averagings = 0
"""How many such exchanges there were."""
listeners: list[Callable[[str, list[torch.Tensor], Place], None]] = []
"""Told of every exchange that a line of the program makes, before it is made."""
ran: set[tuple[str, int]] = set()
"""The lines of the program that have exchanged something."""


def seen(process: Process, op: str, tensors: list[torch.Tensor], whole: bool) -> None:
    """Look at one exchange before it is made."""
    global _looked
    _looked += 1
    if _looked > _MOST or (not tensors and whole):
        return
    if _training and (op in ("send", "recv_", "recv_any_source_") or op.startswith("all_to_all")):
        veto(process, op)
    if _training and not whole:
        veto(process, "a part of the ranks")
    if op == "barrier":
        return
    if _training:
        _look_for_averaging(tensors)
    if not _by_the_program():
        return
    big = [t for t in tensors if t.is_floating_point() and t.numel() > (1 if t.dim() > 1 else _SMALL)]
    known = _known(tensors)
    place = places.here()
    if place is not None:
        ran.add((place.file, place.line))
        _once(process, f"ran {place.file}:{place.line}", {"ran": place.line, "file": place.file})
        for listener in listeners:
            shield.call(shield.owner_of(listener), listener, op, tensors, place)
    if not _training:
        return  # weights that all ranks begin with
    if known:
        shared.update(known)
        if place is not None:
            _once(process, f"at {place.file}:{place.line}", {"shares": asdict(place)})
    elif big:
        veto(process, op)


def averages(parameters: dict[int, int]) -> bool:
    """Whether most of these parameters (sizes by id) were seen in exchanges between backward passes."""
    total = sum(parameters.values())
    return 2 * sum(size for one, size in parameters.items() if one in averaged) >= total > 0


def begin(roots: Any = None, place: Any = None) -> None:
    """A backward pass begins."""
    global _training
    _training = True
    _shaped.clear()


def veto(process: Process, reason: str) -> None:
    """Ranks may differ, or read alike, on purpose."""
    _once(process, reason, {"veto": reason})


def _once(process: Process, word: str, record: dict[str, Any]) -> None:
    if word not in _said:
        _said.add(word)
        agreement.note(process, record)


def _by_the_program() -> bool:
    """Whether a collective was called from outside torch; DDP's reducer calls from C++, FSDP from torch's own files."""
    frame: FrameType | None = sys._getframe(1)
    asked = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            if file.endswith(("distributed_c10d.py", "c10d_logger.py")):
                asked = True
            elif file.endswith("overrides.py"):
                pass  # the way through the function mode
            elif asked:
                return "_functional_collectives" in file or f"distributed{os.sep}nn" in file
            elif f"{os.sep}autograd{os.sep}" in file or f"{os.sep}nn{os.sep}parallel" in file:
                return False
        elif not file.startswith(_OWN):
            return True
        frame = frame.f_back
    return False


def _look_for_averaging(tensors: list[torch.Tensor]) -> None:
    """Weights that are averaged may be copies: they are known by their shapes, or as one row of all of them."""
    global averagings
    given = [t for t in tensors if t.is_floating_point() and t.numel() > 1]
    if not given or _of_a_wrapper():
        return
    shapes = {tuple(tensor.shape) for tensor in given}
    rows = {tensor.numel() for tensor in given if tensor.dim() == 1}
    found: set[int] = set()
    for optimizer in list(optimizers_made()):
        mine = trained_by(optimizer)
        if rows:
            held = [parameter for parameter in mine if parameter.grad is not None]
            for together in (mine, held):
                if sum(parameter.numel() for parameter in together) in rows:
                    found |= {id(parameter) for parameter in together}
                    shared.update(found)
        known = _by_shape(optimizer, mine)
        found |= {one for shape in shapes for one in known.get(shape, ())}
    averaged.update(found)
    averagings += bool(found)


_shaped: WeakKeyDictionary[Any, tuple[list[int], dict[tuple[int, ...], list[int]]]] = WeakKeyDictionary()
"""Of an optimizer the ids of its parameters, and which have which shape, since the last backward pass began."""


def _by_shape(optimizer: Any, parameters: list[torch.Tensor]) -> dict[tuple[int, ...], list[int]]:
    """The ids of parameters by shape: a state is exchanged tensor by tensor, each of which may be any of them."""
    ids = [id(parameter) for parameter in parameters]
    known = _shaped.get(optimizer)
    if known is None or known[0] != ids:
        found: dict[tuple[int, ...], list[int]] = {}
        for parameter in parameters:
            found.setdefault(tuple(parameter.shape), []).append(id(parameter))
        _shaped[optimizer] = known = (ids, found)
    return known[1]


def _of_a_wrapper() -> bool:
    """Whether a backward pass, DDP or FSDP makes this exchange."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        if file.startswith(_TORCH) and (
            f"{os.sep}nn{os.sep}parallel" in file or f"{os.sep}fsdp{os.sep}" in file
        ):
            return True
        frame = frame.f_back
    return False


def memory(tensor: Any) -> int:
    """Where a tensor's values (of a sharded one: this rank's) lie, as a number; 0 for one that has none of its own."""
    values = payload_of(getattr(tensor, "_local_tensor", tensor))
    if (
        values.is_meta
        or values.layout is not torch.strided
        or torch._C._functorch.is_functorch_wrapped_tensor(values)
    ):
        return 0
    return values.untyped_storage().data_ptr()


def _known(tensors: list[torch.Tensor]) -> set[int]:
    """The trained parameters whose weight or gradient lies in one of these."""
    given = {memory(tensor) for tensor in tensors} - {0}
    found = set()
    for optimizer in list(optimizers_made()):
        for parameter in trained_by(optimizer):
            gradient = parameter.grad
            if memory(parameter) in given or (gradient is not None and memory(gradient) in given):
                found.add(id(parameter))
    return found
