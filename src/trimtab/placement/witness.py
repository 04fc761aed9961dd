"""Watches one forward and backward pass through hooks: which modules ran, with gradients or not, and what came back.

It changes nothing in the pass, and is taken off after the first step. What it saw becomes a reason in `cutoff.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_TORCH = str(Path(torch.__file__).parent)
_MEDIA_TOKEN = re.compile(r"(image|video|audio)\w*_token_(id|index)")
_BESIDE_TEXT = ("inputs_embeds", "attention_mask")
"""Floating-point arguments that a batch of nothing but text may have too."""


@dataclass
class Seen:
    """What was seen of one module in the training passes of a step."""

    order: int
    """When it first ran, among all modules."""
    with_gradients: bool = False
    """Whether gradients were switched on when it ran, once at least."""
    off_in: str | None = None
    """The module in whose forward they were switched off; empty: outside all of them."""
    off_at: str = ""
    """The line that called it with gradients off: file:line."""
    function: str | None = None
    """The autograd function that ran it with gradients off: a re-entrant checkpoint."""
    takes: bool = False
    """Whether a tensor that it was given requires a gradient."""
    fed: bool = False
    """Whether it was given a floating-point tensor at all."""
    busy: bool = False
    """Whether one of these had anything in it: a part of a layer may get no token."""
    gives: bool = False
    """Whether its output requires a gradient."""
    answered: bool = False
    """Whether a gradient came back to its output."""
    pulls: list[torch.Tensor] = field(default_factory=list)
    """Of each gradient that came back to it, on its device: whether it was other than zero. Only of what is trained,
    and of the whole model."""
    passed_on: str | None = None
    """The module that got its output without the graph."""


class Witness:
    """Hooks on every module of a model; `remove` takes them off."""

    def __init__(self, model: nn.Module) -> None:
        """`model` is the bare one: its names are those that are told."""
        self.seen: dict[str, Seen] = {}
        self.media: bool | None = None
        """Whether a batch had anything but text; None: no batch was seen."""
        self._inside: list[tuple[str, bool]] = []
        self._outputs: dict[int, tuple[StorageWeakRef, str]] = {}
        self._tokens = _media_tokens(getattr(model, "config", None))
        self.expects_media = bool(self._tokens)
        """Whether the model says that it takes more than text."""
        self._handles: list[Any] = []
        self._modules = dict(_watched(model))
        self.closed = {n: setting for n, m in self._modules.items() if (setting := opened_by(m)) is not None}
        """Layers into which nobody looks, each with the setting that opens it."""
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._outputs = [], {}

    def forget(self) -> None:
        """Start again, for another step."""
        self.seen, self.media, self._inside, self._outputs = {}, None, [], {}

    def closed_around(self, module: str) -> str | None:
        """The closed layer that a module lies in, into which nobody looks."""
        return next((name for name in self.closed if module.startswith(f"{name}.")), None)

    @property
    def pulled(self) -> bool:
        """Whether a loss pulled at the model: a gradient other than zero came back to what it gave."""
        whole = self.seen.get("")
        return whole is not None and any(map(bool, whole.pulls))

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if _in_backward():
                return
            on = torch.is_grad_enabled()
            # Evaluation and generation run whole passes without gradients; only training's are of interest.
            counts = self._inside[0][1] if self._inside else on and module.training
            outer, outer_on = self._inside[-1] if self._inside else ("", on)
            self._inside.append((name, on if self._inside else counts))
            if not counts:
                return
            if not name:
                self._look_at_batch(module, args, kwargs)
            seen = self.seen.setdefault(name, Seen(len(self.seen)))
            seen.with_gradients |= on
            if not on:
                around = None if outer_on else self.seen.get(outer)
                if around is None:
                    seen.off_in = outer
                    seen.function, seen.off_at = _switched_off(self._modules.get(outer))
                else:
                    seen.off_in, seen.function, seen.off_at = around.off_in, around.function, around.off_at
                return
            given = [t for t in tree_leaves((args, kwargs)) if _floating(t)]
            seen.fed |= bool(given)
            seen.busy |= any(t.numel() for t in given)
            seen.takes |= any(t.requires_grad for t in given)
            for tensor in given:
                maker = None if tensor.requires_grad else self._made_by(tensor)
                if maker is not None and self.seen[maker].passed_on is None:
                    self.seen[maker].passed_on = name

        return enter

    def _leave(self, name: str) -> Any:
        own = self._modules[name]
        # What lies inside of an adapted or closed module is not watched by itself.
        innermost = hasattr(own, "base_layer") or is_closed(own) or not any(True for _ in own.children())
        noted = not name or (innermost and any(p.requires_grad for p in own.parameters()))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if _in_backward():
                return
            while self._inside and self._inside.pop()[0] != name:
                pass
            seen = self.seen.get(name)
            if seen is None or not torch.is_grad_enabled():
                return

            def answer(gradient: torch.Tensor | None) -> None:
                if gradient is None:  # autograd came through here for another result of the same function
                    return
                seen.answered = True
                if noted:
                    seen.pulls.append(gradient.detach().any())

            for tensor in tree_leaves(output):
                if _floating(tensor) and tensor.requires_grad:
                    seen.gives = True
                    tensor.register_hook(answer)
                    self._remember(tensor, name)

        return leave

    def _remember(self, tensor: torch.Tensor, name: str) -> None:
        if type(tensor) is torch.Tensor:
            storage = StorageWeakRef(tensor.untyped_storage())
            self._outputs[storage.cdata] = storage, name

    def _made_by(self, tensor: torch.Tensor) -> str | None:
        """The module whose output this is, in the same memory but out of its graph."""
        if type(tensor) is not torch.Tensor:
            return None
        found = self._outputs.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return found[1] if found is not None else None

    def _look_at_batch(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if self._tokens and isinstance(ids, torch.Tensor):
            there = any(bool((ids == token).any()) for token in self._tokens)
        else:
            there = any(
                _floating(t) for k, v in kwargs.items() if k not in _BESIDE_TEXT for t in tree_leaves(v)
            )
        self.media = bool(self.media) or there


def is_closed(module: nn.Module) -> bool:
    """Whether its forward is compiled, or does not call its parts: hooks inside would change what runs."""
    return opened_by(module) is not None


def opened_by(module: nn.Module) -> str | None:
    """The setting with which a closed layer (`fast/blocks.py`, `fast/whole_layers.py`) calls its parts as ever."""
    setting: str | None = getattr(module.__dict__.get("forward"), "opened_by", None)
    return setting


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module, but of an adapted or closed one nothing that lies inside."""

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        yield name, module
        if not hasattr(module, "base_layer") and not is_closed(module):
            for child, inner in module.named_children():
                yield from walk(inner, f"{name}.{child}" if name else child)

    return walk(model, "")


def _media_tokens(config: Any) -> set[int]:
    """Ids of the tokens that stand for pictures, videos and sounds, as the model's config tells them."""
    if config is None:
        return set()
    return {v for k, v in vars(config).items() if _MEDIA_TOKEN.fullmatch(k) and isinstance(v, int)}


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _in_backward() -> bool:
    """Whether this is a checkpoint that computes its part again."""
    return torch._C._current_graph_task_id() != -1


def _switched_off(outer: nn.Module | None) -> tuple[str | None, str]:
    """The autograd function around this call, whose forward runs without gradients, and the line that called it.

    Without such a function it is the line in the forward of `outer`, the last module that ran with gradients.
    """
    frame: FrameType | None = sys._getframe(2)
    function, called, inside = None, "", ""
    while frame is not None:
        code = frame.f_code
        own = code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is outer
        if function is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            # What counts is the line outside that called the function.
            function, called = code.co_qualname.rpartition(".")[0], ""
        elif function is None and own and code.co_name == "_call_impl":
            # Gradients were on here; the function may have been within, around what the module's forward wraps.
            return None, inside or called
        elif not code.co_filename.startswith(_TORCH):
            line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            if own:
                inside = inside or line
            called = called or line
        frame = frame.f_back
    return function, called
