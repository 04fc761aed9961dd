"""A compiled piece of a program among the others: what it keeps for its backward pass, and what comes and goes in both.

To autograd a piece is one node, as a graph of torch.compile is: its gradients come all at once, when it has run. The
values are those of the code as it is written, whose own graph the piece holds; of that nothing is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from trimtab.virtual import buffers, functions, inductor, memory
from trimtab.virtual.buffers import Account
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.joint_graph import Cut
from trimtab.virtual.memory import Block
from trimtab.virtual.state import Machine, VirtualDevice
from trimtab.virtual.tensor import INTERNAL, wrap


@dataclass(frozen=True)
class Kept:
    """What is kept for the backward pass and is no input of the piece."""

    buffer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Made:
    """A tensor without values, to be made again."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    """Of its storage, of which it may be a part."""
    unknown: bool

    @classmethod
    def of(cls, tensor: Any) -> Made:
        payload = tensor.payload
        return cls(
            shape=tuple(payload.size()),
            stride=payload.stride(),
            offset=payload.storage_offset(),
            dtype=payload.dtype,
            nbytes=payload.untyped_storage().nbytes(),
            unknown=tensor._block.unknown,
        )

    def tensor(self, device: VirtualDevice, block: Block, storages: dict[int, Any]) -> Any:
        """In the storage that those of its block share."""
        with torch._C.DisableTorchFunction():
            with past_dispatch():
                storage = storages.get(id(block))
                if storage is None:
                    whole = torch.empty(self.nbytes, dtype=torch.uint8, device="meta")
                    storage = storages[id(block)] = whole.untyped_storage()
                payload = torch.empty(0, dtype=self.dtype, device="meta")
                payload.set_(storage, self.offset, self.shape, self.stride)
            block.unknown |= self.unknown
            return wrap(payload, device, block)


@dataclass(frozen=True)
class Plan:
    """What the compiled form of a piece takes of the memory."""

    forward: Account
    backward: Account | None = None
    kept: tuple[Kept, ...] = ()
    kept_inputs: tuple[int, ...] = ()
    """Numbers, in the record, of the inputs that are kept."""
    unsure: str | None = None
    """Why inductor could not be asked for the buffers, if it could not."""
    gradients: tuple[Made | None, ...] | None = None
    """What the backward pass gives, where it can be made again without running it (repeated.py)."""

    def with_gradients(self, made: tuple[Made | None, ...]) -> Plan:
        return replace(self, gradients=made)


def plan_of(cut: Cut, inputs: Sequence[int], device: torch.device) -> Plan:
    """The plan that follows from the graphs of a piece; `inputs` are the numbers of the forward graph's."""
    try:
        return _plan_of(cut, inputs, partial(inductor.account, device=device))
    except inductor.REFUSED as error:
        first = next(iter(str(error).splitlines()), "")[:200]
        plan = _plan_of(cut, inputs, buffers.account)
        return replace(plan, unsure=f"{type(error).__name__}: {first}")


def _plan_of(cut: Cut, inputs: Sequence[int], account: Callable[..., Account]) -> Plan:
    numbers = count()
    forward = account(cut.forward, numbers, {}, own=cut.outputs)
    if cut.backward is None:
        return Plan(forward)
    results: Any = next(node for node in cut.forward.nodes if node.op == "output").args[0]
    names = [node.name for node in cut.forward.nodes if node.op == "placeholder"]
    kept: dict[int, Kept] = {}
    kept_inputs: dict[int, None] = {}
    held: dict[str, int] = {}
    own = {buffer for buffer in forward.results[: cut.outputs] if isinstance(buffer, int)}
    for node, buffer in zip(results[cut.outputs :], forward.results[cut.outputs :], strict=True):
        if isinstance(buffer, str):
            kept_inputs[inputs[names.index(buffer)]] = None
        elif buffer is not None:
            value = node.meta["val"]
            kept.setdefault(buffer, Kept(buffer, tuple(value.shape), value.dtype))
            if buffer not in own:
                held[node.name] = buffer
    backward = account(cut.backward, numbers, held, own=None)
    return Plan(forward, backward, tuple(kept.values()), tuple(kept_inputs))


@dataclass(eq=False)
class Piece:
    """One run of a compiled piece."""

    plan: Plan
    device: VirtualDevice
    outputs: list[Any] | None = None
    """Those that have a gradient, with the history of the code as it ran; None where it did not (repeated.py)."""
    inputs: Sequence[Any] = ()
    """What gets a gradient."""


class _Anchor(Block):
    """A block of no bytes that holds a piece: it lives for as long as what is kept of the piece."""

    __slots__ = ("piece",)

    piece: Piece


@contextmanager
def aside(device: VirtualDevice) -> Iterator[VirtualDevice]:
    """What is made on a device meanwhile is counted on another, at which nobody looks."""
    other = VirtualDevice(device.index, device.name, 1 << 60, device.capability)
    other.watch = other.total_bytes  # nor does anybody ask who allocates there
    before, device.aside = device.aside, other
    try:
        yield other
    finally:
        device.aside = before


class _Here(threading.local):
    on_host = False


HERE = _Here()
"""Of each thread: whether what runs is on the host, by itself (`on_host`)."""


@contextmanager
def on_host() -> Iterator[None]:
    """What is compiled runs as it is written meanwhile: kernels for the CPU, of which no GPU has anything."""
    before, HERE.on_host = HERE.on_host, True
    try:
        yield
    finally:
        HERE.on_host = before


def run_through(account: Account, device: VirtualDevice, blocks: dict[int, Block]) -> dict[int, Block]:
    """Let the buffers of an account come and go; gives those that are left."""
    for buffer, nbytes in account.steps:
        if buffer >= 0:
            blocks[buffer] = Block(device, nbytes)
        elif (block := blocks.pop(~buffer, None)) is not None:
            memory.release(block)
    return blocks


def outside(value: Any, block: Block | None) -> Any:
    """A result of a piece as the program gets it: counted, and without the history of the code as it ran."""
    if block is None:
        block = value._block
        count_now(value)
    else:
        block.unknown |= value._block.unknown
    with torch._C.DisableTorchFunction():  # nobody is to be told what is asked of a payload
        made = wrap(value.payload, value._slot, block)
    for name, attribute in value.__dict__.items():
        if name not in INTERNAL and name != "_number":
            made.__dict__[name] = attribute
    return made


def count_now(tensor: Any) -> None:
    """What was made aside is counted from here on."""
    if tensor._block.device is not tensor._slot:
        memory.move(tensor._block, tensor._slot)


def kept_tensors(machine: Machine, piece: Piece, blocks: dict[int, Block]) -> list[Any]:
    """Tensors that stand for what the compiled form keeps."""
    made = []
    for kept in piece.plan.kept:
        with torch._C.DisableTorchFunction():
            with past_dispatch():
                payload = torch.empty(
                    kept.shape, dtype=kept.dtype, device="meta" if machine.shapes else "cpu"
                )
            made.append(wrap(payload, piece.device, blocks[kept.buffer]))
    return made


def gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], given: Sequence[Any], *, again: bool
) -> Sequence[Any]:
    """The gradients by autograd, past those who listen to a program's backward passes."""
    engine = torch.autograd.Variable._execution_engine
    with functions.switched_on():
        return engine.run_backward(
            tuple(outputs),
            tuple(given),
            again,
            False,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=False,
        )


class Node(torch.autograd.Function):
    """A compiled piece in the graph of autograd."""

    @staticmethod
    def forward(
        ctx: Any, piece: Piece, kept: list[Any], kept_inputs: list[Any], outputs: list[Any], *sources: Any
    ) -> Any:
        anchor = _Anchor(piece.device, 0)
        anchor.piece = piece
        with torch._C.DisableTorchFunction(), past_dispatch():
            empty = torch.empty(0, device="cpu")
        # By what is saved checkpointing drops the piece, and has another made in its place.
        ctx.save_for_backward(wrap(empty, piece.device, anchor), *kept, *kept_inputs)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        recomputed = hooks is None or hooks[0].__module__.startswith("torch.utils.checkpoint")
        ctx.piece = None if recomputed else piece  # offloading gives copies back
        ctx.plan, ctx.device = piece.plan, piece.device
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *given: Any) -> Any:
        saved, plan, device = ctx.saved_tensors, ctx.plan, ctx.device
        piece: Piece = ctx.piece or saved[0]._block.piece
        blocks = {kept.buffer: tensor._block for kept, tensor in zip(plan.kept, saved[1:], strict=False)}
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        found: Sequence[Any] = ()
        if piece.outputs is not None:
            with aside(device):
                found = gradients(piece.outputs, piece.inputs, given, again=again)
        left = run_through(plan.backward, device, {} if again else blocks)
        buffers_made = plan.backward.results
        if piece.outputs is None:
            storages: dict[int, Any] = {}
            known = zip(plan.gradients, buffers_made, strict=True)
            made = [
                None if one is None else one.tensor(device, left[buffer], storages) for one, buffer in known
            ]
        else:
            results = zip(found, buffers_made, strict=True)
            made = [None if value is None else outside(value, left.get(buffer)) for value, buffer in results]
        return None, None, None, None, *made


class Enter(torch.autograd.Function):
    """The memory of a tensor as another tensor, which may be written to in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return twin(tensor)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given


def twin(tensor: Any) -> Any:
    """The same memory as a tensor of its own, which is not counted."""
    with torch._C.DisableTorchFunction():
        made = wrap(tensor.payload, tensor._slot, Block(tensor._slot, tensor._block.nbytes))
    made._block.unknown = tensor._block.unknown
    for name, value in tensor.__dict__.items():
        if name not in INTERNAL:
            made.__dict__[name] = value
    return made
