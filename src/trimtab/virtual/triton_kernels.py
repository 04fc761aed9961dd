"""Triton kernels that are launched while virtual GPUs are in force: checked as CUDA would, then run on the payloads.

Where the interpreter cannot run one (code for the GPU itself, too much work), what it writes is made up and the
observer is told; without an observer it is refused. With shapes only, what it writes has no values. No kernel is
compiled, none reaches a real GPU. Triton is never imported before the program has done so.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.virtual import compiled, faults, held_modes, origin, state
from trimtab.virtual.held_modes import past_dispatch
from trimtab.virtual.state import Machine, NotSimulated
from trimtab.virtual.tensor import VIRTUAL
from trimtab.virtual.unknown import forget

ONE_LAUNCH = 20 * 10**9
"""How many nanoseconds of interpreting, as they are counted, one launch may take; and all of a process."""
ALL_LAUNCHES = 6 * ONE_LAUNCH
_COMPILED = (
    "a compiled Triton kernel (its registers, its code) is not simulated by virtual GPUs: none is compiled."
)


_FAKE = (
    "Cannot access data pointer of Tensor (e.g. FakeTensor, FunctionalTensor): argument {} of a Triton kernel has no "
    "memory. If you're using torch.compile/export/fx, it is likely that we are erroneously tracing into a custom "
    "kernel. To fix this, please wrap the custom kernel into an opaque custom op."
)


class _NotThere(NotSimulated, AttributeError):
    """An attribute that only hardware has: who asks first whether it is there is told that it is not."""


class _NotCompiled:
    """What a launch returns: on hardware the compiled kernel."""

    def __getattr__(self, name: str) -> Any:
        raise _NotThere(f"`{name}` of {_COMPILED}")


def set_in_triton(undo: ExitStack) -> None:
    """Put our launch, our tuning and our driver in the place of Triton's."""
    from triton.runtime import autotuner, driver, interpreter, jit

    spent = _Spent()
    state.replace(
        undo, jit.JITFunction, "run", lambda self, *args, **kwargs: launch(spent, self, args, kwargs)
    )
    state.replace(
        undo, interpreter.InterpretedFunction, "run", _interpreted(interpreter.InterpretedFunction.run)
    )
    state.replace(undo, autotuner.Autotuner, "run", _tuned(autotuner.Autotuner.run))
    state.replace(undo, autotuner.Autotuner, "_bench", _programs)
    # Otherwise wrap_triton would hand the launch to torch's tracing, which knows no virtual tensors.
    state.replace(undo, torch._library.triton, "wrap_triton_enabled_default", False)
    virtual = _driver()
    for name in ("_active", "_default"):
        state.replace(undo, driver, name, virtual)


def _driver() -> Any:
    """What Triton asks about the machine: answered by torch.cuda, which shows the virtual one."""
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver

    class VirtualDriver(CudaDriver):
        def __init__(self) -> None:
            # Its own __init__ would compile a library for the CUDA driver.
            GPUDriver.__init__(self)
            self.utils = SimpleNamespace(get_device_properties=_properties, load_binary=_refuse)
            self.launcher_cls = _refuse

    return VirtualDriver()


def _properties(index: int) -> dict[str, int]:
    known: Any = torch.cuda.get_device_properties(index)
    return {
        "max_shared_mem": known.shared_memory_per_block_optin,
        "max_num_regs": known.regs_per_multiprocessor,
        "multiprocessor_count": known.multi_processor_count,
        "warpSize": known.warp_size,
        "sm_clock_rate": known.clock_rate,
        "mem_clock_rate": known.memory_clock_rate,
        "mem_bus_width": known.memory_bus_width,
    }


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotSimulated(_COMPILED[0].upper() + _COMPILED[1:])


def _interpreted(native: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that the program itself has interpreted (TRITON_INTERPRET=1): on the payloads."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), past_dispatch():
            return native(
                self, *_mapped(_payload, args), **{n: _mapped(_payload, v) for n, v in kwargs.items()}
            )

    return run


def _tuned(native: Callable[..., Any]) -> Callable[..., Any]:
    """Choosing a configuration: what was chosen here is forgotten with the machine, since nothing was measured."""
    chosen: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept, kept_on_disk = self.cache, self.cache_results
        self.cache, self.cache_results = chosen.setdefault(self, {}), False
        try:
            return native(self, *args, **kwargs)
        finally:
            self.cache, self.cache_results = kept, kept_on_disk

    return run


def _programs(self: Any, *args: Any, config: Any, **kwargs: Any) -> list[float]:
    """In the place of a measured time: how many programs a configuration starts. Few large ones are soon done."""
    grid = kwargs.get("grid")
    if callable(grid):
        grid = grid({**self.nargs, **kwargs, **config.all_kwargs()})
    count = 1.0
    for size in grid or ():
        count *= size
    return [count] * 3


class _Spent:
    """How much interpreting this process has done, and which kernels were given up."""

    def __init__(self) -> None:
        self.left = ALL_LAUNCHES
        self.given_up: dict[Any, str] = {}


def launch(spent: _Spent, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One launch, `kernel[grid](...)`."""
    machine = state.machine()
    assert machine is not None  # what is set in Triton is taken back with the last machine
    grid = kwargs.pop("grid")
    if kwargs.pop("warmup", False):
        _refuse()
    for hook in kernel.pre_run_hooks:
        hook(*args, **kwargs)
    given = _bound(kernel, args, kwargs)
    if (name := _without_memory(given)) is not None:
        if held_modes.in_force():
            raise RuntimeError(_FAKE.format(name))
        return _NotCompiled()  # no doing of the program: a graph is made of it, and only shapes are asked for
    _check_devices(machine, kernel, given)
    sizes = tuple(operator.index(size) for size in (grid(given) if callable(grid) else grid))
    if not all(sizes):
        return _NotCompiled()
    _tell_compiler(kernel, given)
    if machine.shapes:
        for tensor in _outputs(kernel, given):
            forget(tensor)
        return _NotCompiled()
    reason = _run(spent, kernel, given, sizes)
    if reason is not None:
        _made_up(machine, kernel, given, reason)
    return _NotCompiled()


def _without_memory(given: dict[str, Any]) -> str | None:
    fake = (n for n, value in given.items() if any(isinstance(t, FakeTensor) for t in _tensors(value)))
    return next(fake, None)


def _tell_compiler(kernel: Any, given: dict[str, Any]) -> None:
    """Where the launch is in a piece that is compiled."""
    if compiled.is_running():
        tensors = [tensor for value in given.values() for tensor in _tensors(value)]
        outputs = {id(tensor) for tensor in _outputs(kernel, given)}
        written = tuple(place for place, tensor in enumerate(tensors) if id(tensor) in outputs)
        compiled.launched(kernel.__name__, tensors, written)


def _bound(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults included; settings of the compiler are left out."""
    from triton.backends.nvidia.compiler import CUDAOptions

    names = kernel.signature.parameters
    for name in kwargs:
        if name not in names and name not in CUDAOptions.__dataclass_fields__ and name != "debug":
            raise KeyError(f"Keyword argument {name} was specified but unrecognised")
    bound = kernel.signature.bind(*args, **{n: v for n, v in kwargs.items() if n in names})
    bound.apply_defaults()
    return dict(bound.arguments)


def _check_devices(machine: Machine, kernel: Any, given: dict[str, Any]) -> None:
    """A kernel runs on the current device; memory of another one, or of the host, cannot be reached from there."""
    here = torch.device("cuda", machine.current_device)
    named = [(name, tensor) for name, value in given.items() for tensor in _tensors(value)]
    if torch._C._current_autograd_node() is not None:
        # A backward pass has a thread for each GPU, whose current device it is.
        here = next((tensor.device for _, tensor in named if tensor.device.type == "cuda"), here)
    for place, value in enumerate(given.values()):
        for tensor in _tensors(value):
            if (
                tensor.device == here
                or not tensor.numel()
                or (tensor.device.type == "cpu" and tensor.is_pinned())
            ):
                continue
            message = f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)"
            together = len({t.device for _, t in named}) == 1 and tensor.device.type == "cuda"
            kind = "placement-conflict" if together else "device-mismatch"
            faults.report(kind, message, f"triton.{kernel.__name__}", named, ValueError)
            return


def _run(spent: _Spent, kernel: Any, given: dict[str, Any], sizes: tuple[int, ...]) -> str | None:
    """Run it on the payloads; otherwise the reason why that could not be."""
    if kernel.fn in spent.given_up:
        return spent.given_up[kernel.fn]
    if getattr(kernel, "is_gluon", bool)():
        return "it is written for the GPU itself (Gluon)"
    try:
        from trimtab.virtual.triton_interpreter import Launch
    except (ImportError, AttributeError) as error:
        import triton

        return f"the interpreter of Triton {triton.__version__} is not one that is known here ({error})"
    arguments = {name: _mapped(_payload, value) for name, value in given.items()}
    memory = [_payload(tensor) for value in given.values() for tensor in _tensors(value)]
    if any(tensor.is_meta for tensor in memory):
        return "it was given a tensor without values"
    budget = min(ONE_LAUNCH, spent.left)
    with torch._C.DisableTorchFunction(), past_dispatch():
        started = Launch(kernel, arguments, memory, budget)
        try:
            started.over(sizes)
        except Exception as error:
            # Of the kernel or of the interpreter: which, only a GPU can tell. It is told to whoever listens.
            spent.given_up[kernel.fn] = (
                str(error) if type(error).__module__.startswith("trimtab") else repr(error)
            )
        finally:
            spent.left -= budget - max(started.builder.left, 0)
    return spent.given_up.get(kernel.fn) or started.memory.strayed


def _made_up(machine: Machine, kernel: Any, given: dict[str, Any], reason: str) -> None:
    """Neutral values in the place of what the kernel would have written, told to whoever listens."""
    line = f"{kernel.fn.__code__.co_filename}:{kernel.starting_line_number}"
    text = f"the Triton kernel {kernel.__name__} ({line}) was not run to its end on virtual GPUs: {reason}"
    if machine.observer is None:
        raise NotSimulated(text[0].upper() + text[1:])
    for tensor in _outputs(kernel, given):
        payload = _payload(tensor)
        with torch._C.DisableTorchFunction(), past_dispatch():
            payload.fill_(1 if payload.is_floating_point() else 0)
    users = next((frame for frame, user in origin.stack(1) if user), None)
    at = f"; launched at {users.file}:{users.line}" if users is not None else ""
    machine.observer.unproven(f"{text}{at}; what it writes is made up from there on")


def _outputs(kernel: Any, given: dict[str, Any]) -> Iterator[Tensor]:
    from trimtab.virtual.triton_writes import written

    names = written(kernel)
    for name, value in given.items():
        if name in names:
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument: itself, that of a descriptor or of a wrapper of another type, those of a tuple."""
    base = getattr(value, "base", None)
    if isinstance(value, Tensor):
        yield value
    elif isinstance(base, Tensor):
        yield base
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _payload(tensor: Any) -> Any:
    return tensor.payload if tensor.__class__ in VIRTUAL else tensor


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The argument with tensors changed, also inside descriptors, wrappers of another type and tuples."""
    from triton.runtime.jit import TensorWrapper
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, tuple):
        items = [_mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, TensorWrapper):
        return TensorWrapper(change(value.base), value.dtype)
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=change(value.base))
    return change(value)
