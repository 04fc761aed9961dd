"""torch.compile on virtual GPUs: the values of the code as it is written, the memory of what the compiler makes of it.

A piece that is to be compiled runs as it is while its operations are written down (recorded.py), and nothing that it
makes is counted. Of a piece that is met for the first time the backward pass is tried at once, and both are made into
the graphs that torch.compile would make (joint_graph.py) with the buffers that inductor would have (buffers.py). What
comes and goes by them is then counted: in the forward pass, for what is kept, and in the backward pass. Where no graph
can be made the code is counted as it runs, and whoever listens is told so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trimtab.virtual import functions, joint_graph, memory, recorded, state
from trimtab.virtual.buffers import Account, account
from trimtab.virtual.memory import Block
from trimtab.virtual.recorded import Recorder
from trimtab.virtual.state import Machine, Patch, VirtualDevice
from trimtab.virtual.tensor import INTERNAL, VIRTUAL, wrap

_running: list[Recorder] = []
_plans: dict[Any, Plan | str] = {}
_told: set[str] = set()


@dataclass(frozen=True)
class Plan:
    """What the compiled form of a piece takes of the memory."""

    forward: Account
    backward: Account | None
    outputs: int
    kept: tuple[tuple[int | None, Any, Any], ...]
    """What is kept for the backward pass and is no input: its buffer, shape and type."""
    kept_inputs: tuple[int, ...]
    """Numbers, in the record, of the inputs that are kept."""


class Anchor(Block):
    """A block of no bytes that holds a piece for as long as what is kept of it lives."""

    __slots__ = ("piece",)

    piece: Piece


@dataclass(eq=False)
class Piece:
    """One run of a compiled piece, with the graph by which autograd computes its gradients."""

    plan: Plan
    device: VirtualDevice
    outputs: list[Any]
    inputs: list[Any]
    """What gets a gradient."""
    blocks: dict[int, Block]


class Compiled:
    """What torch.compile returns for a function."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self._function, self._settings = function, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        machine = state.machine()
        if machine is None or _running or not machine.devices:
            return self._function(*args, **kwargs)
        return _run(machine, self._function, self._settings, args, kwargs)


@dataclass(frozen=True)
class Settings:
    """How a piece is to be compiled."""

    backend: Any = "inductor"
    fullgraph: bool = False


def _run(machine: Machine, function: Any, settings: Settings, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    device = _device_of(machine, function, leaves)
    with ExitStack() as undo:
        aside = undo.enter_context(_aside(device))
        recorder = Recorder(aside, lambda why: _count_from_here(recorder, device, function, why))
        entered = _entered(leaves, device)
        undo.enter_context(_own_hooks())
        undo.enter_context(_compiling())
        _running.append(recorder)
        undo.callback(_running.pop)
        given, named = pytree.tree_unflatten(entered, spec)
        with recorder:
            out = function(*given, **named)
        returned, form = pytree.tree_flatten(out)
        if not recorder.on:
            return out
        made = _finished(machine, device, recorder, function, settings, leaves, entered, returned)
    if made is None:
        return out
    return pytree.tree_unflatten(made(), form)


def _device_of(machine: Machine, function: Any, leaves: list[Any]) -> VirtualDevice:
    for leaf in leaves:
        if leaf.__class__ in VIRTUAL and leaf._slot.index != state.HOST:
            slot: VirtualDevice = leaf._slot
            return slot
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        for parameter in owner.parameters():
            if parameter.__class__ in VIRTUAL and parameter._slot.index != state.HOST:  # type: ignore[attr-defined]
                return parameter._slot  # type: ignore[attr-defined,no-any-return]
    return machine.at(None)


@contextmanager
def _aside(device: VirtualDevice) -> Iterator[VirtualDevice]:
    """What is made on a device meanwhile is counted on another, at which nobody looks."""
    aside = VirtualDevice(device.index, device.name, 1 << 60, device.capability)
    before, device.aside = device.aside, aside
    try:
        yield aside
    finally:
        device.aside = before


@contextmanager
def _compiling() -> Iterator[None]:
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _own_hooks() -> Any:
    """Hooks for what autograd keeps (checkpointing, offloading) are for what the compiled form keeps."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(value: Tensor) -> Tensor:
    return value


class _Enter(torch.autograd.Function):
    """The same memory as a tensor of its own, which may be written to in place."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Any:
        return tuple(_twin(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def _twin(tensor: Any) -> Any:
    made = wrap(tensor.payload, tensor._slot, Block(tensor._slot, tensor._block.nbytes))
    made._block.unknown = tensor._block.unknown
    made.__class__ = tensor.__class__
    for name, value in tensor.__dict__.items():
        if name not in INTERNAL:
            made.__dict__[name] = value
    return made


def _entered(leaves: list[Any], device: VirtualDevice) -> list[Any]:
    """The arguments as tensors of their own: what the piece keeps of them is not what its compiled form keeps."""
    entered = list(leaves)
    twins: dict[int, Any] = {}
    for place, leaf in enumerate(leaves):
        if leaf.__class__ not in VIRTUAL or leaf._slot is not device or isinstance(leaf, nn.Parameter):
            continue
        if id(leaf) not in twins:
            wanted = leaf.requires_grad and torch.is_grad_enabled()
            twins[id(leaf)] = _Enter.apply(leaf)[0] if wanted else _twin(leaf)
        entered[place] = twins[id(leaf)]
    return entered


def _count_from_here(recorder: Recorder, device: VirtualDevice, function: Any, why: str) -> None:
    """No compiler takes the piece as it is: what lives is counted from here on, as the code runs."""
    device.aside = None
    for tensor in recorder.alive():
        if tensor._block.device is not tensor._slot:
            memory.move(tensor._block, tensor._slot)
    _tell(f"{_called(function)} is not counted as torch.compile would have it: {why}; its memory is that of the code as it runs")


def _tell(text: str) -> None:
    machine = state.machine()
    if machine is not None and machine.observer is not None and text not in _told:
        _told.add(text)
        machine.observer.note(text)


def _called(function: Any) -> str:
    owner = getattr(function, "__self__", function)
    return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(function, "__qualname__", repr(function))


def _finished(
    machine: Machine,
    device: VirtualDevice,
    recorder: Recorder,
    function: Any,
    settings: Settings,
    leaves: list[Any],
    entered: list[Any],
    returned: list[Any],
) -> Callable[[], list[Any]] | None:
    """What gives the results of the piece, counted as compiled; None where that cannot be."""
    own = {id(twin): leaf for twin, leaf in zip(entered, leaves, strict=True) if twin is not leaf}
    fresh = [value for value in returned if value.__class__ in VIRTUAL and value._block.device is device.aside]
    fresh = [value for value in fresh if id(value) not in own]
    trained = [value for value in fresh if value.requires_grad]
    numbers = [recorder.number(value) for value in fresh]
    inputs = [value for value in recorder.record.inputs.values() if isinstance(value, Tensor) and value.requires_grad]
    if not trained:
        inputs = []
    forward = len(recorder.record.entries)
    key = (recorder.record.key(), tuple(numbers), tuple(map(id, ())), settings.backend, *_budget())
    key = (*key, tuple(value.requires_grad for value in fresh))
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _planned(recorder, device, settings, numbers, fresh, trained, inputs, forward)
    if isinstance(plan, str):
        _count_from_here(recorder, device, function, plan)
        return None
    for twin, leaf in zip(entered, leaves, strict=True):
        if twin is not leaf:
            leaf._block.unknown |= twin._block.unknown
    order = {number: value for number, value in recorder.record.inputs.items()}
    known, kept = plan, [order[number] for number in plan.kept_inputs]
    kept = [own.get(id(value), value) for value in kept]
    sources = [own.get(id(value), value) for value in inputs]

    def results() -> list[Any]:
        blocks = _replayed(known.forward, device, {})
        done: dict[int, Any] = {}
        for value, number in zip(fresh, known.forward.results, strict=False):
            block = blocks.get(number) if isinstance(number, int) else None
            done[id(value)] = _dressed(value, block)
        if trained:
            piece = Piece(known, device, trained, inputs, {})
            kept_ones = [_kept(machine, device, blocks, *one) for one in known.kept]
            wrapped = [done[id(value)] for value in trained]
            outs = _Region.apply(piece, kept_ones, kept, wrapped, *sources)
            for value, out in zip(trained, outs, strict=True):
                done[id(value)] = out
        return [done.get(id(value), own.get(id(value), value)) for value in returned]

    return results


def _dressed(value: Any, block: Block | None) -> Any:
    """A result outside of its piece: counted, without the piece's own history."""
    if block is None:
        block = value._block
        if block.device is not value._slot:
            memory.move(block, value._slot)
    made = wrap(value.payload, value._slot, block)
    block.unknown |= value._block.unknown
    for name, attribute in value.__dict__.items():
        if name not in INTERNAL and name != "_number":
            made.__dict__[name] = attribute
    return made


def _kept(machine: Machine, device: VirtualDevice, blocks: dict[int, Block], number: Any, shape: Any, dtype: Any) -> Any:
    """A tensor that stands for one that the compiled form keeps."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        payload = torch.empty(shape, dtype=dtype, device="meta" if machine.shapes else "cpu")
    return wrap(payload, device, blocks.get(number) or Block(device, 0))


def _replayed(plan: Account, device: VirtualDevice, blocks: dict[int, Block]) -> dict[int, Block]:
    """Let the buffers of an account come and go; what is left."""
    for number, nbytes in plan.steps:
        if number >= 0:
            blocks[number] = Block(device, nbytes)
        elif (block := blocks.pop(~number, None)) is not None:
            memory.release(block)
    return blocks


class _Region(torch.autograd.Function):
    """A compiled piece in the graph of autograd."""

    @staticmethod
    def forward(ctx: Any, piece: Piece, kept: list[Any], kept_inputs: list[Any], outputs: list[Any], *sources: Any) -> Any:
        anchor = Anchor(piece.device, 0)
        anchor.piece = piece
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            empty = torch.empty(0, device="cpu")
        ctx.save_for_backward(wrap(empty, piece.device, anchor), *kept, *kept_inputs)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        ctx.piece = None
        if hooks is not None and not hooks[0].__module__.startswith("torch.utils.checkpoint"):
            ctx.piece = piece  # what is unpacked is a copy, and not what was packed
        ctx.count, ctx.plan = len(kept), piece.plan
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors
        piece: Piece = ctx.piece or saved[0]._block.piece
        blocks = {
            number: tensor._block
            for (number, *_), tensor in zip(ctx.plan.kept, saved[1 : 1 + ctx.count], strict=True)
            if number is not None
        }
        again = torch._C._autograd._get_current_graph_task_keep_graph()
        device, known = piece.device, ctx.plan.backward
        with _aside(device):
            found = _gradients(piece.outputs, piece.inputs, gradients, keep=again)
        if again:
            # Once more later: what is kept stays.
            blocks = {number: Block(device, block.nbytes) for number, block in blocks.items()}
        left = _replayed(known, device, blocks)
        made = []
        for value, number in zip(found, known.results, strict=True):
            if value is None:
                made.append(None)
                continue
            made.append(_dressed(value, left.get(number) if isinstance(number, int) else None))
        return None, None, None, None, *made


def _gradients(outputs: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any], *, keep: bool) -> Sequence[Any]:
    """The gradients by autograd, past those who listen to a program's backward passes."""
    engine = torch.autograd.Variable._execution_engine
    with functions.switched_on():
        return engine.run_backward(  # type: ignore[no-any-return]
            tuple(outputs), tuple(gradients), keep, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )


def _budget() -> tuple[Any, ...]:
    from torch._functorch import config

    return (config.activation_memory_budget,)


def _planned(
    recorder: Recorder,
    device: VirtualDevice,
    settings: Settings,
    numbers: list[int],
    fresh: list[Any],
    trained: list[Any],
    inputs: list[Any],
    forward: int,
) -> Plan | str:
    """The plan of a piece that is met for the first time, or why there is none."""
    tangents: list[int] = []
    gradients: list[int | None] = []
    if trained:
        began = torch.random.get_rng_state()
        shapes = [torch.zeros_like(value) for value in trained]
        tangents = [recorder.number(value) for value in shapes]
        with recorder:
            found = _gradients(trained, inputs, shapes, keep=True)
        if not recorder.on:
            return "its backward pass cannot be compiled"
        gradients = [None if value is None else recorder.number(value) for value in found]
        torch.random.set_rng_state(began)
    record = recorder.record

    def make() -> Plan | str:
        try:
            made = joint_graph.cut(record, numbers, tangents, gradients)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
            first = next(iter(str(error).splitlines()), "")[:200]
            return f"torch cannot make its graph ({type(error).__name__}: {first})"
        return _plan_of(made, [number for number in record.inputs if number not in set(tangents)])

    with _plain_torch():
        if settings.backend == "inductor":
            return make()
        return _by_backend(settings.backend, joint_graph.plain(record, numbers, forward), make)


def _by_backend(backend: Any, graph: torch.fx.GraphModule, make: Callable[[], Plan | str]) -> Plan | str:
    """The plan as a program's own backend has it made: it calls inductor, under settings of its own."""
    called = getattr(backend, "__name__", str(backend))
    if not callable(backend):
        return f"its backend is {called}"
    from torch._inductor import compile_fx

    found: list[Plan | str] = []

    def in_its_place(graph: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        found.append(make())
        return graph

    with ExitStack() as undo:
        state.replace(undo, compile_fx, "compile_fx", in_its_place)
        backend(graph, [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
    return found[0] if found else f"its backend {called} does not call inductor"


def _plan_of(made: joint_graph.Cut, primals: list[int]) -> Plan:
    ids = count()
    forward = account(made.forward, ids, {})
    if made.backward is None:
        return Plan(forward, None, made.outputs, (), ())
    nodes: Any = next(node for node in made.forward.nodes if node.op == "output").args[0]
    places = [node.name for node in made.forward.nodes if node.op == "placeholder"]
    kept, kept_inputs, held, seen = [], [], {}, set()
    for node, number in zip(nodes[made.outputs :], forward.results[made.outputs :], strict=True):
        value = node.meta.get("val")
        if isinstance(number, str):
            kept_inputs.append(primals[places.index(number)])
        elif isinstance(number, int):
            held[node.name] = number
            if number not in seen:
                kept.append((number, tuple(value.shape), value.dtype))
                seen.add(number)
    own = {number for number in forward.results[: made.outputs] if isinstance(number, int)}
    backward = account(made.backward, ids, {name: n for name, n in held.items() if n not in own})
    return Plan(forward, backward, made.outputs, tuple(kept), tuple(dict.fromkeys(kept_inputs)))


@contextmanager
def _plain_torch() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def is_running() -> bool:
    """Whether a compiled piece runs, and is being written down."""
    return bool(_running)


def launched(name: str, tensors: list[Tensor], written: tuple[int, ...]) -> None:
    """A kernel was launched that is no operation of torch: a piece that is running has it."""
    if _running:
        _running[-1].launched(name, tensors, written)


def patches(machine: Machine) -> list[Patch]:
    return [(torch, "compile", _compile(torch.compile))]


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda model: compile(model, **options)
        backend = options.get("backend") or "inductor"
        if options.get("disable") or backend == "eager":
            return original(model, **options)
        settings = Settings(backend, bool(options.get("fullgraph")))
        if not isinstance(model, nn.Module):
            made = Compiled(model, settings)
            functools.update_wrapper(made, model, updated=())
            return made
        module: Any = original(model, **options)
        module.forward = Compiled(model.__call__, settings)
        return module

    return compile
