"""What may part the weights of a wrapped model: writes down, step by step, what the parent compares between the ranks
(see `diverged`). A part of the check on DDP; it decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trimtab.diagnose import source
from trimtab.diagnose.finding import Place
from trimtab.rehearse import agreement, diverged, exchanges, places
from trimtab.rehearse.checks.base import around, place_born, plain_values
from trimtab.rehearse.checks.ddp_errors import Wrapped
from trimtab.rehearse.checks.freezes import freezes
from trimtab.rehearse.checks.writes import writes
from trimtab.virtual import deeds, origin

if TYPE_CHECKING:
    from trimtab.rehearse.process import Process

_Real = Callable[..., Any]
_OF_ALL = ("clip_grad_norm_", "clip_grad_value_", "unscale_", "zero_grad")
"""What changes gradients alike wherever they are alike."""


class Drift:
    """Follows the weights of every wrapped model, who wrote into them, and the learning rates."""

    def __init__(self, process: Process, wrapped: list[Wrapped]) -> None:
        self._process, self._wrapped = process, wrapped
        self.paused = False
        """Whether an optimizer steps or a backward pass runs: what is written then is theirs."""
        self._freezes = freezes()
        self._rates: WeakKeyDictionary[Any, Place | None] = WeakKeyDictionary()
        for kind in (LRScheduler, ReduceLROnPlateau):
            around(kind, "step", self._scheduled)
        writes().listeners.append(self._wrote)
        exchanges.listeners.append(self._exchanged)

    def compare(
        self, entry: Wrapped, ddp: DistributedDataParallel, optimizer: Any, mine: list[torch.Tensor]
    ) -> None:
        """Write down the weights with which a step begins: what averages them after a step has done so by then."""
        which = f"{entry.number}:{_positions(ddp, mine)}"
        entry.compared[which] += 1
        step = entry.compared[which]
        entry.sizes |= {id(parameter): parameter.numel() for parameter in mine if parameter.requires_grad}
        entry.own_hook = _own_hook(ddp)
        averaged = exchanges.averagings != entry.averagings
        entry.averagings = exchanges.averagings
        if step > 16 and step & (step - 1) > 1 and not averaged:
            return
        rate = self._rates.get(optimizer)
        known = {
            "place": _plain(places.here()),
            "at": _plain(entry.at),
            "averaged": averaged,
            "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            "rated": _plain(rate),
            "outside": self._outside(entry, mine),
            "written": entry.written,
            "gradients": sums_of([p.grad for p in mine if p.grad is not None]),
            "changed": entry.changed,
            "buffers": {
                name: sums_of([buffer])
                for name, buffer in ddp.module.named_buffers()
                if name in entry.buffers.values()
            },
            "began": entry.began,
            "kept": entry.kept,
            "state": sums_of(_slots(optimizer, mine)),
            "loaded": _plain(source.place(at.file, at.line))
            if (at := origin.resolve(deeds.loaded(optimizer))) is not None
            else None,
        }
        diverged.note(self._process, ddp, which, step, mine, known)

    def _outside(self, entry: Wrapped, mine: list[torch.Tensor]) -> dict[str, Any] | None:
        """A trained parameter of which DDP averages nothing: it came, or was unfrozen, after the wrap, or no
        backward pass through DDP was the last."""
        if entry.unsynced is not None or (not entry.forwards and entry.past_it is not None):
            alone = entry.unsynced or entry.past_it
            return {"unsynced" if entry.unsynced else "past": asdict(alone)} if alone else None
        for parameter in (p for p in mine if p.requires_grad and id(p) not in entry.averaged):
            if id(parameter) not in entry.frozen:
                if (born := place_born(parameter)) is not None:
                    return {"late": asdict(born)}
            elif (deed := self._freezes.of(parameter)) is not None and deed.trainable and deed.place:
                return {"unfrozen": asdict(deed.place)}
        return None

    def _wrote(self, name: str, tensor: torch.Tensor, frame: FrameType) -> None:
        """Something other than an optimizer wrote into a tensor: remember the way to it, if it is a wrapped weight."""
        if self.paused or not self._wrapped:
            return
        memory = exchanges.memory(tensor)
        for entry in self._wrapped:
            if memory in entry.memory or id(tensor) in entry.averaged | entry.frozen:
                entry.written = way_here()
                entry.memory.add(memory)
            elif memory in entry.buffers:
                entry.kept[entry.buffers[memory]] = way_here()
            elif memory in entry.gradients and (way := way_here()) and not _for_all(way[0]):
                entry.changed = entry.changed or way

    def _exchanged(self, op: str, tensors: list[torch.Tensor], place: Place) -> None:
        """The program brings something of a buffer's shape together in its own way: ranks may hold parts of it."""
        shapes = {tensor.shape for tensor in tensors}
        for entry in self._wrapped:
            ddp = entry.held() if entry.buffers else None
            held = dict(ddp.module.named_buffers()) if ddp is not None else {}
            if names := [name for name in entry.began if name in held and held[name].shape in shapes]:
                agreement.note(self._process, {"brought": names})

    def _scheduled(self, real: _Real, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        before = [group.get("lr") for group in scheduler.optimizer.param_groups]
        result = real(scheduler, *args, **kwargs)
        if before != [group.get("lr") for group in scheduler.optimizer.param_groups]:
            self._rates[scheduler.optimizer] = places.here()
        return result


def way_here() -> list[tuple[str, int]]:
    """The program's lines on the stack, innermost first."""
    return [(f.f_code.co_filename, f.f_lineno) for f in places.frames()][:16]


def _for_all(line: tuple[str, int]) -> bool:
    return any(source.called_name(call) in _OF_ALL for call in source.call_on(*line))


def _slots(optimizer: Any, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an optimizer remembers of parameters: momenta, averages of squares."""
    states = [optimizer.state.get(parameter, {}) for parameter in mine]
    return [v for slots in states for v in slots.values() if isinstance(v, torch.Tensor) and v.numel() > 1]


def sums_of(tensors: list[torch.Tensor]) -> list[float]:
    """A sum in which every place counts differently, and a sum of sizes, by which ranks are compared."""
    total, size = 0.0, 0.0
    for values in (v.double().flatten() for tensor in tensors if (v := plain_values(tensor)) is not None):
        total += float((values * torch.linspace(0.5, 1, len(values), dtype=torch.double)).sum())
        size += float(values.abs().sum())
    return [total, size]


def _own_hook(ddp: DistributedDataParallel) -> bool:
    """Whether gradients are brought together by more than a plain all-reduce."""
    hooks = [hook for hook, _ in getattr(ddp, "_comm_hooks", [])]
    return any(
        not str(getattr(hook, "__module__", "")).endswith("ddp_comm_hooks.default_hooks") for hook in hooks
    )


def _plain(place: Place | None) -> dict[str, Any] | None:
    return asdict(place) if place is not None else None


def _positions(ddp: DistributedDataParallel, parameters: list[torch.Tensor]) -> str:
    """Which of the parameters of a DDP module these are, the same words on every rank."""
    known = {id(parameter): position for position, parameter in enumerate(ddp.module.parameters())}
    given = sorted(known[id(parameter)] for parameter in parameters)
    return "all" if len(given) == len(known) else ",".join(map(str, given))
