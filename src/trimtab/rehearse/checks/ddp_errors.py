"""The causes of DistributedDataParallel's own errors: what was unused or seen twice, by which line, and what to write.

Asked once an error has come; `checks/ddp.py` watches and gives it what was seen. It raises and records nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.diagnose import flow, mends_ranks, source
from trimtab.diagnose.finding import Cause, Edit, Finding, Place, cause_at
from trimtab.rehearse.checks.base import shown


@dataclass
class Wrapped:
    """A module that DDP has wrapped, and what was seen of it."""

    held: ref[DistributedDataParallel]
    number: int
    inner: WeakSet[nn.Module]
    module: ref[nn.Module] | None = None
    """What was wrapped: it may live on when the wrapper is gone."""
    forwards: int = 0
    """Passes through DDP itself since the last optimizer step."""
    past_it: Place | None = None
    """Where the module inside was called directly, with gradients on, since the last step."""
    collectives: int = 0
    steps: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    """Steps for each set of parameters: of a sharded optimizer every rank steps others."""
    unsynced: Place | None = None
    """Where `no_sync()` was opened around a backward pass since the last step; forgotten when one is synchronised."""
    unused: dict[str, Place | None] = field(default_factory=dict)
    at: Place | None = None
    """The line that wrapped the module."""
    averaged: set[int] = field(default_factory=set)
    """The parameters of which DDP averages the gradients: those that required one then, by id."""
    frozen: set[int] = field(default_factory=set)
    """Those that required none."""
    memory: set[int] = field(default_factory=set)
    """Where the values of all of them lie."""
    written: list[tuple[str, int]] = field(default_factory=list)
    """The program's lines on the stack when something other than an optimizer last wrote into them."""
    gradients: set[int] = field(default_factory=set)
    """Where the averaged gradients of the last backward pass lie."""
    changed: list[tuple[str, int]] = field(default_factory=list)
    """The way to the line that first wrote into them since."""
    buffers: dict[int, str] = field(default_factory=dict)
    """Where its buffers lie, and their names: those that DDP leaves to each rank, and no normalisation's."""
    began: dict[str, list[float]] = field(default_factory=dict)
    """Sums of them as they were wrapped."""
    kept: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """The way to the line that last wrote into each of them."""
    ran: WeakSet[nn.Module] = field(default_factory=WeakSet)
    switched_off: WeakKeyDictionary[nn.Module, Place | None] = field(default_factory=WeakKeyDictionary)
    """The modules inside that ran without gradients, and where they were called."""
    opaque: tuple[str, Place | None] | None = None
    alone: Counter[tuple[Callable[[Place], None], Place]] = field(default_factory=Counter)
    """Steps that were made without a word to the other ranks, and how each is told."""
    left: float | None = None
    """A sum of the weights as a step made alone left them."""
    moved: bool = False
    """Whether something other than a step has changed them since."""
    averagings: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """The trained parameters, by id: at the end of a script the module itself may be gone."""
    own_hook: bool = False


def ready_twice(finding: Finding, entries: list[Wrapped], reentrant: Place | None) -> Finding:
    """A gradient that DDP saw twice: by a re-entrant checkpoint, or in an output that it could not look into."""
    opaque = next((entry.opaque for entry in entries if entry.opaque is not None), None)
    if reentrant is not None and not (finding.edits and finding.cause is not None):
        why = "re-entrant checkpointing runs a backward of its own, in which DDP sees gradients again"
        return replace(finding, cause=cause_at(reentrant, why))
    if opaque is not None and opaque[1] is not None:
        why = f"DDP finds no tensors in a {opaque[0]} and takes every parameter for unused"
        fix = "Return a tensor, tuple, dict or dataclass from forward(), or set find_unused_parameters=False."
        return replace(finding, cause=cause_at(opaque[1], why), fix=fix)
    return finding


def for_another_gpu(finding: Finding, entry: Wrapped, ddp: DistributedDataParallel) -> Finding | None:
    """DDP moves what it is given to device_ids[0]: that has to be where the module is."""
    moved = ddp.device_ids[0] if ddp.device_ids else None
    own = next((p.device for p in ddp.module.parameters()), None)
    if entry.at is None or moved is None or own is None or own.index == moved:
        return None
    why = f"DDP moves its inputs to cuda:{moved} here, and the module is on {own}"
    code, edits = mends_ranks.own_gpu(entry.at)
    fix = f"Name the GPU that the module is on: device_ids=[{code}]."
    return replace(finding, cause=cause_at(entry.at, why), fix=fix, edits=edits)


def unused(
    finding: Finding,
    entry: Wrapped,
    ddp: DistributedDataParallel,
    grad_switched: WeakKeyDictionary[nn.Module, tuple[bool, Place | None]],
) -> Finding:
    """Which parameters had no part in the loss, and the line that left them out."""
    message = f"{finding.message}\nParameters without a gradient: {shown(list(entry.unused))}."
    name, made = next(iter(entry.unused.items()))
    cause = _made_trainable(entry, ddp, grad_switched) or _by_choice(ddp.module, name)
    if cause is not None:
        fix, edits = _looking(entry)
        return replace(finding, message=message, cause=cause, fix=fix or finding.fix, edits=edits)
    path = name.rpartition(".")[0]
    holder = ddp.module.get_submodule(path)
    without = entry.switched_off.get(holder)
    if without is not None and holder not in entry.ran:
        cause = cause_at(flow.switch_around(without.file, without.line) or without, _NO_GRAD)
    idle = made is not None and holder not in entry.ran
    if cause is None and (finding.vague or idle):
        cause = cause_at(made, "made here, but the loss does not use it")
    if not idle or entry.at is None:
        return replace(finding, message=message, cause=cause or finding.cause)
    frozen = mends_ranks.frozen_before(entry.at, _written(_top(ddp.module, entry)))
    fix = (
        f"Freeze what is not used before DDP takes the model ({frozen.text}), leave it out, or let DDP look for it: "
        f"find_unused_parameters=True (line {entry.at.line})."
    )
    return replace(finding, message=message, cause=cause or finding.cause, fix=fix, edits=frozen.edits)


_NO_GRAD = "it runs without gradients here, and DDP waits for them: its parameters are not frozen"


def _looking(entry: Wrapped) -> tuple[str, list[Edit]]:
    if entry.at is None:
        return "", []
    edits = mends_ranks.looking_for_unused(entry.at)
    said = edits[0].text.strip(", ") if edits else "find_unused_parameters=True"
    said = said if "=" in said else f"find_unused_parameters={said}"
    return f"Let DDP look in every step for what the loss does not use: {said} (line {entry.at.line}).", edits


def _top(module: nn.Module, entry: Wrapped) -> str:
    """The outermost module inside of which no parameter was used."""
    names = set(entry.unused)
    name = next(iter(entry.unused))
    parts = name.split(".")[:-1]
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        own = {f"{path}.{n}" for n, p in module.get_submodule(path).named_parameters() if p.requires_grad}
        if own <= names:
            return path
    return name


def _made_trainable(
    entry: Wrapped,
    ddp: DistributedDataParallel,
    grad_switched: WeakKeyDictionary[nn.Module, tuple[bool, Place | None]],
) -> Cause | None:
    found = None
    for path, module in ddp.module.named_modules():
        switched, place = grad_switched.get(module, (False, None))
        inside = any(not path or name.startswith(path + ".") for name in entry.unused)
        if switched and place and inside:
            found = cause_at(place, "made trainable here, but the loss does not use it")
    return found


def _written(path: str) -> str:
    """A path inside a model as Python writes it: layers.2 is layers[2]."""
    parts = [f"[{part}]" if part.isdecimal() else f".{part}" for part in path.split(".")]
    return "".join(parts).lstrip(".")


def _by_choice(module: nn.Module, name: str) -> Cause | None:
    """The condition in the user's own forward on which a layer is used or not, from the outermost owner in."""
    owner: Any = module
    for attribute in name.split("."):
        code = getattr(type(owner).forward, "__code__", None) if isinstance(owner, nn.Module) else None
        if code is not None and source.is_user_file(code.co_filename):
            line = flow.choice_of(code.co_filename, code.co_firstlineno, attribute)
            if line is not None:
                return cause_at(line, f"whether self.{attribute} is used depends on this")
        owner = getattr(owner, attribute, None)
    return None
