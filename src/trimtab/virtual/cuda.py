"""The face that `torch.cuda` and `torch.accelerator` show while virtual GPUs are in force.

Most of torch.cuda is Python over a thin C layer (`torch._C._cuda_*`), which a CPU build lacks. We put that layer in
place and let torch's own Python run above it, so that argument checks, lazy initialisation and the wording of errors
are torch's. Never computes anything: no kernels, no graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from trimtab.virtual import build_names, memory_stats, nvml, sdp_backends, streams
from trimtab.virtual.cuda_graphs import Graph
from trimtab.virtual.processes import in_bad_fork, initialise, visible
from trimtab.virtual.properties import properties_of
from trimtab.virtual.state import Machine, NotSimulated, Patch
from trimtab.virtual.wording import words

CUDA_VERSION = "12.8"  # what a CPU build answers for torch.version.cuda; a CUDA build keeps its own
NCCL_VERSION = (2, 27, 3)
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


# Functions of `torch._C` that have nothing to do here.
_NOTHING = words(
    """
    _cuda_ipc_collect _cuda_sleep _cuda_set_sync_debug_mode _host_emptyCache
    _cuda_resetPeakHostMemoryStats
    _cuda_resetAccumulatedHostMemoryStats _accelerator_emptyHostCache
    """
)
_EXCHANGING = words(
    """
    _cuda_exchangeDevice _cuda_maybeExchangeDevice _accelerator_exchangeDevice _accelerator_maybeExchangeDevice
    """
)
_NVTX = words("rangePushA rangePop rangeStartA rangeEnd markA deviceRangeStart deviceRangeEnd")


class Layer:
    """The functions of `torch._C` that torch.cuda and torch.accelerator stand on, for one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.memory = memory_stats.Statistics(machine)

    def init(self) -> None:
        initialise(self.machine)

    def set_device(self, index: int) -> None:
        if index >= 0:
            self.synchronize()
            self.machine.current_device = self.machine.at(index).index

    def clear_workspaces(self) -> None:
        for device in self.machine.devices:
            device.workspaces.clear()

    def exchange_device(self, index: int) -> int:
        before = self.machine.current_device if index >= 0 else -1
        self.set_device(index)
        return before

    def synchronize(self, *_: Any) -> None:
        """Nothing is under way that could be waited for; but it is a use of the GPU."""
        if not self.machine.ready:
            torch.cuda._lazy_init()

    def current_stream(self, index: int) -> tuple[int, int, int]:
        stream = streams.current(self.machine.at(index).index)
        return stream.stream_id, stream.device_index, stream.device_type

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        streams.select(streams.Stream(stream_id=stream_id, device_index=device_index))

    def functions(self) -> dict[str, Any]:
        """Names on `torch._C`: those under torch.cuda, those under torch.accelerator, copies between devices."""
        return {
            **build_names.names(),
            **sdp_backends.names(),
            **dict.fromkeys(_NOTHING, lambda *_, **__: None),
            **dict.fromkeys(_EXCHANGING, self.exchange_device),
            "_cuda_init": self.init,
            "_cuda_getDeviceCount": lambda: len(visible(self.machine)),
            "_cuda_getDevice": lambda: self.machine.current_device,
            "_cuda_setDevice": self.set_device,
            "_cuda_isInBadFork": lambda: in_bad_fork(self.machine),
            "_cuda_getArchFlags": lambda: ARCHITECTURES,
            "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
            "_cuda_synchronize": self.synchronize,
            "_cuda_clearCublasWorkspaces": self.clear_workspaces,
            "_cuda_getCurrentStream": self.current_stream,
            "_cuda_getDefaultStream": lambda index: (
                0,
                self.machine.at(index).index,
                streams.CUDA_DEVICE_TYPE,
            ),
            "_cuda_getCurrentRawStream": streams.current_id,
            "_cuda_setStream": self.set_stream,
            "_cuda_isCurrentStreamCapturing": lambda: False,
            "_cuda_get_sync_debug_mode": lambda: 0,
            "_cuda_getCompiledVersion": lambda: 12080,
            "_cuda_memoryStats": self.memory.nested,
            "_cuda_resetPeakMemoryStats": self.memory.reset_peak,
            "_cuda_resetAccumulatedMemoryStats": self.memory.reset_accumulated,
            "_cuda_emptyCache": self.memory.empty_cache,
            "_cuda_setMemoryFraction": self.memory.set_fraction,
            "_cuda_getMemoryFraction": self.memory.fraction,
            "_cuda_memorySnapshot": self.memory.snapshot,
            "_cuda_record_memory_history": self.memory.record,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_hostMemoryStats": dict,
            "_has_cuda": True,
            "_nccl_version": lambda: NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2],
            "_nccl_version_suffix": lambda: b"",
            "_accelerator_getAccelerator": lambda: torch.device("cuda"),
            "_get_accelerator": lambda *_: torch.device("cuda"),
            "_accelerator_getDeviceIndex": lambda: self.machine.current_device,
            "_accelerator_setDeviceIndex": self.set_device,
            "_accelerator_getStream": lambda index: streams.current(self.machine.at(index).index),
            "_accelerator_setStream": streams.select,
            "_accelerator_synchronizeDevice": self.synchronize,
            "_accelerator_isAllocatorInitialized": lambda: self.machine.initialised,
            "_accelerator_emptyCache": self.memory.empty_cache,
            "_accelerator_getDeviceStats": self.memory.nested,
            "_accelerator_resetPeakStats": self.memory.reset_peak,
            "_accelerator_resetAccumulatedStats": self.memory.reset_accumulated,
            "_accelerator_setAllocatorSettings": self.memory.configure,
            "_accelerator_getMemoryInfo": self.memory.info,
            "_accelerator_getDeviceCapability": lambda _: {
                "supported_dtypes": {
                    value for value in vars(torch).values() if isinstance(value, torch.dtype)
                }
            },
            "_broadcast": lambda tensor, indices: [tensor.to(torch.device("cuda", i)) for i in indices],
            "_broadcast_out": _broadcast_out,
            "_broadcast_coalesced": _broadcast_coalesced,
            "_scatter": _scatter,
            "_gather": _gather,
        }

    def runtime(self) -> SimpleNamespace:
        """What `torch.cuda.cudart()` gives: the CUDA runtime, as far as training scripts use it."""
        return SimpleNamespace(
            **dict.fromkeys(words("cudaProfilerStart cudaProfilerStop cudaDeviceSynchronize"), lambda: 0),
            cudaMemGetInfo=self.memory.info,
            cudaGetErrorString=lambda code: f"error {code}",
            cudaError=SimpleNamespace(success=0),
        )


def _no_nested(native: Callable[..., Any]) -> Callable[..., Any]:
    """Nested tensors keep their device where it must be a real one; those on the CPU go on as ever."""

    @functools.wraps(native)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        asked = [kwargs.get("device"), *(getattr(part, "device", None) for part in (data, *data))]
        if any(device is not None and torch.device(device).type == "cuda" for device in asked):
            raise NotSimulated(
                "Nested tensors are not simulated by virtual GPUs; pad the batches for a rehearsal."
            )
        return native(data, *args, **kwargs)

    return make


def _broadcast_out(tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    for target in out:
        target.copy_(tensor)
    return list(out)


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int = 0
) -> list[list[torch.Tensor]]:
    return [[t.to(torch.device("cuda", i)) for t in tensors] for i in devices]


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Any = None, dim: int = 0, streams: Any = None
) -> list[torch.Tensor]:
    chunks = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return [chunk.to(torch.device("cuda", i)) for chunk, i in zip(chunks, devices, strict=False)]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None = None) -> torch.Tensor:
    target = "cuda" if destination is None else "cpu" if destination == -1 else f"cuda:{destination}"
    return torch.cat([t.to(target) for t in tensors], dim)


def _eager_compile(machine: Machine) -> Callable[..., Any]:
    """torch.compile without its compiler: there is no kernel to generate, so compiled code runs as it is written."""
    native = torch.compile

    @functools.cache  # not before it is asked for: it imports the compiler
    def take_compiler_away() -> None:
        machine.undo.push(torch.compiler.set_stance("force_eager"))

    @functools.wraps(native)
    def compile(*args: Any, **kwargs: Any) -> Any:
        take_compiler_away()
        return native(*args, **kwargs)

    return compile


def _host_profiler() -> Callable[..., None]:
    """Profiling the GPU finds no kernels; only the host's side is recorded."""
    native = torch.autograd.profiler.profile.__init__

    @functools.wraps(native)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("use_device", "use_cuda"):
            kwargs.pop(name, None)
        native(self, *args, **kwargs)

    return __init__


def _lazy_init_for(machine: Machine) -> Callable[[], None]:
    native = torch.cuda._lazy_init

    def _lazy_init() -> None:
        if in_bad_fork(machine):
            initialise(machine)  # reports the fault; comes back only if the machine repairs
        native()

    return _lazy_init


def patches(machine: Machine) -> list[Patch]:
    """What to set where, so that torch.cuda and torch.accelerator show this machine."""
    layer, lazy_init = Layer(machine), _lazy_init_for(machine)
    cuda = torch.cuda
    result: list[Patch] = [(streams, "BOOK", streams.Book())]
    result += [(torch._C, name, value) for name, value in layer.functions().items()]
    result += [(module, "_lazy_init", lazy_init) for module in (cuda, cuda.random, cuda.memory)]
    result += [
        (owner, kind.__name__, kind)
        for owner in (torch, cuda, cuda.streams)
        for kind in (streams.Stream, streams.Event)
    ]
    result += [
        # Names that torch.cuda bound to a fall-back when it was imported without CUDA.
        (cuda, "_exchange_device", layer.exchange_device),
        (cuda, "_maybe_exchange_device", layer.exchange_device),
        (cuda, "_is_in_bad_fork", lambda: in_bad_fork(machine)),
        (cuda, "_get_device_properties", lambda index: properties_of(machine.at(index))),
        (cuda, "_cudart", layer.runtime()),
        (cuda, "_device_count_nvml", lambda: -1),
        (cuda, "_cached_device_count", None),
        (cuda, "_initialized", machine.initialised),
        # Calls that wait for initialisation would reseed in the middle of a run; here they need not wait.
        (cuda, "_queued_calls", []),
        *((module, "_lazy_call", lambda callable, **_: callable()) for module in (cuda, cuda.random)),
        (torch, "compile", _eager_compile(machine)),
        (torch.autograd.profiler.profile, "__init__", _host_profiler()),
        *memory_stats.pool_patches(machine),
        *nvml.patches(machine),
        (cuda, "CUDAGraph", Graph),
        (cuda.graphs, "CUDAGraph", Graph),
        (cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False),
        *(
            (torch.nested, name, _no_nested(getattr(torch.nested, name)))
            for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged")
        ),
        (cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(_NVTX, lambda *_, **__: 0))),
        # What these two would ask of the build, a warning included, has no bearing on a virtual GPU.
        (cuda.nccl, "is_available", lambda tensors: False),
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
    ]
    if torch.version.cuda is None:
        result.append((torch.version, "cuda", CUDA_VERSION))
    return result
