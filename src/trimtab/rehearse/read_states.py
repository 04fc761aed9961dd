"""What was read from files to a GPU and still lies there beside what was made of it: a checkpoint that stays bound.

`load_state_dict` copies weights, so a state that was read to the GPU is there twice until it is let go.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import torch
from torch.utils._pytree import tree_leaves

from trimtab.diagnose import holders
from trimtab.diagnose.finding import Finding, Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, optimizers_made
from trimtab.rehearse.memory_text import size
from trimtab.virtual import imports, state

_SAFETENSORS = "safetensors.torch"
_SHARE = 0.05
"""The part of a GPU from which on it is worth a word."""


@dataclass
class _Read:
    """A tensor that was read to a GPU."""

    place: Place
    tensor: ref[torch.Tensor]
    given: bool = False
    """Whether a module or an optimizer was given it as (a part of) its state; rows of data never are."""


class ReadStates(BaseCheck):
    """Remembers which tensors were read to a GPU, where, and which of them were given to a model or an optimizer."""

    def install(self) -> None:
        self._read: dict[int, _Read] = {}
        self._made = optimizers_made()
        around(torch, "load", self._load)
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            around(kind, "load_state_dict", self._give)
        machine = state.machine()
        assert machine is not None

        def put_in(_: Any) -> None:
            around(sys.modules[_SAFETENSORS], "load_file", self._load, whose=type(self).__name__)

        imports.when_imported(machine, machine.undo, {_SAFETENSORS: put_in})

    def _load(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found, place = real(*args, **kwargs), places.here()
        if place is None:
            return found
        self._read = {key: one for key, one in self._read.items() if one.tensor() is not None}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                self._read[id(tensor)] = _Read(place, ref(tensor))
        return found

    def _give(self, real: Callable[..., Any], holder: Any, *args: Any, **kwargs: Any) -> Any:
        if self._read:
            for tensor in tree_leaves(args[0] if args else kwargs.get("state_dict")):
                known = self._read.get(id(tensor))
                if known is not None and known.tensor() is tensor:
                    known.given = True
        return real(holder, *args, **kwargs)

    def beside(self, finding: Finding, device: str) -> tuple[Finding, int]:
        """The finding of a full GPU, with what was read there and nothing uses any more as its cause, and its bytes."""
        capacity = next((one.total_bytes for one in _devices() if str(one.device) == device), 0)
        idle = {place: count for place, count in self._idle(device).items() if count >= _SHARE * capacity}
        if not idle:
            return finding, 0
        place, count = max(idle.items(), key=lambda pair: pair[1])
        why = (
            f"{size(count)} that were read here still lie on {device}, beside the weights that they were copied to: "
            "the program holds them by a name of its own"
        )
        fix = (
            'Read it to the host, torch.load(…, map_location="cpu"), or delete the name once the state has been '
            "loaded: load_state_dict copies each tensor to where its parameter is."
        )
        return replace(finding, cause=cause_at(place, why), fix=fix, edits=[]), count

    def _idle(self, device: str) -> dict[Place, int]:
        """The bytes of what was read at each line and is neither part of a model nor of an optimizer."""
        given = [
            (one.place, tensor)
            for one in self._read.values()
            if one.given and (tensor := one.tensor()) is not None
        ]
        read = [(place, tensor) for place, tensor in given if str(tensor.device) == device]
        if not read:
            return {}
        loaded = {id(tensor) for _, tensor in read}
        kept = {id(leaf) for optimizer in self._made for leaf in tree_leaves(list(optimizer.state.values()))}
        # A module that took them over as they are has tensors of its own with the same memory.
        others = (
            one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and id(one) not in loaded
        )
        used = {
            holders.storage_of(one)
            for one in others
            if isinstance(getattr(one, "payload", None), torch.Tensor)
        }
        used |= {holders.storage_of(tensor) for _, tensor in read if id(tensor) in kept}
        found: dict[Place, int] = {}
        for place, tensor in read:
            if (storage := holders.storage_of(tensor)) not in used:
                used.add(storage)
                found[place] = found.get(place, 0) + tensor.numel() * tensor.element_size()
        return found


def _devices() -> list[Any]:
    machine = state.machine()
    return list(machine.devices) if machine is not None else []
