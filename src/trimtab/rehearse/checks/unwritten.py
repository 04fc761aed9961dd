"""Memory that `Module.to_empty` reserved and nobody wrote to, in modules that are run, trained or saved.

What `to_empty` gives is filled with NaN here: on hardware it holds whatever was there. A forward pass whose inputs are
numbers and whose result is not has read it. What is never read may be a workspace (a cache that is written before it
is read): of that, only what is trained or saved is a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab.diagnose.finding import Place, cause_at
from trimtab.rehearse import places
from trimtab.rehearse.checks.base import BaseCheck, around, shown, trained_by
from trimtab.rehearse.checks.sources import wide
from trimtab.virtual.tensor import payload_of
from trimtab.virtual.unknown import is_unknown

_LOOKS = 4
"""Forward passes of each module that are looked at."""


class Unwritten(BaseCheck):
    """Follows the modules that were emptied until all of their memory is written, or told of."""

    def install(self) -> None:
        self._emptied: WeakKeyDictionary[nn.Module, tuple[Place, ref[nn.Module], int]] = WeakKeyDictionary()
        """Where each module was emptied, as part of which one, and how often it was run since."""
        self._clean_input: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._told: set[int] = set()
        self._stepped: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        around(nn.Module, "to_empty", self._to_empty)
        around(torch, "save", self._save)
        nn.modules.module.register_module_forward_pre_hook(self._before)
        nn.modules.module.register_module_forward_hook(self._after, always_call=True)
        register_optimizer_step_pre_hook(self._step)

    def _to_empty(self, real: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = real(module, *args, **kwargs)
        place = places.here()
        if place is not None:
            for child in module.modules():
                self._emptied[child] = (place, ref(module), 0)
                for tensor in tensors_of(child).values():
                    fill(tensor)
        return result

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._emptied and module in self._emptied:
            self._clean_input[module] = not _some_nan(args)

    def _after(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._emptied or (known := self._emptied.get(module)) is None:
            return
        place, root, looks = known
        names = [name for name, tensor in tensors_of(module).items() if all_nan(tensor)]
        if not names:
            self._emptied.pop(module)
            return
        self._emptied[module] = (place, root, looks + 1)
        # Without a result it failed: what it held may well be why.
        read = result is None or _some_nan(result)
        if read and self._clean_input.get(module, True) and not self._inside_was_told(module):
            self._tell(module, names, place, "Used before anything was written to it")
        elif looks + 1 >= _LOOKS:
            self._emptied.pop(module)

    def _inside_was_told(self, module: nn.Module) -> bool:
        return any(id(child) in self._told for child in module.modules())

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._emptied or optimizer in self._stepped:
            return
        self._stepped[optimizer] = True
        trained = {id(parameter) for parameter in trained_by(optimizer)}
        for module, (place, _, _) in list(self._emptied.items()):
            held = module.named_parameters(recurse=False)
            names = [name for name, p in held if id(p) in trained and all_nan(p)]
            if names:
                self._tell(module, names, place, "Trained, and nothing was ever written to it")

    def _save(self, real: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any) -> Any:
        if self._emptied:
            given = {
                _address(t) for t in torch.utils._pytree.tree_leaves(saved) if isinstance(t, torch.Tensor)
            }
            for module, (place, _, _) in list(self._emptied.items()):
                kept = {n: t for n, t in tensors_of(module).items() if _address(t) in given and all_nan(t)}
                if kept:
                    self._tell(module, list(kept), place, "Saved, and nothing was ever written to it")
        return real(saved, *args, **kwargs)

    def finish(self) -> None:
        """Buffers of a model that was trained, and that nothing has run: it may be read when the model is used."""
        for module, (place, root, looks) in list(self._emptied.items()):
            whole = root()
            if looks or whole is None or not self._stepped or not self._is_trained(whole):
                continue
            names = [name for name, buffer in module.named_buffers(recurse=False) if all_nan(buffer)]
            if names:
                self._tell(module, names, place, "Never written to, nor read in this run", severe=False)

    def _is_trained(self, whole: nn.Module) -> bool:
        mine = {id(parameter) for parameter in whole.parameters()}
        return any(
            id(parameter) in mine for optimizer in self._stepped for parameter in trained_by(optimizer)
        )

    def _tell(
        self, module: nn.Module, names: list[str], place: Place, what: str, *, severe: bool = True
    ) -> None:
        self._emptied.pop(module, None)
        self._told.add(id(module))
        owner = type(module).__name__
        self.report(
            "garbage-buffer",
            f"{what}: {shown(names)} of {owner}. It holds whatever was in memory.",
            place,
            cause_at(place, "this reserves memory and gives it no values"),
            fix="Give it values after to_empty(): load_state_dict(), reset_parameters(), nn.init.*; buffers that are "
            "not in the state dict have to be computed again.",
            op="to_empty",
            module=owner,
            severity="fault" if severe else "warning",
        )


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def _address(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    values = payload_of(local)
    return 0 if values.is_meta or values.layout is not torch.strided else values.data_ptr()


def fill(tensor: Any) -> bool:
    """Make unwritten memory visible. Whole numbers have no NaN and stay as they are."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or not tensor.numel():
        return False
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or is_unknown(tensor):
        return False
    with torch.no_grad():
        tensor.detach().fill_(float("nan"))
    return True


def all_nan(tensor: torch.Tensor) -> bool:
    """Whether a tensor still holds what `fill` gave it."""
    if (
        not tensor.is_floating_point()
        or tensor.device.type == "meta"
        or not tensor.numel()
        or is_unknown(tensor)
    ):
        return False
    with torch.no_grad():
        return bool(torch.isnan(wide(tensor)).all())


def _some_nan(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
    with torch.no_grad():
        return any(
            bool(torch.isnan(wide(t)).any())
            for t in floats
            if t.device.type != "meta" and t.numel() and not is_unknown(t)
        )
