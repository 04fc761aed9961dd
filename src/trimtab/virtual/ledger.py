"""Every allocation and release on one virtual GPU in order, and what follows: peaks by phase, kinds, a timeline.

Events are numbers in an array; what they mean is worked out when somebody asks (replay.py). A phase is kept as its
stretch with the highest peak (`Lap`), so that a long run takes no more memory than a short one. Never decides what an
allocation costs: allocator.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from trimtab.virtual import places, replay
from trimtab.virtual.allocator import Allocator
from trimtab.virtual.origin import Handle
from trimtab.virtual.places import Place
from trimtab.virtual.replay import Lap, Timeline

KINDS = replay.KINDS
LARGEST_REST = (20 << 20) + 512
"""An allocation of so many bytes reserves at most so much more."""
LONGEST = 1 << 19
"""Events in one lap at most."""


@dataclass
class Peak:
    """The highest use of a device in one phase, what it was made of and where it came about."""

    phase: str
    peak_bytes: int
    reserved_bytes: int
    kinds: dict[str, int]
    op: str = ""
    module: str = ""
    where: Handle | None = None
    """The user's line, and below it the library's: `origin.resolve` gives file and line."""
    inside: Handle | None = None


class Device(Protocol):
    """What the ledger knows of its device: see state.py."""

    index: int
    pool: Allocator
    made: int
    held: int
    watch: int
    room: int
    apart: bool
    log: Callable[[int], None]


class Ledger:
    """The book of one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kinds: dict[int, str] = {}
        """What was told of allocations, by their numbers."""
        self.lap = Lap("load", {}, 0, 0)
        self.kept: dict[str, Lap] = {}
        """Of each phase the lap with the highest peak, in the order of the phases."""
        self.reserved: dict[str, int] = {}
        self.places: dict[str, Place] = {}
        """Of each phase where the use last rose by one part in 256."""
        self.part = ""
        """The part of a step that is under way."""
        self.modules: Iterable[nn.Module] = ()
        """Modules that were moved or called: what they hold are weights."""

    def begin(self, phase: str) -> None:
        """What is allocated from now on belongs to this phase."""
        if phase != self.lap.phase:
            self._turn(phase)
            self.device.watch = 0

    def step_ends(self) -> None:
        """A step of a training is complete: what comes is another stretch of its phase, or the next phase."""
        if self.lap.phase in ("load", "first step"):
            self.begin("steady step")
        else:
            self._turn(self.lap.phase)

    def mark(self, name: str) -> None:
        """A part of the step begins: "forward", "backward", "optimizer"; "" for none of them."""
        self.part = name
        self.note(name)

    def note(self, name: str) -> None:
        """As `mark`, of something within a part: "recompute" and "recomputed" in a backward pass."""
        self.lap.marks.append((len(self.lap.events), name))

    def tell(self, held: Any, kind: str) -> None:
        """The memory of a tensor (or a block) is of this kind, also after its storage was freed and made again."""
        block = getattr(held, "_block", held)
        block.kind = kind
        if block.nbytes:
            self.kinds[block.serial] = kind

    def settle(self) -> None:
        """Let the allocator carry out what was noted."""
        device, lap = self.device, self.lap
        pool = device.pool
        if device.index == _HOST:
            self._open(Lap("", {}, device.made, 0))
            device.room = LONGEST * LARGEST_REST
            return
        try:
            pool.replay(lap)
        finally:
            settings = pool.settings
            bounded = not any(settings.divisions) and settings.large_segment + 512 <= LARGEST_REST
            bounded &= not device.apart
            device.room = min(pool.limit - pool.both.reserved, LONGEST * LARGEST_REST) if bounded else 0
        if len(lap.events) > LONGEST and lap is self.lap:
            self._turn(lap.phase)

    def look(self) -> None:
        """The use rises: note who allocates."""
        device = self.device
        device.watch = device.held + (device.held >> 8)
        if device.index != _HOST:
            self.places[self.lap.phase] = places.here()

    def peaks(self, names: dict[int, str] | None = None) -> list[Peak]:
        """The highest use in each phase, in order. `names`: those of the modules, where they are known already."""
        self.settle()
        self._tell_weights()
        found, laps = [], self._laps()
        if names is None:
            names = places.names(self.modules) if laps else {}
        for phase, lap in laps.items():
            place = self.places.get(phase, Place())
            peak = Peak(
                phase,
                lap.peak,
                max(lap.reserved, self.reserved.get(phase, 0)),
                replay.at_peak(lap, lap.kinds | self.kinds),
                place.op,
                places.name_of(place, names),
                place.where,
                place.inside,
            )
            found.append(peak)
        return found

    def timeline(self, phase: str, points: int = 400) -> Timeline:
        """The bytes of each kind over the stretch of a phase that has its peak, at most so many points."""
        self.settle()
        self._tell_weights()
        lap = self._laps()[phase]
        return replay.timeline(lap, lap.kinds | self.kinds, points)

    def _tell_weights(self) -> None:
        kinds, device = self.kinds, self.device
        if not device.made:
            return
        for module in _with_parts(self.modules):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                for block in blocks_of(tensor) if tensor is not None else ():
                    if block.device is device and block.serial not in kinds:
                        self.tell(block, "weights")

    def _laps(self) -> dict[str, Lap]:
        """The lap that stands for each phase, the one under way included."""
        laps, lap = dict(self.kept), self.lap
        if (lap.events or lap.peak) and (lap.phase not in laps or lap.peak > laps[lap.phase].peak):
            laps[lap.phase] = lap
        return laps

    def _turn(self, phase: str) -> None:
        """Close the lap under way and open the next one."""
        pool = self.device.pool
        with pool.lock:
            if pool.busy:
                return  # a finalizer inside of the allocator's work: the lap goes on
            lap, following = self.lap, Lap(phase, {}, 0, 0)
            self.device.log = following.events.append  # what other threads note from now on belongs there
            pool.replay(lap)
            self.kept = self._laps()
            self.reserved[lap.phase] = max(self.reserved.get(lap.phase, 0), lap.reserved)
            if self.kept.get(lap.phase) is lap:
                self._tell_weights()
                lap.kinds = dict(self.kinds)
            following.held = {number: piece.size for number, piece in pool.live.items()}
            following.first = following.forward = pool.number
            if self.part == "forward":
                following.forward = replay.forward_begins(lap)
            following.peak, following.reserved = pool.both.allocated, pool.both.reserved
            self.kinds = {
                n: kind for n, kind in self.kinds.items() if n >= pool.number or n in following.held
            }
            self.lap = following

    def _open(self, lap: Lap) -> None:
        self.lap = lap
        self.device.log = lap.events.append

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self


def _with_parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Modules and all that is inside of them, each once: of a fused layer the parts are never called themselves."""
    seen: set[int] = set()
    left = list(modules)
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            left += [part for part in module._modules.values() if part is not None]


_HOST = 127


def blocks_of(tensor: Any) -> Iterator[Any]:
    """The blocks behind a tensor: one of a virtual tensor, those of its parts where it wraps others (a sharded one)."""
    block = tensor.__dict__.get("_block")
    if block is not None:
        yield block
    elif hasattr(type(tensor), "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from blocks_of(getattr(tensor, name))
