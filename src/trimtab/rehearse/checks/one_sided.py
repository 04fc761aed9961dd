"""What ranks do at the same time, or one of them alone: files that they save, and copies of a model (a teacher, an
average) that one writes and all run. Writes down what the parent compares (see `alone`); it decides nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trimtab.rehearse import agreement, exchanges, places
from trimtab.rehearse.checks.base import BaseCheck, around, ever_held, world_size
from trimtab.rehearse.checks.drift import sums_of, way_here
from trimtab.rehearse.checks.writes import writes


@dataclass
class _Copy:
    """A module that no optimizer trains, from its first run on."""

    name: str
    memory: set[int]
    runs: int = 0
    written: list[tuple[str, int]] = field(default_factory=list)
    """The way to the line of the program that last wrote into it."""


class OneSided(BaseCheck):
    """Follows files and copies on this rank."""

    def install(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, _Copy | None] = WeakKeyDictionary()
        self._followed: list[_Copy] = []
        self._names: Counter[str] = Counter()
        self._held = ever_held()
        around(torch, "save", self._save)
        nn.modules.module.register_module_forward_pre_hook(self._run)
        writes().listeners.append(self._wrote)

    def _save(self, real: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("f")
        path = getattr(given, "name", None) if not isinstance(given, str | os.PathLike) else given
        if isinstance(path, str | os.PathLike) and (place := places.here()) is not None:
            path, reached = os.path.realpath(path), agreement.reached()
            agreement.note(
                self.process, {"saved": path, "after": reached, "place": asdict(place), "way": way_here()}
            )
        return real(saved, *args, **kwargs)

    def _run(self, module: nn.Module, args: Any) -> None:
        if module not in self._copies:
            if world_size() < 2:
                return
            self._copies.update(dict.fromkeys(module.modules()))
            mine, place = list(module.parameters()), places.here()
            if mine and place is not None and not any(id(p) in self._held for p in mine):
                name = f"{type(module).__name__} {place.file}:{place.line}"
                self._names[name] += 1
                new = _Copy(f"{name} {self._names[name]}", {exchanges.memory(p) for p in mine} - {0})
                self._copies[module] = new
                self._followed.append(new)
        copy = self._copies[module]
        if copy is None:
            return
        copy.runs += 1
        # The first run of all is with the weights that it was made with; then some, as long as the program runs.
        if copy.runs > 1 and copy.runs & (copy.runs - 1) == 0:
            record = {"copy": copy.name, "n": copy.runs, "sums": sums_of(list(module.parameters()))}
            place = places.here()
            record |= {"written": copy.written, "place": asdict(place) if place else None}
            agreement.note(self.process, record)

    def _wrote(self, name: str, tensor: torch.Tensor, frame: FrameType) -> None:
        if self._followed:
            memory = exchanges.memory(tensor)
            for copy in self._followed:
                if memory in copy.memory:
                    copy.written = way_here()
