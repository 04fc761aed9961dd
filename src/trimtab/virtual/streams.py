"""Streams and events of virtual GPUs: they order nothing, because every virtual operation is finished when it returns.

Never simulates asynchrony: a missing wait between two streams is not found. An event's time is the host's clock. What
they decide is memory: each thread selects streams of its own, and what was freed on one is not handed out on another.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.virtual.state import Machine, NotSimulated, VirtualDevice, machine

CUDA_DEVICE_TYPE = 1  # c10::DeviceType::CUDA


def _index(device: Any) -> int:
    index: int | None = device if device is None or isinstance(device, int) else torch.device(device).index
    in_force = machine()
    return index if index is not None else in_force.current_device if in_force is not None else 0


class _StreamType(type):
    """Lets `isinstance(x, torch.Stream)` go on holding for streams made before the virtual GPUs came."""

    native: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, cls.native)


class _Finished(metaclass=_StreamType):
    """Nothing is ever waited for."""

    def query(self) -> bool:
        return True

    def synchronize(self, *_: Any, **__: Any) -> None:
        """What every other wait is, too."""


class Stream(_Finished):
    """What `torch.cuda.Stream` and `torch.Stream` are while virtual GPUs are in force."""

    native = (torch.Stream,)

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = CUDA_DEVICE_TYPE,
        **_: Any,
    ) -> None:
        self.device_index = device_index if device_index is not None else _index(device)
        self.stream_id = stream_id if stream_id is not None else next(BOOK.numbers)
        self.device_type = device_type
        self.priority = priority
        self._before: list[Stream] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    native_handle = cuda_stream

    def is_capturing(self) -> bool:
        return False

    wait_event = wait_stream = _Finished.synchronize

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event()
        event.record(self)
        return event

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        return (0, -5)

    def __enter__(self) -> Stream:
        self._before.append(current(self.device_index))
        select(self)
        return self

    def __exit__(self, *_: object) -> None:
        select(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.stream_id, self.device) == (other.stream_id, other.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class Event(_Finished):
    """What `torch.cuda.Event` and `torch.Event` are while virtual GPUs are in force."""

    native = (torch.Event,)

    def __init__(self, device: Any = None, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        if isinstance(device, bool):  # torch.cuda.Event takes enable_timing first
            device, enable_timing = None, device
        self.enable_timing = enable_timing
        self.recorded: float | None = None
        self.event_id = self.cuda_event = id(self)
        self.device = torch.device("cuda", _index(device))

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = time.perf_counter()

    wait = _Finished.synchronize

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.recorded is None or end_event.recorded is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event.recorded - self.recorded) * 1000.0

    def ipc_handle(self) -> bytes:
        raise NotSimulated("Virtual GPUs have no event handles to share between processes.")

    def __repr__(self) -> str:
        return f"<torch.cuda.Event device={self.device}>"


class Book:
    """Which stream is selected on which device, by thread, and the numbers to give out; one per installed machine."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.numbers = itertools.count(1)

    @property
    def selected(self) -> dict[int, Stream]:
        """Those of this thread."""
        found: dict[int, Stream] = self._local.__dict__.setdefault("selected", {})
        return found


BOOK = Book()  # replaced by each installation, put back when it ends


def current_id(index: int) -> int:
    """The number of the stream selected on that device."""
    selected = BOOK.selected.get(index)
    return selected.stream_id if selected is not None else 0


def current(index: int) -> Stream:
    """The stream selected on that device; the default stream is number 0."""
    return BOOK.selected.get(index) or Stream(stream_id=0, device_index=index)


def select(stream: Stream) -> None:
    """Make it the current stream of its device, and its device the current one."""
    BOOK.selected[stream.device_index] = stream
    in_force = machine()
    if in_force is not None:
        in_force.current_device = stream.device_index
        device = in_force.at(stream.device_index)
        if stream.stream_id and threading.active_count() > 1:
            _apart(device)
        serve(device)


def serve(device: VirtualDevice) -> None:
    """What is allocated from now on is for the stream of the thread that asks."""
    number = current_id(device.index)
    if device.pool.stream != number:
        device.ledger.settle()
        device.pool.select(number)


def thread_begins(machine: Machine) -> None:
    """Another thread is on the default streams, whatever those before it have selected."""
    for device in machine.devices:
        if device.pool.stream:
            _apart(device)


def _apart(device: VirtualDevice) -> None:
    """Look at every request from now on: threads may take turns."""
    device.apart = True
    device.ledger.settle()


@contextmanager
def default_ones() -> Iterator[None]:
    """Work as another thread would, which has selected no stream."""
    selected, in_force = dict(BOOK.selected), machine()
    device = in_force.current_device if in_force is not None else 0
    for index in selected:
        select(Stream(stream_id=0, device_index=index))
    try:
        yield
    finally:
        for stream in selected.values():
            select(stream)
        if in_force is not None:
            in_force.current_device = device
