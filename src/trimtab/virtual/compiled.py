"""torch.compile on virtual GPUs: the values of the code as it is written, the memory of what the compiler makes of it.

A piece that is to be compiled runs as it is while its operations are written down (recorded.py), and nothing that it
makes is counted. When it is met for the first time its backward pass is tried at once, and both are made into the
graphs that torch.compile would make (joint_graph.py), with the buffers that inductor would have (buffers.py). What
comes and goes by them is then counted (pieces.py). Where no such graph can be made the code is counted as it runs, and
whoever listens is told so. Nothing is compiled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from trimtab.virtual import functions, joint_graph, looked_at, pieces, repeated, state
from trimtab.virtual.face import ABOVE
from trimtab.virtual.held_modes import taken_away
from trimtab.virtual.pieces import Piece, Plan
from trimtab.virtual.recorded import Recorder
from trimtab.virtual.state import Machine, Patch, VirtualDevice
from trimtab.virtual.tensor import INTERNAL, VIRTUAL, wrap

_running: list[Recorder] = []
_plans: dict[Any, Plan | str] = {}
"""The plan of each piece that was met; or why there is none."""
_plain: WeakKeyDictionary[Machine, set[Any]] = WeakKeyDictionary()
"""Functions that are counted as they run."""
_told: WeakKeyDictionary[Machine, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """How a function is to be compiled."""

    backend: Any = "inductor"
    fullgraph: bool = False


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
        if options.get("mode") in ("reduce-overhead", "max-autotune"):
            _tell(
                f"the memory that CUDA graphs hold (torch.compile with mode={options['mode']!r}) is not counted"
            )
        if not isinstance(model, nn.Module):
            return _counted(model, settings)
        module: Any = original(model, **options)
        module.forward = _counted(model.__call__, settings)
        return module

    return compile


def _counted(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    met = repeated.Met(function, (_kind(function), settings))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        machine = state.machine()
        if machine is None or _running or not machine.devices or pieces.HERE.on_host:
            return function(*args, **kwargs)
        if _kind(function) in _plain.get(machine, ()):
            return function(*args, **kwargs)
        if hooks := _hooks_inside(function):
            if settings.fullgraph and any(map(_asks_for_context, hooks)):
                _refuse(function, "a hook inside of it asks a ContextVar, which dynamo cannot trace")
            _tell(
                f"the memory of {_called(function)} is that of its code as it runs, not as torch.compile has it: hooks "
                "inside of it may hand out what it computes"
            )
            return function(*args, **kwargs)
        run = _Run(machine, function, settings, args, kwargs)
        if machine.repeats and machine.shapes:
            known, own = met.find(run.given, run.form, run.device)
            if known is not None and (own or machine.repeats == "alike"):
                return met.again(machine, run.device, known, run.given)
            run.met, run.like = met, known
            run.looking = looked_at.Looking(function) if known is None else None
        try:
            return run.result()
        finally:
            run.recorder = None  # they know each other: nothing is to wait for the garbage collector

    call._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return call


def _hooks_inside(function: Any) -> list[Any]:
    """Who listens to a part of the module: by its results a graph gets out that is not the piece's own.

    transformers collects so what routers decide, for the loss that balances experts.
    """
    owner = getattr(function, "__self__", function)
    parts = owner.modules() if isinstance(owner, nn.Module) else ()
    return [hook for part in parts if part is not owner for hook in part._forward_hooks.values()]


def _asks_for_context(hook: Any) -> bool:
    """Whether a hook reads a ContextVar, itself or held by an object (as that of transformers is), and this torch's
    dynamo cannot trace that."""
    from torch._dynamo import source

    if not inspect.isfunction(hook) or hasattr(source, "ContextVarGetSource"):
        return False
    known = inspect.getclosurevars(hook)
    read = (*known.globals.values(), *known.nonlocals.values())
    held = (
        value for one in read if not inspect.ismodule(one) for value in getattr(one, "__dict__", {}).values()
    )
    return any(isinstance(value, ContextVar) for value in (*read, *held))


def _refuse(function: Any, why: str) -> NoReturn:
    from torch._dynamo.exc import Unsupported

    raise Unsupported(f"torch.compile with fullgraph=True cannot compile {_called(function)}: {why}")


def is_running() -> bool:
    """Whether a compiled piece runs, and is being written down."""
    return bool(_running)


def by_inductor() -> bool:
    """Whether inductor compiles the piece that runs."""
    return bool(_running) and _running[-1].backend == "inductor"


def launched(name: str, tensors: list[Tensor], written: tuple[int, ...]) -> None:
    """A kernel that is no operation of torch was launched in the piece that runs."""
    _running[-1].launched(name, tensors, written)


def broken(why: str) -> None:
    """The piece that runs, if any, does what no compiler takes into a graph."""
    if _running and _running[-1].on:
        _running[-1].stop(why)


def _read(name: str) -> None:
    if _running and _running[-1].on:
        _running[-1].read(name)


ABOVE.read = _read


class _Run:
    """One call of a compiled function."""

    def __init__(self, machine: Machine, function: Any, settings: Settings, args: Any, kwargs: Any) -> None:
        self.machine, self.function, self.settings = machine, function, settings
        self.given, self.form = pytree.tree_flatten((args, kwargs))
        self.device = _device_of(machine, function, self.given)
        self.recorder: Any = None
        self.met: repeated.Met | None = None
        """Who is to know what comes of it, so that it need not be run again."""
        self.looking: looked_at.Looking | None = None
        self.like: repeated.Repeat | None = None
        """What came of a layer that is like this one in all that it looks at."""

    def result(self) -> Any:
        outside = looked_at.outside_of(self.given, self.device) if self.met is not None else None
        asked = sum(self.machine.asked.values())
        with ExitStack() as undo:
            self.aside = undo.enter_context(pieces.aside(self.device))
            self.recorder = Recorder(self.aside, self._broken, self.settings.backend)
            entered = self._entered()
            self.saved = undo.enter_context(_saved_here())
            undo.enter_context(_compiling())
            undo.callback(register_optimizer_step_pre_hook(_capturable).remove)
            _running.append(self.recorder)
            undo.callback(_running.pop)
            args, kwargs = pytree.tree_unflatten(entered, self.form)
            with self.recorder, self.looking.on() if self.looking is not None else nullcontext():
                out = self.function(*args, **kwargs)
            returned, form = pytree.tree_flatten(out)
            pairs = [(twin, own) for twin, own in zip(entered, self.given, strict=True) if twin is not own]
            written = [pair for pair in pairs if pair[0]._version and pair[0].requires_grad]
            results = [*returned, *(twin for twin, _ in written)]
            plan = self._plan(results) if self.recorder.on else None
            if isinstance(plan, str):
                _plain.setdefault(self.machine, set()).add(_kind(self.function))
                self._broken(plan, False)
        for twin, own in pairs:
            own._block.unknown |= twin._block.unknown
            if twin._version and not twin.requires_grad:
                torch.autograd.graph.increment_version(own)
        if isinstance(plan, Plan):
            left = self._count_left_behind(plan, results)
            quiet = not left and not written and asked == sum(self.machine.asked.values())
            if outside is not None and quiet and not any(twin._version for twin, _ in pairs):
                self._learn(plan, outside, entered, returned, form)
            results = self._counted(plan, results, pairs)
        owners = {id(twin): own for twin, own in pairs}
        for (_, own), new in zip(written, results[len(returned) :], strict=True):
            own.copy_(new)
        given_back = [owners.get(id(value), value) for value in results[: len(returned)]]
        return pytree.tree_unflatten(given_back, form)

    def _count_left_behind(self, plan: Plan, results: list[Any]) -> int:
        """What the code made and put somewhere (an optimizer its state) lives on, though it is no result."""
        if plan.backward is not None:
            return 0  # what autograd keeps cannot be told from it
        given_out = {id(value._block) for value in results if value.__class__ in VIRTUAL}
        left = [tensor for tensor in self.recorder.alive() if id(tensor._block) not in given_out]
        for tensor in left:
            pieces.count_now(tensor)
        return len(left)

    def _learn(
        self, plan: Plan, outside: looked_at.Seen, entered: list[Any], returned: list[Any], form: Any
    ) -> None:
        """Have it known what came of this run."""
        assert self.met is not None
        if self.looking is None:
            if self.like is not None and self.like.plan is plan:
                self.met.learn(self.like)
            return
        fresh = self._fresh(returned)
        ran = repeated.Ran(
            function=self.function,
            device=self.device,
            given=self.given,
            entered=entered,
            form=self.form,
            inputs=self.recorder.record.inputs,
            fresh=fresh,
            returned=returned,
            form_returned=form,
            plan=plan,
            trained=self.inputs(fresh)[1],
        )
        if (repeat := repeated.learnt(ran, outside, self.looking)) is not None:
            self.met.learn(repeat)

    def _entered(self) -> list[Any]:
        """The arguments as tensors of their own: what the code keeps of them is not what its compiled form keeps."""
        twins: dict[int, Any] = {}
        self.entries: dict[int, Any] = {}
        for value in self.given:
            if id(value) in twins:
                continue
            if (
                value.__class__ in VIRTUAL
                and not isinstance(value, nn.Parameter)
                and value._slot is self.device
            ):
                wanted = value.requires_grad and torch.is_grad_enabled()
                entry = pieces.Enter.apply(value) if wanted else None
                made = twins[id(value)] = pieces.twin(value) if entry is None else pieces.Enter.apply(entry)
                self.entries[id(made)] = entry
        return [twins.get(id(value), value) for value in self.given]

    def _broken(self, why: str, breaks: bool) -> None:
        """What lives is counted from here on, as the code runs. Where dynamo ends a graph, a whole one is refused."""
        if breaks and self.settings.fullgraph:
            _refuse(self.function, why)
        if self.saved is not None:
            self.saved.hand_over()
        self.device.aside = None
        for tensor in self.recorder.alive():
            pieces.count_now(tensor)
        _tell(
            f"the memory of {_called(self.function)} is that of its code as it runs, not as torch.compile has it: {why}"
        )

    def _plan(self, results: list[Any]) -> Plan | str:
        recorder, record = self.recorder, self.recorder.record
        fresh = self._fresh(results)
        numbers = tuple(recorder.number(value) for value in fresh)
        trained = tuple(value.requires_grad for value in fresh)
        key = record.key(), numbers, trained, self.settings, _functorch_settings()
        if key not in _plans:
            _plans[key] = _Planning(self, fresh).plan()
        return _plans[key]

    def _fresh(self, results: list[Any]) -> list[Any]:
        """The results that are made by the piece, each once."""
        found = {
            id(value): value
            for value in results
            if value.__class__ in VIRTUAL and value._slot is self.device and self._is_made(value)
        }
        return list(found.values())

    def _is_made(self, value: Any) -> bool:
        given = {
            id(tensor._block)
            for tensor in self.recorder.record.inputs.values()
            if tensor.__class__ in VIRTUAL
        }
        return id(value._block) not in given or bool(value._version and value.requires_grad)

    def _counted(self, plan: Plan, results: list[Any], pairs: list[tuple[Any, Any]]) -> list[Any]:
        """The results, counted as the plan says, with the piece as the one node of their history."""
        fresh = self._fresh(results)
        inputs, trained = self.inputs(fresh)
        owners = {id(twin): own for twin, own in pairs}
        blocks = pieces.run_through(plan.forward, self.device, {})
        made = {
            id(value): pieces.outside(value, blocks.get(buffer))  # type: ignore[arg-type]
            for value, buffer in zip(fresh, plan.forward.results, strict=False)
        }
        if trained:
            piece = Piece(plan, self.device, trained, self.targets(inputs))
            record = self.recorder.record
            kept = [owners.get(id(record.inputs[n]), record.inputs[n]) for n in plan.kept_inputs]
            sources = [owners.get(id(value), value) for value in inputs]
            tensors = pieces.kept_tensors(self.machine, piece, blocks)
            outs = pieces.Node.apply(piece, tensors, kept, [made[id(value)] for value in trained], *sources)
            made |= {id(value): out for value, out in zip(trained, outs, strict=True)}
            # What nobody keeps (under a checkpoint) goes with the list, from its end, as with torch's list of results.
            blocks.clear()
        return [made.get(id(value), value) for value in results]

    def inputs(self, fresh: list[Any]) -> tuple[list[Any], list[Any]]:
        """What gets a gradient, and which of the results give one."""
        trained = [value for value in fresh if value.requires_grad]
        found = [value for value in self.recorder.record.inputs.values() if value.requires_grad]
        return found if trained else [], trained

    def targets(self, inputs: list[Any]) -> list[Any]:
        """The same for autograd: an argument as it came in, whatever was written to it since."""
        return [self.entries.get(id(value), value) for value in inputs]


class _Planning:
    """The plan of a piece that is met for the first time."""

    def __init__(self, run: _Run, fresh: list[Any]) -> None:
        self.run, self.fresh, self.recorder = run, fresh, run.recorder
        self.length = len(run.recorder.record.entries)

    def plan(self) -> Plan | str:
        record, device = self.recorder.record, self.run.device
        others = (v for v in record.inputs.values() if v.__class__ in VIRTUAL and v._slot.index != state.HOST)
        if any(value._slot is not device for value in others):
            return "it computes on several GPUs"
        self.outputs = [self.recorder.number(value) for value in self.fresh]
        self.tangents: list[int] = []
        self.gradients: list[int | None] = []
        inputs, trained = self.run.inputs(self.fresh)
        if trained:
            self._try_backward(inputs, trained)
            if not self.recorder.on:
                return "its backward pass cannot be compiled"
        with functions.switched_off(), taken_away():
            backend = self.run.settings.backend
            plan = self._made() if backend == "inductor" else self._by(backend)
        if isinstance(plan, Plan) and plan.backward is not None and self.run.machine.shapes:
            return repeated.gradients_of(self.found, plan)
        return plan

    def _try_backward(self, inputs: list[Any], trained: list[Any]) -> None:
        drawn = torch.random.get_rng_state()
        given = [torch.zeros_like(value) for value in trained]
        self.tangents = [self.recorder.number(value) for value in given]
        with self.recorder:
            found = pieces.gradients(trained, self.run.targets(inputs), given, again=True)
        self.gradients = [None if value is None else self.recorder.number(value) for value in found]
        self.found = found
        torch.random.set_rng_state(drawn)

    def _made(self) -> Plan | str:
        record = self.recorder.record
        try:
            cut = joint_graph.cut(record, self.outputs, self.tangents, self.gradients)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
            first = next(iter(str(error).splitlines()), "")[:200]
            return f"torch cannot make its graph ({type(error).__name__}: {first})"
        inputs = [number for number in record.inputs if number not in set(self.tangents)]
        plan = pieces.plan_of(cut, inputs, torch.device("cuda", self.run.device.index))
        if plan.unsure is not None:
            _tell(
                f"which buffers the compiled form of {_called(self.run.function)} has is estimated: inductor could not "
                f"be asked ({plan.unsure})"
            )
        return plan

    def _by(self, backend: Any) -> Plan | str:
        """As a backend of the program's own has it made: it calls inductor, under settings of its own."""
        called = getattr(backend, "__name__", str(backend))
        if not callable(backend):
            return f"its backend is {called}"
        from torch._inductor import compile_fx, config

        found: list[Plan | str] = []

        def in_its_place(graph: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            found.append(self._made())
            return graph

        graph = joint_graph.plain(self.recorder.record, self.outputs, self.length)
        with ExitStack() as undo:
            undo.enter_context(config.patch(compile_threads=1))  # no processes for what nobody compiles
            state.replace(undo, compile_fx, "compile_fx", in_its_place)
            backend(graph, [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
        return found[0] if found else f"its backend {called} does not call inductor"


def _functorch_settings() -> tuple[Any, ...]:
    from torch._functorch import config

    return (
        config.activation_memory_budget,
        config.aggressive_recomputation,
        config.treat_parameters_as_free_to_save,
    )


def _device_of(machine: Machine, function: Any, given: list[Any]) -> VirtualDevice:
    owner = getattr(function, "__self__", function)
    parameters = owner.parameters() if isinstance(owner, nn.Module) else ()
    for tensor in (*given, *parameters):
        if tensor.__class__ in VIRTUAL and tensor._slot.index != state.HOST:
            slot: VirtualDevice = tensor._slot
            return slot
    return machine.at(None)


@contextmanager
def _compiling() -> Iterator[None]:
    """torch.compiler.is_compiling() is true, as it is for code that is traced."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _capturable(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """What torch.compile does to an optimizer before it takes its step into a graph: its counters are on the GPU."""
    for group in optimizer.param_groups:
        if "capturable" not in group or not all(parameter.is_cuda for parameter in group["params"]):
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            counter = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(counter, Tensor) and not counter.is_cuda:
                optimizer.state[parameter]["step"] = counter.to(parameter.device)


@contextmanager
def _saved_here() -> Iterator[_Saved | None]:
    """Around a piece for which hooks are set for what autograd keeps (checkpointing, offloading): see `_Saved`."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        yield None
        return
    saved = _Saved(*hooks)
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved
    finally:
        saved.waiting = []


class _Kept:
    """What stands in autograd's graph for a tensor that it keeps."""

    def __init__(self, value: Any) -> None:
        self.value, self.packed = value, False


class _Saved:
    """Keeps what autograd keeps of a piece: the hooks of the program are for what its compiled form keeps.

    Where it turns out that the piece is counted as it runs, they are handed all that was kept, and what comes later.
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self._pack, self._unpack, self._over = pack, unpack, False
        self.waiting: list[_Kept] = []
        """All of it, in its order, by which checkpoints know it again; also what nothing else keeps any more."""

    def pack(self, value: Any) -> _Kept:
        kept = _Kept(_without_history(value))
        if self._over:
            self._hand_over(kept)
        else:
            self.waiting.append(kept)
        return kept

    def unpack(self, kept: _Kept) -> Any:
        return self._unpack(kept.value) if kept.packed else kept.value

    def hand_over(self) -> None:
        self._over = True
        waiting, self.waiting = self.waiting, []
        for kept in waiting:
            self._hand_over(kept)

    def _hand_over(self, kept: _Kept) -> None:
        with torch.no_grad():
            kept.value, kept.packed = self._pack(kept.value), True


def _without_history(value: Any) -> Any:
    """What autograd keeps of a node's own result must not hold the node: nobody would free such a circle.

    A graph that no backward pass goes through, as that of a checkpointed forward pass, would stay for ever.
    """
    made_here = _running and value.__class__ in VIRTUAL and _running[-1].knows(value)
    if not made_here or value.grad_fn is None:
        return value
    made = wrap(value.payload, value._slot, value._block)
    made.__dict__.update({n: v for n, v in value.__dict__.items() if n not in INTERNAL})
    return made


def _kind(function: Any) -> Any:
    return getattr(function, "__func__", function), type(getattr(function, "__self__", None))


def _called(function: Any) -> str:
    owner = getattr(function, "__self__", function)
    return (
        type(owner).__name__
        if isinstance(owner, nn.Module)
        else getattr(function, "__qualname__", str(function))
    )


def _tell(text: str) -> None:
    machine = state.machine()
    if machine is None or machine.observer is None or text in _told.setdefault(machine, set()):
        return
    _told[machine].add(text)
    machine.observer.note(text)
