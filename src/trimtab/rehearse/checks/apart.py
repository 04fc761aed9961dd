"""Ranks that train apart: writes down, step by step, what the parent compares between the ranks (see `apart_ranks`).

Only plain parameters are looked at: shards differ by design, and those of a DDP module are DDP's. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose import source
from trimtab.diagnose.finding import Finding, Place
from trimtab.diagnose.raised_ranks import not_written_yet
from trimtab.rehearse import agreement, exchanges, places
from trimtab.rehearse.checks.base import (
    BaseCheck,
    around,
    backward_hub,
    optimizers_made,
    trained_by,
    world_size,
)
from trimtab.rehearse.rank_records import TENSOR_PARALLEL
from trimtab.virtual import origin, state
from trimtab.virtual.tensor import VIRTUAL, payload_of

_PLAIN = VIRTUAL | {torch.Tensor, nn.Parameter}
_FIGURES = ("lr", "weight_decay", "momentum", "eps")
_STEPS = 16


class Apart(BaseCheck):
    """Follows every optimizer of a rank."""

    def install(self) -> None:
        self._made = optimizers_made()
        self._numbers: dict[int, int] = {}
        self._steps: Counter[int] = Counter()
        self._ids: dict[int, list[int]] = {}
        self._wrapped: set[int] = set()
        around(DistributedDataParallel, "__init__", self._wrap)
        backward_hub().before.append(exchanges.begin)
        register_optimizer_step_pre_hook(self._step)

    def _wrap(self, real: Any, ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        real(ddp, module, *args, **kwargs)
        self._wrapped |= {id(parameter) for parameter in module.parameters()}

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if world_size() < 2 or self.process.settings.shapes_only:
            return
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        self._steps[number] += 1
        step = self._steps[number]
        if step > _STEPS and step & (step - 1) > 1:
            return
        parameters = trained_by(optimizer)
        sharded = [p for p in parameters if type(p) not in _PLAIN or getattr(p, "_is_flat_param", False)]
        mine = [p for p in parameters if p.requires_grad and id(p) not in self._wrapped]
        mine = [p for p in mine if not any(p is one for one in sharded)] if not _fsdp_around() else []
        if step == 1:
            self._begin(optimizer, number, mine, bool(sharded) or _fsdp_around())
        self._write(number, step, mine)

    def _begin(
        self, optimizer: torch.optim.Optimizer, number: int, mine: list[torch.Tensor], sharded: bool
    ) -> None:
        managed = _of_fully_shard()
        split = [p for p in trained_by(optimizer) if _is_dtensor(p)]
        split = [p for p in split if id(p) not in managed or not _over_all(p)]
        if split:
            exchanges.veto(self.process, TENSOR_PARALLEL)
        group = optimizer.param_groups[0]
        made, where = self._made.get(optimizer), places.here()
        agreement.note(
            self.process,
            {
                "optimizer": number,
                "names": _names(mine),
                "shapes": [list(p.shape) for p in mine],
                "figures": [group[name] for name in _FIGURES if isinstance(group.get(name), float | int)],
                "made": asdict(made) if made else None,
                "where": asdict(where) if where else None,
                "moved": [asdict(place) if (place := _moved(p)) else None for p in mine],
                "gpu": [p.device.type == "cuda" for p in mine],
                "wrapped": bool(self._wrapped),
                "sharded": sharded,
                "tensor": bool(split) and all(_over_all(p) for p in split),
            },
        )

    def _write(self, number: int, step: int, mine: list[torch.Tensor]) -> None:
        figures = [None if p.grad is None else [*_sums(p.grad), *_sums(p)] for p in mine]
        self._ids[number] = [id(parameter) for parameter in mine]
        agreement.note(self.process, {"apart": number, "n": step, "sums": figures})

    def finish(self) -> None:
        """Which parameters the program itself has exchanged by now: weights may be averaged at the very end."""
        for number, ids in self._ids.items():
            shared = [n for n, one in enumerate(ids) if one in exchanges.shared]
            agreement.note(self.process, {"exchanged": number, "shared": shared})

    def enrich(self, finding: Finding, error: BaseException | None) -> Finding:
        """A file that another rank has yet to write."""
        told = not_written_yet(error) if isinstance(error, FileNotFoundError) and world_size() > 1 else None
        if told is None or finding.kind not in ("other-error", "data-unreachable"):
            return finding
        return replace(
            finding, kind=told.kind, severity="fault", cause=told.cause, fix=told.fix, edits=told.edits
        )


def _sums(tensor: torch.Tensor) -> tuple[float, float]:
    values = payload_of(tensor.detach())
    if values.is_meta or values.layout is not torch.strided:
        return 0.0, 0.0
    with torch.no_grad(), torch._C.DisableTorchFunction():
        wide = values.double()
        return float(wide.sum()), float(wide.abs().sum())


def _fsdp_around() -> bool:
    """Whether FullyShardedDataParallel wraps a model here: with its original parameters on show, those are shards."""
    here = state.machine()
    names = {type(module).__name__ for module in (here.modules if here is not None else ())}
    return "FullyShardedDataParallel" in names


def _is_dtensor(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "placements")


def _over_all(parameter: Any) -> bool:
    """Split, or held in copies, over every rank, in one dimension."""
    mesh = parameter.device_mesh
    return bool(mesh.ndim == 1 and mesh.size() == world_size())


def _of_fully_shard() -> set[int]:
    """The parameters that `fully_shard` manages, by id: only it knows, as those of tensor parallelism look alike."""
    here = state.machine()
    made = list(here.modules) if here is not None else []
    wrapped = [one for one in made if any(kind.__name__ == "FSDPModule" for kind in type(one).__mro__)]
    return {id(parameter) for module in wrapped for parameter in module.parameters()}


def _moved(parameter: torch.Tensor) -> Place | None:
    trace = origin.trace_of(parameter)
    at = origin.resolve(trace.moved) if trace is not None else None
    return source.place(at.file, at.line) if at is not None else None


def _names(parameters: list[torch.Tensor]) -> list[str]:
    here = state.machine()
    known: dict[int, str] = {}
    for module in list(here.modules) if here is not None else ():
        for name, parameter in module.named_parameters():
            if len(name) > len(known.get(id(parameter), "")):
                known[id(parameter)] = name
    return [known.get(id(parameter), f"parameter {n}") for n, parameter in enumerate(parameters)]
