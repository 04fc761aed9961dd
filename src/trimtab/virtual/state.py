"""The machine in force: its virtual devices and who listens. Holds state only; what is patched is said elsewhere.

There is at most one machine in force per process. Contexts nest: the inner machine replaces the outer one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch

from trimtab.gpu_models import MIB, nearest
from trimtab.virtual.allocator import Allocator
from trimtab.virtual.ledger import Ledger
from trimtab.virtual.observer import Asked, Observer
from trimtab.virtual.wording import AcceleratorError, runtime_error

OnFault = Literal["raise", "repair"]
Repeats = Literal["", "own", "alike"]
"""Every compiled piece is run; or not one that ran before itself, if on other sizes, when one like it ran on these; or
not one of a layer like one that ran."""
Patch = tuple[object, str, object]
"""An object, the name of an attribute, and what to set it to while a machine is in force."""


HOST = 127
"""The index by which C++ knows tensors on the host that have a shape only."""


def context_bytes(name: str, total_bytes: int, capability: tuple[int, int]) -> int:
    """What CUDA holds of a GPU; of one that is smaller than any there is, an eighth at most."""
    model = nearest(name, f"{capability[0]}.{capability[1]}")
    return min(model.architecture.context_mib * MIB, total_bytes // 8)


class VirtualDevice:
    """One virtual accelerator. Tensors keep a reference to it, so it outlives the context that made it."""

    def __init__(self, index: int, name: str, total_bytes: int, capability: tuple[int, int]) -> None:
        self.index = index
        self.card = index
        """Its number among all GPUs: another than the index where CUDA_VISIBLE_DEVICES hides some."""
        self.name = name
        self.total_bytes = total_bytes
        self.capability = capability
        self.context_bytes = context_bytes(name, total_bytes, capability) if index != HOST else 0
        """What CUDA itself holds from the first use on: its context, and the code of kernels."""
        self.pool = Allocator(total_bytes, self.context_bytes)
        self.ledger = Ledger(self)
        self.made = 0
        """The number of allocations so far; the next one's number."""
        self.held = 0
        """The bytes that tensors hold, before any rounding."""
        self.watch = 0
        """Where they stand beyond this, the ledger asks who allocates."""
        self.room = 0
        """A bound on what can be allocated before it has to be known how much is reserved."""
        self.log: Callable[[int], None] = self.ledger.lap.events.append
        self.aside: VirtualDevice | None = None
        """Where allocations are counted instead, while a compiled piece runs (compiled.py)."""
        self.apart = False  # whether threads may be on different streams of it (streams.py)
        self.used = False  # whether it held anything before the program set its peak back
        self.workspaces: dict[Any, Any] = {}  # what libraries have taken and keep (workspaces.py)
        self.device = torch.device("cuda", index) if index != HOST else torch.device("cpu")
        # What C++ sees: autograd runs meta on the calling thread whatever the index, and keeps the index.
        self.meta = torch.device("meta", index)

    @property
    def allocated(self) -> int:
        """What torch.cuda.memory_allocated says."""
        self.ledger.settle()
        return self.pool.both.allocated

    @property
    def peak(self) -> int:
        """What torch.cuda.max_memory_allocated says."""
        self.ledger.settle()
        return self.pool.both.allocated_peak

    @property
    def reserved(self) -> int:
        """What torch.cuda.memory_reserved says."""
        self.ledger.settle()
        return self.pool.both.reserved

    def __repr__(self) -> str:
        return f"VirtualDevice({self.device}, {self.name!r}, {self.allocated} of {self.total_bytes} bytes)"

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualDevice:
        return self


class Machine:
    """A set of virtual devices with the settings under which they are used."""

    def __init__(
        self,
        count: int,
        *,
        total_bytes: int,
        name: str,
        capability: tuple[int, int],
        observer: Observer | None = None,
        on_fault: OnFault = "raise",
        shapes: bool = False,
        every_rank: bool = False,
    ) -> None:
        self.shapes = shapes
        """Whether big tensors have shapes only, and no values (shapes.py)."""
        self.stands_for_all = shapes and not every_rank
        """Whether this rank is the only one of its groups that runs (lone_rank.py)."""
        self.repeats: Repeats = ""
        """Whether a compiled piece that was met before is run again where shapes alone are rehearsed (repeated.py)."""
        self.host = VirtualDevice(HOST, "host", 1 << 60, (0, 0))
        self.host_elements = 0
        """Of uninitialised memory that was given out on the host, where shapes only are rehearsed."""
        self.hollow_to: Callable[[str | None], None] | None = None
        """Asked before weights without values are written to a file, by its path where that is known; raises where
        they are not to be (hollow_files.py)."""
        self.plain_attention: dict[Any, str] = {}
        """Why attention runs without a fused kernel, by the line (a handle of origin.py) that asks for it."""
        self.asked: dict[Asked, int] = {}
        """Values that were asked of shapes, and how often."""
        self.hidden: tuple[str, ...] = ()
        """Folders of who listens: their lines on the stack are neither the program's nor a library's."""
        self.devices = [VirtualDevice(index, name, total_bytes, capability) for index in range(count)]
        self.observer = observer
        self.on_fault: OnFault = on_fault
        self.initialised = False
        """Whether CUDA would have been initialised in this process (a fork after that is a fault)."""
        self.ready = False
        """Whether this very process has initialised it (false again in a forked child)."""
        self.at_first_use: list[Callable[[], None]] = []
        """To be called when CUDA is initialised: before anything is on a GPU."""
        self.pid = os.getpid()
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """Modules that were moved or called while this machine was in force."""
        self.teller: Any = None
        """Who tells the ledgers what memory is for (kinds.py), where an observer listens."""
        for device in self.devices:
            device.ledger.modules = self.modules
        self.visible_at_install = os.environ.get("CUDA_VISIBLE_DEVICES")
        """A setting that was found, and not made by the program."""
        self.repaired = False
        """Whether a fault in a forward pass was repaired."""
        self.undo = ExitStack()
        """What to do when it is taken out of force."""
        self._local = threading.local()

    @property
    def current_device(self) -> int:
        """The index that `cuda` without an index means; per thread, as on hardware."""
        return getattr(self._local, "current", 0)

    @current_device.setter
    def current_device(self, index: int) -> None:
        self._local.current = index

    def at(self, index: int | None) -> VirtualDevice:
        """The device of an index, None for the current one; raises as CUDA does where there is none."""
        if index is None:
            index = self.current_device
        if index == HOST and self.shapes:
            return self.host
        if not 0 <= index < len(self.devices):
            raise AcceleratorError(
                runtime_error(
                    "invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
                )
            )
        return self.devices[index]


class NotSimulated(NotImplementedError):
    """Something that a GPU can do and a virtual one cannot: it says nothing about the program."""

    def __init__(self, *said: object) -> None:
        super().__init__(*said)
        # Whoever catches it goes another way than on a GPU: the listener is to know even so.
        here = machine()
        if here is not None and here.observer is not None:
            here.observer.not_simulated(str(self))


class InternalError(NotSimulated):
    """A fault of the virtual GPUs themselves, found before it could change a value of the program."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} This is a fault of Trimtab's virtual GPUs, not of the program.")


_stack: list[Machine] = []


def machine() -> Machine | None:
    """The machine in force, or None."""
    return _stack[-1] if _stack else None


def replace(undo: ExitStack, owner: Any, name: str, new: object) -> None:
    """Set an attribute until the stack is closed."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, new)


def is_virtual_device(device: Any) -> bool:
    """Whether a device that reached the dispatcher means a virtual GPU."""
    return device is not None and (
        device.type == "cuda" or (device.type == "meta" and device.index is not None)
    )
