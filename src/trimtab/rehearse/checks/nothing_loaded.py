"""`load_state_dict(..., strict=False)` in which not one name fits: nothing is loaded, and nothing says so.

Speaks only when a single change of names would have made them fit, and when the model then runs with the weights that
it had. Never of a load that a library does for the program, nor of one that is mended by a later load.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from trimtab.diagnose import mends_loading, source
from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse.checks.base import BaseCheck, around, plain_values, same_values
from trimtab.virtual import origin


@dataclass(eq=False)
class _Load:
    module: ref[nn.Module]
    name: str
    kept: dict[str, torch.Tensor]
    """Some of the values that the model had, by name."""
    place: Place
    mend: mends_loading.Mend
    used: bool = False


class NothingLoaded(BaseCheck):
    """Looks at what a load that is not strict says it has left out."""

    def install(self) -> None:
        self._open: list[_Load] = []
        around(nn.Module, "load_state_dict", self._load)
        nn.modules.module.register_module_forward_pre_hook(self._forward)

    def _load(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = real(module, *args, **kwargs)
        state = kwargs.get("state_dict", args[0] if args else None)
        own = dict(module.named_parameters(remove_duplicate=False))
        missing, unexpected = (set(getattr(result, n, ())) for n in ("missing_keys", "unexpected_keys"))
        if not isinstance(state, Mapping) or not own:
            return result
        if not missing >= own.keys() or not unexpected:
            # Something was loaded: what was tried before on the same layers is made good.
            self._open = [load for load in self._open if not _related(load.module(), module)]
            return result
        place = _asked()
        wrapped = isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
        mend = mends_loading.renamed(place, state, own, wrapped) if place is not None else None
        if place is not None and mend is not None:
            some = ((name, plain_values(p)) for name, p in itertools.islice(own.items(), 8))
            kept = {name: values.clone() for name, values in some if values is not None}
            self._open.append(_Load(ref(module), type(module).__name__, kept, place, mend))
        return result

    def _forward(self, module: nn.Module, args: Any) -> None:
        for load in [load for load in self._open if not load.used]:
            whole = load.module()
            if whole is None or not any(part is module for part in whole.modules()):
                continue
            load.used = True
            now = dict(whole.named_parameters(remove_duplicate=False))
            if not all(
                same_values(values, plain_values(now.get(name))) for name, values in load.kept.items()
            ):
                self._open.remove(load)  # it was given its weights in another way

    def finish(self) -> None:
        for load in self._open:
            why, fix, edits = load.mend
            if load.used and load.kept:
                self.report(
                    "other-error",
                    f"strict=False, and not one name fits: nothing is loaded into {load.name}, which goes on with the "
                    "weights that it had.",
                    load.place,
                    cause_at(load.place, why),
                    fix=f"{fix}; without strict=False it would have been an error.",
                    op="load_state_dict",
                    once=f"{load.place.file}:{load.place.line}",
                    edits=edits,
                )


def _related(one: nn.Module | None, other: nn.Module) -> bool:
    """Whether one of two modules is the other or a part of it."""
    return one is None or any(m is other for m in one.modules()) or any(m is one for m in other.modules())


def _asked() -> Place | None:
    """The program's line that asks for a load itself, not through a library."""
    outside = (at for at, _ in origin.stack() if not at.file.startswith((origin.TORCH, source.PACKAGE)))
    line = next(outside, None)
    return source.place(line.file, line.line) if line is not None and source.is_user_file(line.file) else None
