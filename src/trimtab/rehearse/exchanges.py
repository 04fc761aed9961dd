"""Who exchanges what between ranks, as far as the comparison of ranks needs it; it records, and stops nothing.

A gradient or weight that the program itself hands to a collective is known by its memory. Anything else of size that
the program (not DDP, not FSDP) exchanges may be activations of a split model or gradients in buckets: then ranks may
differ on purpose, or agree by a way that is not seen here, and nothing is said about them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from trimtab.rehearse import agreement, places
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
shared: set[int] = set()
"""Ids of trained parameters of which the program itself has exchanged the gradient or the weight."""


def seen(process: Process, op: str, tensors: list[torch.Tensor], whole: bool) -> None:
    """Look at one exchange before it is made."""
    global _looked
    _looked += 1
    if _looked > _MOST or (not tensors and whole):
        return
    if op in ("send", "recv_", "recv_any_source_") or op.startswith("all_to_all"):
        _veto(process, op)
    if not whole:
        _veto(process, "a part of the ranks")
    if not _by_the_program() or op == "barrier":
        return
    big = [t for t in tensors if t.is_floating_point() and t.numel() > (1 if t.dim() > 1 else _SMALL)]
    known = _known(tensors)
    if known:
        shared.update(known)
        place = places.here()
        if place is not None and f"at {place.line}" not in _said:
            _said.add(f"at {place.line}")
            agreement.note(process, {"shares": asdict(place)})
    elif big:
        _veto(process, op)
    if big or known:
        place = places.here()
        if place is not None and f"ran {place.line}" not in _said:
            _said.add(f"ran {place.line}")
            agreement.note(process, {"ran": place.line, "file": place.file})


def veto(process: Process, reason: str) -> None:
    """Ranks may differ, or read alike, on purpose."""
    _veto(process, reason)


def _veto(process: Process, reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        agreement.note(process, {"veto": reason})


def _by_the_program() -> bool:
    """Whether a collective was called from outside torch; DDP's reducer calls from C++, FSDP from torch's own files."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            if not file.startswith(_TORCH):
                return not file.startswith("<")
            if not file.endswith(("distributed_c10d.py", "c10d_logger.py")):
                return "_functional_collectives" in file or "distributed/nn" in file
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _memory(tensor: Any) -> int:
    values = payload_of(tensor)
    return 0 if values.is_meta or values.layout is not torch.strided else values.untyped_storage().data_ptr()


def _known(tensors: list[torch.Tensor]) -> set[int]:
    """The trained parameters whose weight or gradient lies in one of these."""
    given = {_memory(tensor) for tensor in tensors} - {0}
    found = set()
    for optimizer in list(optimizers_made()):
        for parameter in trained_by(optimizer):
            gradient = parameter.grad
            if _memory(parameter) in given or (gradient is not None and _memory(gradient) in given):
                found.add(id(parameter))
    return found
