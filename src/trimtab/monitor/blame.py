"""Finds the first module that makes a number which is not finite, by running a pass once more under hooks.

It asks the device after every module, so it is slow; it is for a run that has ended. It changes no weight, and says so
where the second time nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trimtab.monitor.norms import local

Kind = Literal["input", "weights", "forward", "loss", "backward", "nothing"]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class Blame:
    """Where a number went wrong first."""

    kind: Kind
    """`input`: in the batch; `weights`: in a tensor of the model; `forward`, `backward`: in a module's computation;
    `loss`: in what is made of the model's finite outputs; `nothing`: the second time all was finite."""
    where: str = ""
    """The module, the batch's tensor or the weight."""
    said: str = ""
    """The facts, as a clause: precision, sizes, rows."""
    precision: str = ""


def bad_weights(model: nn.Module) -> list[tuple[str, int, int]]:
    """Weights and buffers that hold NaN or infinity: name, how many of their values, of how many."""
    found = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        own = local(tensor.detach())
        if not own.is_floating_point() or own.element_size() < 2 or own.device.type == "meta":
            continue
        finite = own.isfinite()
        # A buffer may be a mask, of minus infinity.
        if not finite.all() and (isinstance(tensor, nn.Parameter) or _broken(own)):
            found.append((name, int((~finite).sum()), own.numel()))
    return found


def bad_inputs(inputs: Mapping[str, Any]) -> Blame | None:
    """A tensor of the batch that is not finite, with its rows."""
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and _broken(value):
            rows = (~value.isfinite()).reshape(len(value), -1).any(1).nonzero().flatten().tolist()
            shown = ", ".join(str(row + 1) for row in rows[:5]) + (" …" if len(rows) > 5 else "")
            kind = "NaN" if value.isnan().any() else "infinity"
            return Blame("input", name, f"holds {kind} in row {shown} of {len(value)}", _name(value.dtype))
    return None


def blame(again: Callable[[], torch.Tensor], model: nn.Module, *, backward: bool = True) -> Blame:
    """Run it again, `model` under hooks; the names told are those of `model`. `again` gives the loss."""
    for parameter in model.parameters():
        parameter.grad = None  # what the bad step has left
    watch = _Watch(model)
    with watch.on(), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        loss = again()
        if watch.first is None and bool(loss.detach().isfinite().all()) and backward and loss.requires_grad:
            loss.sum().backward()
    if watch.first is not None:
        return watch.first
    if not bool(loss.detach().isfinite().all()):
        said = (
            f"every output of the model is finite, and the loss made of them is {loss.detach().sum().item()}"
        )
        return watch.lowest or Blame("loss", "the loss", said, _name(loss.dtype))
    return watch.behind() or Blame("nothing")


class _Watch:
    """Hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.first: Blame | None = None
        self.lowest: Blame | None = None
        """The first minus infinity: a mask, as a rule, and no fault."""
        self._back: dict[str, list[bool]] = {}
        """In the order of the backward pass: whether the gradient of each module's output was finite."""
        self._largest: dict[str, float] = {}
        """The largest finite gradient, by precision."""
        self._given: dict[str, float] = {}
        """The largest value that the parts of each module have given so far."""

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = []
        for name, module in self._modules.items():
            handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.first is None and any(map(_broken, _floats((args, kwargs)))):
                # No module before it gave it: the code around it did.
                around = name.rpartition(".")[0] or type(self._modules[""]).__name__
                said = f"in its own forward, before {name or 'the model'}"
                if (most := self._given.get(name.rpartition(".")[0])) is not None:
                    said += f"; its parts gave up to {most:.3g}"
                self.first = Blame("forward", around, said, _precision(args, kwargs))

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = _floats(output)
            if self.first is None and any(map(_broken, given)):
                self.first = self._blamed(name, module, args, kwargs, output)
            elif self.first is None and name:
                around = name.rpartition(".")[0]
                self._given[around] = max(self._given.get(around, 0.0), _largest(given) or 0.0)
            if self.lowest is None and any(not bool(t.isfinite().all()) for t in given):
                self.lowest = Blame(
                    "forward", name or "the model", _facts(module, args, kwargs), _precision(output)
                )
            handed_on = set(map(id, _floats((args, kwargs))))
            for tensor in given:
                # A module that gives what it was given (no dropout) has no part in it.
                if tensor.requires_grad and id(tensor) not in handed_on:
                    tensor.register_hook(self._answer(name, tensor.dtype))

        return leave

    def _blamed(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Blame:
        own = [n for n, p in module.named_parameters() if not bool(local(p.detach()).isfinite().all())]
        if own:
            return Blame("weights", f"{name}.{own[0]}".lstrip("."), "", _precision(output))
        return Blame("forward", name or "the model", _facts(module, args, kwargs), _precision(output))

    def _answer(self, name: str, dtype: torch.dtype) -> Any:
        def answer(gradient: torch.Tensor) -> None:
            finite = bool(gradient.isfinite().all())
            self._back.setdefault(name, []).append(finite)
            if finite:
                kind = _name(dtype)
                self._largest[kind] = max(self._largest.get(kind, 0.0), _largest([gradient]) or 0.0)

        return answer

    def behind(self) -> Blame | None:
        """The last module of the backward pass that still got a finite gradient before the first that did not."""
        sound = ""
        for name, finite in self._back.items():
            if all(finite):
                # A part and the whole that ends in it share an output: the part is told.
                sound = sound if sound.startswith(f"{name}.") else name or sound
                continue
            told = ", ".join(f"gradients up to {most:.3g} in {kind}" for kind, most in self._largest.items())
            where = sound or name or "the loss"
            return Blame("backward", where, told, next(iter(self._largest), ""))
        return self._by_parameter()

    def _by_parameter(self) -> Blame | None:
        """Gradients of outputs were all finite; one of a weight is not."""
        for name, module in reversed(self._modules.items()):
            for own, p in module.named_parameters(recurse=False):
                if p.grad is not None and not bool(local(p.grad).isfinite().all()):
                    return Blame("backward", f"{name}.{own}".lstrip("."), "", _name(p.grad.dtype))
        return None


def _floats(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(values)
    found = [v for v in leaves if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel()]
    return [v for v in found if v.element_size() > 1]  # quantised to 8 bits, it has no infinity to look for


def _broken(tensor: torch.Tensor) -> bool:
    """Whether it holds NaN or infinity. Minus infinity is how a mask says no."""
    return bool((tensor.detach().isnan() | tensor.detach().isposinf()).any())


def _facts(module: nn.Module, args: Any, kwargs: Any) -> str:
    """How large what it was given is, and what it multiplies by."""
    given = _largest(_floats((args, kwargs)))
    own = _largest([local(p.detach()) for p in module.parameters(recurse=False)])
    parts = [f"inputs up to {given:.3g}"] if given is not None else []
    parts += [f"weights up to {own:.3g}"] if own is not None else []
    return ", ".join(parts)


def _largest(tensors: list[torch.Tensor]) -> float | None:
    sizes = [tensor.detach().to(torch.float32).abs() for tensor in tensors if tensor.numel()]
    found = [float(size[size.isfinite()].max()) for size in sizes if bool(size.isfinite().any())]
    return max(found, default=None)


def _precision(*values: Any) -> str:
    kinds = [_name(tensor.dtype) for tensor in _floats(values)]
    return kinds[0] if kinds else ""


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))
