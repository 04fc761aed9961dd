"""Re-entrant checkpoints whose inputs need no gradient: what is trained inside never gets one, and nothing raises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
import torch.utils.checkpoint
from torch import nn

from trimtab.diagnose import raised_graph
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, backward_hub, shown

_Inside = dict[str, ref[torch.Tensor]]


class Checkpoints(BaseCheck):
    """Follows the trainable parameters inside such checkpoints, by the line that opens each."""

    def install(self) -> None:
        self._inside: dict[Place | None, _Inside] = {}
        """Those that have no gradient yet."""
        self._passes = 0
        around(torch.utils.checkpoint, "checkpoint", self._checkpoint)
        backward_hub().after.append(self._after)

    def _checkpoint(self, real: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if kwargs.get("use_reentrant") is not False and torch.is_grad_enabled() and not needed:
            inside: _Inside = {
                name: ref(parameter)
                for module in _modules_of(function)
                for name, parameter in module.named_parameters()
                if parameter.requires_grad
            }
            if inside:
                self._inside.setdefault(places.here(), inside)
        return real(function, *args, **kwargs)

    def _after(self) -> None:
        self._passes += 1
        for inside in self._inside.values():
            for name, held in list(inside.items()):
                if (parameter := held()) is not None and parameter.grad is not None:
                    del inside[name]

    def finish(self) -> None:
        for place, inside in self._inside.items():
            if not inside or not self._passes:
                continue
            self.process.explained |= {id(p) for held in inside.values() if (p := held()) is not None}
            fix, edits = raised_graph.without_reentry(place)
            self.report(
                "no-gradient",
                "None of the inputs of a re-entrant checkpoint requires a gradient, so the trainable parameters inside "
                f"never receive one: {shown(list(inside))}.",
                place,
                cause_at(place, "re-entrant checkpointing passes gradients on only if an input requires one"),
                fix=fix,
                op="torch.utils.checkpoint",
                edits=edits,
            )


def _modules_of(function: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules that a function to be checkpointed would call."""
    if isinstance(function, nn.Module):
        yield function
        return
    if depth == 0 or function is None:
        return
    if isinstance(function, functools.partial):
        for thing in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_of(thing, depth - 1)
        return
    yield from _modules_of(getattr(function, "__self__", None), depth - 1)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            contents = cell.cell_contents
        except ValueError:
            continue
        if isinstance(contents, nn.Module) or callable(contents):
            yield from _modules_of(contents, depth - 1)
