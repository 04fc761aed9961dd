"""State that is lost with the replicas of nn.DataParallel: a buffer that forward binds anew. Nothing raises.

The replicas live for one call. What is written into a buffer in place reaches the model from the first GPU's replica,
which shares its memory; a new tensor under the buffer's name is gone with the replica. Speaks only where the new value
is computed from the old one, and the model has the same old one again in a later call: a table that forward makes
anew each time is no state.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.diagnose import rewrite, source
from trimtab.diagnose.finding import Edit, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, plain_values, same_values
from trimtab.virtual import deeds, origin


class Replicas(BaseCheck):
    """Compares the buffers of the first replica before and after it ran."""

    def install(self) -> None:
        self._lost: dict[str, torch.Tensor] = {}
        """By the place that binds a buffer anew: the values that the model itself had then."""
        around(nn.DataParallel, "parallel_apply", self._apply)

    def _apply(self, real: Callable[..., Any], wide: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
        replicas: Sequence[nn.Module] = args[0] if args else kwargs.get("replicas", ())
        known = list(_buffers(replicas[0])) if replicas else []
        before = [(module, name, path, module._buffers[name]) for module, name, path in known]
        result = real(wide, *args, **kwargs)
        own = dict(wide.module.named_buffers())
        for module, name, path, old in before:
            new, kept = module._buffers.get(name), own.get(path)
            if new is None or new is old or kept is None or new.shape != kept.shape:
                continue
            self._replaced(module, name, path, kept, new)
        return result

    def _replaced(
        self, module: nn.Module, name: str, path: str, kept: torch.Tensor, new: torch.Tensor
    ) -> None:
        placed = deeds.placement(module, name)
        line = origin.resolve(placed.line) if placed is not None and placed.line is not None else None
        statement = source.statement(line.file, line.line) if line is not None else None
        value = _own_value(statement, name)
        values = plain_values(kept)
        if line is None or value is None or values is None or same_values(values, plain_values(new)):
            return
        key = f"{line.file}:{line.line}"
        if key not in self._lost:
            self._lost[key] = values.clone()
            return
        if not same_values(self._lost[key], values):
            return  # the program brings it back into the model in its own way
        assert isinstance(statement, ast.Assign)
        text = f"self.{name}.copy_({rewrite.text_of(line.file, value)})"
        if new.requires_grad:
            text = f"self.{name}.copy_({rewrite.operand(value)}.detach())"
        edits: list[Edit] = [rewrite.in_place_of(line.file, statement, text)]
        self.report(
            "garbage-buffer",
            f"Under nn.DataParallel forward gives the buffer {path} a new tensor in each replica, and the replicas "
            "are thrown away after the call: the model's own buffer never changes.",
            places.here(),
            cause_at(
                source.place(line.file, line.line), "this binds the name anew in a replica of the model"
            ),
            fix=f"Write into it, which reaches the model from the first GPU's replica: {text}",
            op="DataParallel.forward",
            module=path,
            once=key,
            edits=edits,
        )


def _buffers(replica: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """The buffers of a model: the module that has it, its name there, its full name."""
    for prefix, module in replica.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is not None:
                yield module, name, f"{prefix}.{name}" if prefix else name


def _own_value(statement: ast.stmt | None, name: str) -> ast.expr | None:
    """What `self.name = …` sets, where that is computed from `self.name`."""
    if not isinstance(statement, ast.Assign) or [ast.unparse(t) for t in statement.targets] != [
        f"self.{name}"
    ]:
        return None
    reads = [n for n in ast.walk(statement.value) if isinstance(n, ast.Attribute)]
    return statement.value if any(ast.unparse(n) == f"self.{name}" for n in reads) else None
